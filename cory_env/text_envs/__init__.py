"""PettingZoo environments whose observations and actions are text, and their episodes.

`instance` and `child` run a user's environment in a child process, `pool` is the parent's side of that, `episode` has
the agents' conversations, `task` the seeds of training and evaluation, `base` is for authors of environments.
"""
