"""What tasks, strategies, learners and worlds promise each other."""
