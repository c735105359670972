"""One run, many runs, and what can be named."""
