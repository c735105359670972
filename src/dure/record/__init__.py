"""Records of runs: counters, timeline, history, checkpoints, and the run folder with them."""
