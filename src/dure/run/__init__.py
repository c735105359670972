"""Training, evaluating, serving, joining and comparing runs."""
