"""ROUGE: overlap of a completion's wording with a reference summary."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from cory_env.rewards.prepared import import_extra

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


def overlap(completions: Sequence[str], summary: Sequence[str | Sequence[str]], measure: str = "rougeL") -> list[float]:
    """Returns the F-measure of ROUGE between each completion and its reference, from 0 to 1, words stemmed.

    Computed by `rouge-score` (extra `summarize`), whose values match the original ROUGE script.

    Args:
        completions: The decoded responses.
        summary: The references: one text per completion, or a list of texts (the best match counts).
        measure: `rouge1`, `rouge2`, `rougeL` or `rougeLsum`, in a configuration
            `cory_env.rewards.rouge:overlap?measure=rouge2`.

    Raises:
        ValueError: The measure is unknown, or a row has no reference.
        ModuleNotFoundError: `rouge-score` is not installed.
    """
    scorer = _scorer(measure)
    values = []
    for completion, references in zip(completions, summary, strict=True):
        candidates = list(references) if isinstance(references, (list, tuple)) else [references]
        texts = [text for text in candidates if isinstance(text, str)]
        if len(texts) < len(candidates) or not any(text.strip() for text in texts):
            raise ValueError(f"The column summary contains {references!r}, but must be a text or a list of texts.")
        values.append(float(scorer.score_multi(texts, completion)[measure].fmeasure))
    return values


@lru_cache(maxsize=1)
def _scorer(measure: str) -> "RougeScorer":
    library = import_extra("rouge_score.rouge_scorer", "summarize")
    if measure not in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        raise ValueError(f"Unknown ROUGE measure {measure!r}. Use rouge1, rouge2, rougeL or rougeLsum.")
    scorer: RougeScorer = library.RougeScorer([measure], use_stemmer=True)
    return scorer
