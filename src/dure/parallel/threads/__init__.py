"""Training of one model by worker threads, or by processes that share its weights."""
