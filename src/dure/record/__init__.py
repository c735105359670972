"""What happened: counters, the timeline, the history, checkpoints, and the run folder that holds
them."""
