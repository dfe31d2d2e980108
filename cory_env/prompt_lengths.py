"""Lengths of the prompts of a chain, before there are responses."""

from collections.abc import Sequence

from cory_env.chain import Chain
from cory_env.tasks.task import Query, placeholders, references
from cory_env.tasks.turns import SeenResponse


def max_shown_tokens(chain: Chain) -> int:
    """Returns the maximum number of tokens of earlier responses in a prompt."""
    return max(_max_shown_tokens(chain, position) for position in range(len(chain.positions)))


def _max_shown_tokens(chain: Chain, position: int) -> int:
    """Counts a response twice if it is in `{reference}` and in its role's `{role.response}`."""
    template = chain.positions[position].template
    named = {name for name, _ in references(template or "")}
    shows_reference = template is None or "reference" in placeholders(template)
    return sum(
        chain.response_limits[shown.position] * ((shown.role in named) + (shown.is_reference and shows_reference))
        for shown in chain.positions[position].shown_responses
    )


def longest_prompts(chain: Chain, queries: Sequence[Query]) -> tuple[list[int], list[int]]:
    """Returns, for each query, the length of its longest prompt with empty responses.

    Returns:
        The lengths if `{reference}` consists of one response, and if it consists of as many as possible.
    """
    one, full = (
        {
            (tuple(bare_responses(chain, k, is_full=is_full)), position.template)
            for k, position in enumerate(chain.positions)
        }
        for is_full in (False, True)
    )
    encode = chain.encoders[0].encode_prompts
    lengths = {prompt: list(map(len, encode(queries, *prompt))) for prompt in one | full}
    longest_one, longest_full = (
        list(map(max, zip(*(lengths[prompt] for prompt in prompts), strict=True))) for prompts in (one, full)
    )
    return longest_one, longest_full


def bare_responses(chain: Chain, position: int, *, is_full: bool = False) -> list[SeenResponse]:
    """Returns empty responses for the prompt of the agent at a position, if `is_full` as many as possible."""
    feedback = "" if chain.shows_feedback(position) else None
    shown_responses = chain.positions[position].shown_responses
    positions = [shown.position for shown in shown_responses if shown.is_reference]
    shown_references = positions if is_full else positions[-1:]
    responses = [
        SeenResponse("", feedback, shown.role, shown.position in shown_references) for shown in shown_responses
    ]
    return [
        response for response in responses if response.is_reference or chain.positions[position].template is not None
    ]
