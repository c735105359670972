"""What happened: counters, timeline, history, checkpoints, and the run folder that holds them."""
