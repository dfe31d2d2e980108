"""Many trainings that are compared: searches with Ray Tune, and studies of arms over seeds."""
