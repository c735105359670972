"""Pictures of schedules, collectives and systems, computed by the code that runs them."""
