"""Rewards: plain functions `f(prompts, completions, **columns) -> list[float]`, run in a child process.

    def shortest(completions: list[str]) -> list[float]:
        return [-float(len(completion)) for completion in completions]

A function is named in a configuration as `module:function`. Of `prompts` (the bare queries), `completions` (the decoded
responses), `completion_ids` (their tokens), `role` and the columns of the data, it receives those that it accepts, by
keyword, as lists of one length. That is how TRL calls them, so a function written for its GRPOTrainer runs as it is; a
coroutine function or any object that can be called may be named too. A column that it has no default for must have a
value for every query; with a default, it gets None where there is none. Where queries are conversations, prompts and
completions are lists of messages. Several functions make one reward, their weighted sum (`spec`).
"""
