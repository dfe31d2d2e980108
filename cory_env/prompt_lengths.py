"""Lengths of the prompts of a chain, before there are responses."""

from collections.abc import Sequence

from cory_env.chain import Chain
from cory_env.chain_settings import reference_roles
from cory_env.decoding import EarlierResponse
from cory_env.tasks.task import Query, placeholders, references
from cory_env.tasks.turns import SeenResponse, Turn


def shown_positions(chain: Chain, position: int) -> list[int]:
    """Returns the positions whose responses the prompt of the agent at a position shows, if it sees all answers.

    A position occurs twice if its response is in `{reference}` and in its role's `{role.response}`.
    """
    template, seen = chain.template(position), chain.seen_positions(position)
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
    return limits if chain.observed == "all" or chain.template(position) is not None else [max(limits, default=0)]


def longest_prompts(chain: Chain, queries: Sequence[Query], *, is_full: bool = False) -> list[int]:
    """Returns, for each query, the length of its longest prompt, with empty responses.

    Args:
        chain: The chain.
        queries: The queries.
        is_full: Whether `{reference}` consists of as many responses as possible, not of one.
    """
    lengths = [0] * len(queries)
    for turn in dict.fromkeys(_bare_turn(chain, position, is_full) for position in range(len(chain.positions))):
        if turn is None:
            prompts = chain.encode_pioneer_prompts(queries)
        else:
            prompts = chain.encode_observer_prompts([Turn(query, *turn) for query in queries])
        lengths = [max(length, len(prompt)) for length, prompt in zip(lengths, prompts, strict=True)]
    return lengths


def _bare_turn(
    chain: Chain, position: int, is_full: bool
) -> tuple[tuple[SeenResponse, ...], str | None, str | None] | None:
    """Returns the fields of the `Turn` of the agent at a position without its query; None: the pioneer's prompt."""
    template = chain.template(position)
    seen = [
        SeenResponse("", response.feedback, response.role, response.is_reference)
        for response in bare_responses(chain, position, is_full=is_full)
    ]
    if template is None and not seen:
        return None
    return tuple(seen), "" if chain.shows_feedback(position) else None, template


def bare_responses(chain: Chain, position: int, *, is_full: bool = False) -> list[EarlierResponse]:
    """Returns empty responses for the prompt of the agent at a position; for `is_full` see `longest_prompts`."""
    template, feedback = chain.template(position), "" if chain.shows_feedback(position) else None
    roles = [chain.positions[k].role for k in chain.seen_positions(position)]
    answers = [index for index, role in enumerate(roles) if role.produces_response]
    shown = answers if is_full and chain.observed == "all" else answers[-1:]
    names = reference_roles(roles)
    responses = [EarlierResponse([], None, feedback, name, index in shown) for index, name in enumerate(names)]
    return [response for response in responses if template is not None or response.is_reference]
