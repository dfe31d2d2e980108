"""Training a run: checks, start, training loop, checkpoints, trackers and summary."""
