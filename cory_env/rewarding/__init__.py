"""Rewards: plain functions `f(prompts, completions, **columns) -> list[float]`, run in a child process.

    def shortest(completions: list[str]) -> list[float]:
        return [-float(len(completion)) for completion in completions]

A configuration names a function as `module:function`. The function receives the arguments that it accepts from
`prompts` (the queries), `completions` (the decoded responses), `completion_ids` (their token ids), `role` and the
columns of the data: keyword arguments, lists of the same length. TRL calls rewards the same way, so functions written
for its GRPOTrainer work unchanged. Coroutine functions and callable objects work too. A column without a default in the
signature requires a value for every query; with a default, the function gets None for missing values. If queries are
conversations, prompts and completions are lists of messages. A reward can be the weighted sum of several functions
(`spec`).
"""
