"""Lengths of the prompts of a chain, before there are responses."""

from collections.abc import Sequence

from cory_env.chain import Chain
from cory_env.chain_settings import reference_roles
from cory_env.tasks.task import Query, placeholders, references
from cory_env.tasks.turns import SeenResponse


def shown_positions(chain: Chain, position: int) -> list[int]:
    """Returns the positions whose responses the prompt of the agent at a position shows, if it sees all answers.

    A position occurs twice if its response is in `{reference}` and in its role's `{role.response}`.
    """
    seen, template = chain.positions[position].sees, chain.positions[position].template
    named = {name for name, _ in references(template or "")}
    shows_reference = template is None or "reference" in placeholders(template)
    roles = [chain.positions[k].role for k in seen]
    return [
        k
        for k, role, name in zip(seen, roles, reference_roles(roles), strict=True)
        for is_shown in (name in named, shows_reference and role.produces_response)
        if is_shown
    ]


def max_shown_tokens(chain: Chain) -> int:
    """Returns the maximum number of tokens of earlier responses in a prompt."""
    return max(sum(_limits(chain, position)) for position in range(len(chain.positions)))


def _limits(chain: Chain, position: int) -> list[int]:
    limits = [chain.response_limits[k] for k in shown_positions(chain, position)]
    if chain.observed == "all" or chain.positions[position].template is not None:
        return limits
    return [max(limits, default=0)]


def longest_prompts(chain: Chain, queries: Sequence[Query], *, is_full: bool = False) -> list[int]:
    """Returns, for each query, the length of its longest prompt, with empty responses.

    Args:
        is_full: Whether `{reference}` consists of as many responses as possible, not of one.
    """
    lengths = [0] * len(queries)
    prompts = {
        (tuple(bare_responses(chain, k, is_full=is_full)), position.template)
        for k, position in enumerate(chain.positions)
    }
    for responses, template in prompts:
        feedback = next((response.feedback for response in responses), None)
        encoded = chain.encode_prompts(queries, responses, feedback, template)
        lengths = [max(length, len(prompt)) for length, prompt in zip(lengths, encoded, strict=True)]
    return lengths


def bare_responses(chain: Chain, position: int, *, is_full: bool = False) -> list[SeenResponse]:
    """Returns empty responses for the prompt of the agent at a position; for `is_full` see `longest_prompts`."""
    seen, template = chain.positions[position].sees, chain.positions[position].template
    feedback = "" if chain.shows_feedback(position) else None
    roles = [chain.positions[k].role for k in seen]
    answers = [index for index, role in enumerate(roles) if role.produces_response]
    shown = answers if is_full and chain.observed == "all" else answers[-1:]
    names = reference_roles(roles)
    responses = [SeenResponse("", feedback, name, index in shown) for index, name in enumerate(names)]
    return [response for response in responses if template is not None or response.is_reference]
