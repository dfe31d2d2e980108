"""The `transformers` backend alone."""

from __future__ import annotations

import torch

from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from policies.generator import Sampling
from policies.transformers_generator import TransformersGenerator


def test_any_of_several_stop_tokens_ends_a_response() -> None:
    tokenizer = load_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in ("This movie is", "I really liked")]
    eos = [tokenizer.eos_token_id]
    settings = {"dtype": "fp32", "device": torch.device("cpu")}
    path = str(DEFAULT_TOKENIZER)
    sampling = Sampling(1.0, 8, [1, 2])
    unbounded = TransformersGenerator(path, ["llm_1"], stop_token_ids=eos, **settings)  # type: ignore[arg-type]
    whole = unbounded.generate(prompts, "llm_1", sampling)
    stops = [*eos, whole[0].tokens[2], whole[1].tokens[1]]
    bounded = TransformersGenerator(path, ["llm_1"], stop_token_ids=stops, **settings)  # type: ignore[arg-type]
    ended = bounded.generate(prompts, "llm_1", sampling)
    assert [response.tokens for response in ended] == [whole[0].tokens[:3], whole[1].tokens[:2]]
    assert [len(response.logprobs) for response in ended] == [3, 2]
