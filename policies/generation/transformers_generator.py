"""Generation with `transformers`: the fallback where vLLM is not installed, and exact in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from policies.generation.generator import LoadedWeights, OnFinished, Request, Response, Sampling
from policies.models.adapters import add_lora
from policies.models.language_model import (
    Quantization,
    base_dtype,
    compute_dtype,
    eager_is_faster,
    left_padded,
    load_language_model,
    shared_base,
)
from policies.models.lora import Lora
from policies.models.weights import Weights, checksum


class SeededSampling(LogitsProcessor):
    """Samples with one random stream per row: adds Gumbel noise and leaves the arg max to greedy search.

    arg max(log p + Gumbel noise) is a sample of p; with a stream per row, a row's sample does not depend on its batch.
    """

    def __init__(self, sampling: Sampling) -> None:
        """Starts one CPU stream per row, whatever the model's device, so that devices agree."""
        self.temperature = sampling.temperature
        self.streams = [torch.Generator().manual_seed(seed) for seed in sampling.seeds]
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[B, V]` logits → one-hot of the sampled tokens; remembers their log-probabilities, `[B]` per step."""
        logprobs = torch.log_softmax(scores.float() / self.temperature, dim=-1)
        noise = torch.stack([torch.empty(logprobs.shape[1]).exponential_(generator=stream) for stream in self.streams])
        chosen = (logprobs - noise.to(logprobs.device).log()).argmax(-1, keepdim=True)
        self.logprobs.append(logprobs.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)


class TransformersGenerator:
    """Holds one inference copy per LLM, or one base and an adapter per LLM, and generates with Hugging Face's own loop,
    batched, left-padded.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        dtype: str,
        device: torch.device,
        trust_remote_code: bool = False,
        lora: Lora | None = None,
        quantization: Quantization = "none",
        longest: int | None = None,
    ) -> None:
        """Loads the initial weights of every LLM.

        Args:
            models: by LLM, the folder or hub id of its model; where there are adapters, the same for all.
            dtype: `auto`, `bf16` or `fp32`.
            device: where to run.
            trust_remote_code: run code that comes with the model.
            lora: what the adapters are like; None: every LLM has all weights of its own.
            quantization: of the base under the adapters.
            longest: tokens of the longest prompt and response together, by which attention is chosen as a learner
                chooses it; None: unknown.
        """
        self.device = device
        self.dtype = compute_dtype(dtype, device)
        self.models: dict[str, PreTrainedModel] = {}
        self.base: PreTrainedModel | None = None  # held, so that a learner of this process finds it
        self.own: dict[str, dict[str, Tensor]] = {}
        """Per LLM what `load` replaces: all parameters, or the adapter's."""
        eager = eager_is_faster(self.dtype, device, longest)
        for policy_id, path in models.items():
            if lora is None:
                model = load_language_model(path, trust_remote_code).to(device)
            else:
                stored = base_dtype(dtype, device)
                self.base = shared_base(path, device, trust_remote_code, stored, quantization, eager=eager)
                model = add_lora(self.base, lora)
            if eager:
                model.set_attn_implementation("eager")
            model.generation_config = GenerationConfig()  # its own may hold penalties
            self.models[policy_id] = model
            own = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
            self.own[policy_id] = {name: parameter.requires_grad_(False) for name, parameter in own}

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        policy_id: str,
        sampling: Sampling,
        streamer: BaseStreamer | None = None,
    ) -> list[Response]:
        """See `Generator.generate`; a `streamer` gets the prompts, then the tokens as they are sampled."""
        tokens, mask = (x.to(self.device) for x in left_padded(prompts))
        sampler = SeededSampling(sampling)
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=list(sampling.stop_token_ids),
            pad_token_id=sampling.stop_token_ids[0],
        )
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            out = self.models[policy_id].generate(
                tokens,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                streamer=streamer,
            )
        sampled = out[:, tokens.shape[1] :].cpu().numpy()
        logprobs = torch.stack(sampler.logprobs, dim=1).cpu().numpy()
        responses = []
        for row, row_logprobs in zip(sampled, logprobs, strict=True):
            ends = np.flatnonzero(np.isin(row, sampling.stop_token_ids))
            length = int(ends[0]) + 1 if len(ends) else len(row)
            responses.append(Response(row[:length].tolist(), row_logprobs[:length].tolist()))
        return responses

    def run_requests(self, requests: Sequence[Request], follow: OnFinished) -> None:
        """See `Generator.converse`; all that waits for one LLM is one batch, and ends together."""
        waiting = list(requests)
        while waiting:
            kind = _kind(waiting[0])
            batch = [request for request in waiting if _kind(request) == kind]
            waiting = [request for request in waiting if _kind(request) != kind]
            policy_id, sampling = kind
            sampling = sampling._replace(seeds=[request.sampling.seeds[0] for request in batch])
            responses = self.generate([request.prompt for request in batch], policy_id, sampling)
            waiting += follow([(request.key, response) for request, response in zip(batch, responses, strict=True)])

    def load(self, policy_id: str, weights: Weights, version: int) -> LoadedWeights:
        """See `Generator.load`."""
        held: dict[str, np.ndarray] = {}
        with torch.no_grad():
            for name, parameter in self.own[policy_id].items():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))
                held[name] = parameter.cpu().numpy()
        return LoadedWeights(version, checksum(held))

    def close(self) -> None:
        """Frees the models."""
        self.models.clear()
        self.base = None
        self.own.clear()


def _kind(request: Request) -> tuple[str, Sampling]:
    """What requests of one batch have in common: all but prompt and seed."""
    return request.policy_id, request.sampling._replace(seeds=())
