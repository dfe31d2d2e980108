"""Hyperparameter searches with Ray Tune, and studies that compare configurations over seeds."""
