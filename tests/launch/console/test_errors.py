"""Messages of errors, without Ray's wrappers."""

import pickle

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from launch.console.errors import describe_error, is_bug
from policies.generation.vllm_device import EngineStartError
from policies.models.model_check import ModelError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelError("no such layer"), "no such layer"),
        (EngineStartError("vLLM did not start"), "vLLM did not start"),
        (ActorDiedError(RayTaskError("__init__", "", ModelError("no layer"))), "no layer"),  # as of a trial's learner
        (
            MemoryError(),
            "Out of memory: MemoryError. Lower micro_batch_size, max_prompt_tokens or max_response_tokens.",
        ),
    ],
)
def test_the_error_of_an_actor_that_failed_to_start_is_reported(error: Exception, message: str) -> None:
    wrapped: Exception = ActorDiedError(RayTaskError("__init__", "", error))
    assert describe_error(wrapped) == message
    assert describe_error(pickle.loads(pickle.dumps(wrapped))) == message  # as Tune keeps it
    assert not is_bug(wrapped)


def test_an_unexpected_error_in_an_actor_s_start_is_not_a_process_loss() -> None:
    wrapped = ActorDiedError(RayTaskError("__init__", "", KeyError("a defect")))
    assert describe_error(wrapped) == "KeyError: 'a defect'" and is_bug(wrapped)


@pytest.mark.parametrize("error", [ActorDiedError(), RayTaskError("step", "", ActorDiedError())])
def test_a_lost_actor_is_reported(error: RayError) -> None:
    assert describe_error(error).startswith(
        "A process or machine of the Ray cluster was lost: The actor died unexpectedly"
    )
