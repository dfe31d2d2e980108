"""Reward functions that a configuration can name, as `cory_env.rewards.rouge:overlap`."""
