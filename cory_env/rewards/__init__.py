"""Bundled reward functions, named in a configuration as `cory_env.rewards.rouge:overlap`, for example."""
