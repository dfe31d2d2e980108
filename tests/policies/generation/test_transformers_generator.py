"""The `transformers` backend."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer
from policies.generation.generator import Request, Response, Sampling
from policies.generation.transformers_generator import TransformersGenerator
from policies.models.lora import Lora


def test_the_models_own_penalties_do_not_affect_sampling(tmp_path: Path) -> None:
    shutil.copytree(DEFAULT_TOKENIZER, tmp_path / "model")
    GenerationConfig(repetition_penalty=3.0, no_repeat_ngram_size=1).save_pretrained(tmp_path / "model")
    prompts = [load_tokenizer()(text)["input_ids"] for text in ("This movie is", "I really liked")]
    settings: dict[str, Any] = {"dtype": "fp32", "device": torch.device("cpu")}
    plain, penalized = (
        TransformersGenerator({"llm_1": str(path)}, lora=lora, **settings).generate(
            prompts, "llm_1", Sampling(1.0, 8, [1, 2], [0])
        )
        for path, lora in ((DEFAULT_TOKENIZER, None), (tmp_path / "model", Lora(4, 8.0)))
    )
    assert [response.tokens for response in penalized] == [response.tokens for response in plain]
    for ours, theirs in zip(penalized, plain, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_any_of_several_stop_tokens_ends_a_response() -> None:
    tokenizer = load_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in ("This movie is", "I really liked")]
    eos = [tokenizer.eos_token_id]
    generator = TransformersGenerator({"llm_1": str(DEFAULT_TOKENIZER)}, dtype="fp32", device=torch.device("cpu"))
    full = generator.generate(prompts, "llm_1", Sampling(1.0, 8, [1, 2], eos))
    stops = [*eos, full[0].tokens[2], full[1].tokens[1]]
    stopped = generator.generate(prompts, "llm_1", Sampling(1.0, 8, [1, 2], stops))
    assert [response.tokens for response in stopped] == [full[0].tokens[:3], full[1].tokens[:2]]
    assert [len(response.logprobs) for response in stopped] == [3, 2]


def test_waiting_requests_for_one_policy_form_one_batch() -> None:
    models = dict.fromkeys(("llm_1", "llm_2"), str(DEFAULT_TOKENIZER))
    generator = TransformersGenerator(models, dtype="fp32", device=torch.device("cpu"))
    prompt = load_tokenizer()("This movie is")["input_ids"]

    def make_request(key: int) -> Request:
        return Request(key, f"llm_{key % 2 + 1}", prompt, Sampling(1.0, 3, [key], [0]))

    batches: list[list[int]] = []

    def on_finished(finished: Sequence[tuple[int, Response]]) -> list[Request]:
        batches.append([key for key, _ in finished])
        assert [response for _, response in finished] == generator.generate(
            [prompt] * len(finished), f"llm_{finished[0][0] % 2 + 1}", Sampling(1.0, 3, batches[-1], [0])
        )
        return [make_request(key + 5) for key, _ in finished if key < 4]

    generator.run_requests([make_request(key) for key in range(4)], on_finished)
    assert batches == [[0, 2], [1, 3, 5, 7], [6, 8]]
