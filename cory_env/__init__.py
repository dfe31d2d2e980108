"""The environment: a query answered by a chain of agents, one whole response per step.

`cory_v0` is the PettingZoo environment, `chain` the episode logic under it, `tasks` the queries and prompts, `rewards`
the scoring, and `validate` proves a task before any model is loaded. Nothing here knows of Ray, RLlib or vLLM, and
nothing is imported by this file, so that a reward's child process starts fast.
"""
