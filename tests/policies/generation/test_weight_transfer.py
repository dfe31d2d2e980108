"""vLLM's weight transfer over gloo, with a real sender and a real engine in threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.generation.generator import LoadedWeights, Sampling
from policies.generation.installed import vllm_installed
from policies.generation.vllm_generator import VLLMGenerator
from policies.learning.policy_learner import PolicyLearner
from policies.models.weights import Digest, Weights
from policies.sync_check import perturb
from tests.paper import paper_hyperparameters
from tests.policies.conftest import make_model, weights_of
from tests.policies.generation.conftest import close_all
from tests.policies.generation.test_vllm_generator import MODEL, make_generator

pytestmark = [
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.timeout(300),
]
# Modules that import vLLM are imported inside functions, so that collecting tests does not import vLLM.

ENGINE_LOCK = threading.Lock()
PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def generator() -> Iterator[VLLMGenerator]:
    generator = make_generator(weight_transfer="gloo", max_prompt_tokens=16)
    yield generator
    close_all([generator])


@pytest.fixture(scope="module")
def policy() -> PolicyLearner:
    return PolicyLearner(make_model(MODEL), paper_hyperparameters(steps=1))


class DirectClient:
    """Like `weight_sender.RunnerClient`, but without actors. Calls run one after another, as in an actor."""

    def __init__(self, generator: VLLMGenerator) -> None:
        self.generator = generator
        self.loaded: LoadedWeights | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("connect", init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: Any) -> None:
        self._call("receive", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.loaded = self._call("finish")

    def _call(self, step: str, argument: Any = None) -> LoadedWeights | None:
        with ENGINE_LOCK:
            return self.generator.transfer(step, "llm_1", argument, 7)


def make_source(policy: PolicyLearner, weights: Weights | None = None) -> Any:
    from policies.rllib.weight_sender import PolicyWeightSource

    return PolicyWeightSource(policy, weights)


def make_interrupted_source(policy: PolicyLearner, weights: Weights) -> Any:
    """A source that fails after the first few weights."""
    from policies.rllib.weight_sender import PolicyWeightSource

    class InterruptedSource(PolicyWeightSource):
        def _stream(self) -> Iterator[tuple[str, Tensor]]:
            for index, named_tensor in enumerate(super()._stream()):
                if index == 5:
                    raise OSError("the learner is gone")
                yield named_tensor

    return InterruptedSource(policy, weights)


def make_incomplete_source(policy: PolicyLearner) -> Any:
    """A source without the last weight."""
    from policies.rllib.weight_sender import PolicyWeightSource

    class IncompleteSource(PolicyWeightSource):
        def metadata(self) -> list[Any]:
            return super().metadata()[:-1]

        def _stream(self) -> Iterator[tuple[str, Tensor]]:
            yield from list(super()._stream())[:-1]

    return IncompleteSource(policy)


def send(generator: VLLMGenerator, source: Any) -> LoadedWeights | None:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from policies.generation.weight_transfer import GlooTrainerInitInfo

    client = DirectClient(generator)
    init_info = GlooTrainerInitInfo("127.0.0.1", 2, 30.0, rank=0)
    sender = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
    try:
        sender.send_weights()
    finally:
        sender.shutdown()
    return client.loaded


def sample_logprobs(generator: VLLMGenerator) -> list[list[float]]:
    sampling = Sampling(1.0, 8, [1, 2], [])
    return [response.logprobs for response in generator.generate(PROMPTS, "llm_1", sampling)]


def perturbed_weights(policy: PolicyLearner, seed: int) -> Weights:
    return perturb(weights_of(policy.model), seed)


def test_transferred_weights_equal_loaded_ones(generator: VLLMGenerator, policy: PolicyLearner) -> None:
    weights = perturbed_weights(policy, 1)
    generator.load("llm_1", weights, 0)
    expected = sample_logprobs(generator)
    generator.load("llm_1", weights_of(policy.model), 1)
    source = make_source(policy, weights)
    loaded = send(generator, source)
    assert loaded is not None
    assert (loaded.version, loaded.checksum, loaded.stale) == (7, source.digest.value(), ())
    assert sample_logprobs(generator) == expected
    source = make_source(policy)
    assert send(generator, source) == LoadedWeights(7, source.digest.value(), ())
    assert sample_logprobs(generator) != expected


def test_a_transfer_after_an_interrupted_one_replaces_all_weights(
    generator: VLLMGenerator, policy: PolicyLearner
) -> None:
    weights = perturbed_weights(policy, 2)
    generator.load("llm_1", weights, 0)
    expected = sample_logprobs(generator)
    with pytest.raises(OSError, match="the learner is gone"):
        send(generator, make_interrupted_source(policy, perturbed_weights(policy, 3)))
    assert send(generator, make_source(policy, weights)) is not None
    assert sample_logprobs(generator) == expected


def test_a_transfer_that_started_without_data_is_discarded(generator: VLLMGenerator, policy: PolicyLearner) -> None:
    """This happens if one of several runners dies, so that nothing is sent to any of them."""
    weights = perturbed_weights(policy, 4)
    generator.load("llm_1", weights, 0)
    expected = sample_logprobs(generator)
    generator.load("llm_1", weights_of(policy.model), 1)
    generator.transfer("start", "llm_1", None, 6)
    loaded = send(generator, make_source(policy, weights))
    assert loaded is not None and loaded.stale == ()
    assert sample_logprobs(generator) == expected


def test_a_weight_that_is_not_transferred_is_stale(generator: VLLMGenerator, policy: PolicyLearner) -> None:
    loaded = send(generator, make_incomplete_source(policy))
    assert loaded is not None
    assert len(loaded.stale) == 1
    assert send(generator, make_source(policy)) is not None


def test_the_digest_depends_on_every_bit_position_name_and_dtype() -> None:
    def digest(*tensors: tuple[str, Tensor]) -> int:
        result = Digest()
        for name, tensor in tensors:
            result.add(name, tensor)
        return result.value()

    a, b = torch.randn(3, 4), torch.randn(5)
    swapped = a.clone()
    swapped[0, 0], swapped[2, 3] = a[2, 3], a[0, 0]
    flipped = a.clone()
    flipped.view(torch.int32)[1, 1] ^= 1
    variants = [
        [("a", a), ("b", b)],
        [("b", b), ("a", a)],
        [("a", swapped), ("b", b)],
        [("a", flipped), ("b", b)],
        [("b", a), ("a", b)],
        [("a", a.bfloat16()), ("b", b)],
        [("a", a.view(4, 3)), ("b", b)],
        [("a", a)],
    ]
    assert len({digest(*variant) for variant in variants}) == len(variants)
    assert digest(("a", a.t().contiguous().t()), ("b", b)) == digest(*variants[0])
    large = torch.ones((1 << 22) + 3, dtype=torch.bfloat16)
    changed = large.clone()
    changed[0], changed[-1] = 2, 2
    assert digest(("a", large)) != digest(("a", changed))


def test_the_digest_of_a_tensor_reads_no_intermediate_result_of_another() -> None:
    """Otherwise a CUDA stream could read what another one is still writing: vLLM alternates between two streams."""

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.read: list[Tensor] = []
            self.written: list[Tensor] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            self.read += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.written += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            return result

    digest, recorders = Digest(), [Recorder() for _ in range(3)]
    for recorder in recorders:
        with recorder:
            digest.add("a", torch.ones(4))
    for number, recorder in enumerate(recorders):
        earlier = {id(tensor) for other in recorders[:number] for tensor in other.written}
        assert recorder.read and not earlier & {id(tensor) for tensor in recorder.read}
