"""Data sets of reasoning-gym with their defaults, and easier variants."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from cory_env.tasks.rows import read_queries
from cory_env.tasks.task import Query

SCREEN_SEED, PROBE_SEED = 0, 1_000_000
"""Far apart, because a set with seed s + 1 has the entries of seed s without the first one."""
MAX_QUESTION_TOKENS = 160
EASY = {
    "base_conversion": "min_value=1&max_value=7&max_base=3",
    "basic_arithmetic": "min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "calendar_arithmetic": 'tasks=["weekday_of_date"]',
    "chain_sum": "min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "color_cube_rotation": "min_rotations=1&max_rotations=1",
    "count_bits": "min_n=1&max_n=15",
    "count_primes": "min_n=1&max_n=20",
    "course_schedule": "min_num_courses=3&max_num_courses=3",
    "decimal_chain_sum": "min_terms=2&max_terms=2&max_digits=1&max_decimal_places=1",
    "family_relationships": "min_family_size=3&max_family_size=3",
    "fraction_simplification": "max_value=5&max_factor=3",
    "gcd": "min_value=1&max_value=20",
    "isomorphic_strings": "max_string_length=3",
    "lcm": "min_value=1&max_value=10",
    "leg_counting": "min_animals=1&max_animals=1&min_instances=1&max_instances=4",
    "letter_counting": "min_words=1&max_words=3",
    "letter_jumble": "min_words=1&max_words=1&min_word_len=2&max_word_len=3",
    "needle_haystack": "min_num_statements=2&max_num_statements=4",
    "number_filtering": "min_numbers=2&max_numbers=3&max_decimals=0",
    "number_sequence": "min_value=1&max_value=10&max_complexity=1",
    "palindrome_generation": "min_length=3&max_length=3",
    "products": "min_terms=2&max_terms=2&min_digits=1&max_digits=1",
    "ransom_note": "max_note_length=2&max_magazine_length=3",
    "sentence_reordering": "min_words_in_sentence=3&max_words_in_sentence=4",
    "simple_equations": "min_terms=2&max_terms=2&min_value=1&max_value=10",
    "spell_backward": "min_word_len=3&max_word_len=3",
    "word_sequence_reversal": "min_words=2&max_words=3",
    "word_sorting": "min_words=2&max_words=3",
    "zebra_puzzles": "num_people=2&num_characteristics=2",
}
"""Settings that make sets easier than their defaults; such a set is called `NAME, easy`."""


def all_names() -> list[str]:
    """Returns the names of all sets: those of reasoning-gym, and the easier ones."""
    from reasoning_gym.factory import DATASETS

    return [*sorted(DATASETS.keys() - {"composite"}), *(f"{name}, easy" for name in EASY)]


def set_name(query: Query) -> str:
    """Returns the name of a query's set, such as `gcd` or `gcd, easy`."""
    metadata, source = query.columns["metadata"], str(query.columns["dataset"])
    assert isinstance(metadata, dict)
    return str(metadata["source_dataset"]) if "+" in source else f"{source.partition('?')[0]}, easy"


def read_sets(names: Collection[str], number: int, seed: int) -> list[Query]:
    """Returns so many queries of each set, or hardly fewer, first those that come first in their sets."""
    plain = sorted(name for name in names if "," not in name)
    plain += ["gcd", "lcm"] * (len(plain) == 1)  # a mixture has several
    size = int(len(plain) * (number + 2 * number**0.5))
    queries = read_queries(f"reasoning_gym:{'+'.join(plain)}?size={size}&seed={seed}") if plain else []
    for name in sorted(set(names) - set(plain)):
        name = name.partition(",")[0]
        queries += read_queries(f"reasoning_gym:{name}?size={number}&seed={seed}&{EASY[name]}")
    count: Counter[str] = Counter()
    ranked: list[tuple[int, Query]] = []
    for query in queries:
        name = set_name(query)
        if name in names and count[name] < number:
            ranked.append((count[name], query))
            count[name] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [replace(query, id=index) for index, (_, query) in enumerate(ranked)]


def longest_questions(queries: Iterable[Query], tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the tokens of the longest question of each set."""
    longest: dict[str, int] = {}
    for query in queries:
        longest[set_name(query)] = max(longest.get(set_name(query), 0), len(tokenizer.encode(query.text)))
    return longest
