"""Generation with `transformers`: the fallback if vLLM is not installed; exact in fp32."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from policies.generation.generator import IsReady, LoadedWeights, OnFinished, Request, Response, Sampling
from policies.learning.rows import left_padded
from policies.models.adapters import add_lora
from policies.models.language_model import (
    Quantization,
    base_dtype,
    compute_dtype,
    eager_is_faster,
    load_language_model,
    shared_base,
)
from policies.models.lora import Lora
from policies.models.weights import Weights, checksum

_MIN_TEMPERATURE = 1e-4
"""Replaces a temperature of 0: greedy decoding without a division by zero."""


class SeededSampling(LogitsProcessor):
    """Samples with one random stream per row: adds Gumbel noise and leaves the arg max to greedy search.

    arg max(log p + Gumbel noise) is a sample of p. With a stream per row, a row's sample does not depend on its batch.
    """

    def __init__(self, sampling: Sampling) -> None:
        """Creates one random stream per row, on the CPU, so that samples are the same on all devices."""
        self.temperature = max(sampling.temperature, _MIN_TEMPERATURE)
        self.streams = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the sampled tokens as one-hot logits `[B, V]`, and stores their log-probabilities, `[B]` per step.

        Args:
            input_ids: `[B, T]`; unused.
            scores: logits `[B, V]`.
        """
        logprobs = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        noise = torch.stack([torch.empty(logprobs.shape[1]).exponential_(generator=stream) for stream in self.streams])
        sampled = (logprobs - noise.to(logprobs.device).log()).argmax(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, sampled).squeeze(1))
        return torch.full_like(scores, float("-inf")).scatter(1, sampled, 0.0)


class TransformersGenerator:
    """Generates with Hugging Face's loop, in left-padded batches.

    It holds one inference copy of the model per policy, or one shared base and an adapter per policy.
    """

    in_batches = True

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        dtype: str,
        device: torch.device,
        trust_remote_code: bool = False,
        lora: Lora | None = None,
        quantization: Quantization = "none",
        frozen: Container[str] = (),
        max_length: int | None = None,
    ) -> None:
        """Loads the initial weights of every policy.

        Args:
            models: by policy id, the folder or hub id of its model. With adapters, the same for all but frozen ones.
            dtype: `auto`, `bf16` or `fp32`.
            lora: configuration of the adapters; None if every policy has a full model of its own.
            frozen: policy ids that have no adapters and get no new weights.
            max_length: maximum number of prompt and response tokens together. It decides the attention implementation
                and longrope's factors, as in learners. None if unknown.
        """
        self.device = device
        self.dtype = compute_dtype(dtype, device)
        self.models: dict[str, PreTrainedModel] = {}
        self.base: PreTrainedModel | None = None  # kept alive, so that a learner in this process can share it
        self.trainable: dict[str, dict[str, Tensor]] = {}
        """By policy id, the parameters that `load` replaces: all of them, or the adapter's."""
        eager = eager_is_faster(self.dtype, device, max_length)
        for policy_id, path in models.items():
            if lora is None or policy_id in frozen:
                model = load_language_model(path, trust_remote_code, eager=eager, max_length=max_length).to(device)
            else:
                weight_dtype = base_dtype(dtype, device)
                self.base = shared_base(
                    path, device, trust_remote_code, weight_dtype, quantization, eager=eager, max_length=max_length
                )
                model = add_lora(self.base, lora)
            model.generation_config = GenerationConfig()  # the model's may contain penalties
            self.models[policy_id] = model
            trainable = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
            self.trainable[policy_id] = {name: parameter.requires_grad_(False) for name, parameter in trainable}

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], policy_id: str, sampling: Sampling) -> list[Response]:
        """See `Generator.generate`."""
        tokens, mask = (x.to(self.device) for x in left_padded(prompts))
        sampler = SeededSampling(sampling)
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=list(sampling.stop_token_ids),
            pad_token_id=sampling.stop_token_ids[0],
        )
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            output = self.models[policy_id].generate(
                tokens,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
            )
        sampled = output[:, tokens.shape[1] :].cpu().numpy()
        logprobs = torch.stack(sampler.logprobs, dim=1).cpu().numpy()
        responses = []
        for row, row_logprobs in zip(sampled, logprobs, strict=True):
            stops = np.flatnonzero(np.isin(row, sampling.stop_token_ids))
            length = int(stops[0]) + 1 if len(stops) else len(row)
            responses.append(Response(row[:length].tolist(), row_logprobs[:length].tolist()))
        return responses

    def run_requests(
        self, requests: Sequence[Request], on_finished: OnFinished, is_ready: IsReady = lambda: False
    ) -> None:
        """See `Generator.run_requests`. All waiting requests for one policy form a batch, and finish together."""
        waiting = list(requests)
        while waiting:
            key = _batch_key(waiting[0])
            batch = [request for request in waiting if _batch_key(request) == key]
            waiting = [request for request in waiting if _batch_key(request) != key]
            policy_id, sampling = key
            sampling = sampling._replace(seeds=[request.sampling.seeds[0] for request in batch])
            responses = self.generate([request.prompt for request in batch], policy_id, sampling)
            waiting += on_finished(
                [(request.key, response) for request, response in zip(batch, responses, strict=True)]
            )

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """See `Generator.load`."""
        loaded: dict[str, np.ndarray] = {}
        with torch.no_grad():
            for name, parameter in self.trainable[policy_id].items():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))
                loaded[name] = parameter.cpu().numpy()
        return LoadedWeights(version, checksum(loaded))

    def close(self) -> None:
        """Drops the models."""
        self.models.clear()
        self.base = None
        self.trainable.clear()


def _batch_key(request: Request) -> tuple[str, Sampling]:
    """Returns everything that the requests of one batch have in common: all but prompt and seed."""
    return request.policy_id, request.sampling._replace(seeds=())
