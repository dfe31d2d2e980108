"""Engines that sample responses and take new weights."""
