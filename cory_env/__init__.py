"""The environment: a query answered by a chain of agents, one whole response per step.

`cory_v0` is the PettingZoo environment, `chain` the episode logic under it, `tasks` the queries and prompts, `rewards`
the reward functions, and `validate` checks a task before any model is loaded. Nothing here depends on Ray, RLlib or
vLLM. This file imports nothing, so that the reward process starts fast.
"""
