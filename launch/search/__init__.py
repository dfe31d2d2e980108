"""Searches over settings, with Ray Tune."""
