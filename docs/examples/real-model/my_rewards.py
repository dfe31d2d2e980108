"""The rewards of the two tasks."""


def both_words(completions, first, second, **kwargs):
    """0.5 for each of the two words, less 0.01 for each word of the response after the fifteenth."""
    return [
        0.5 * (a in text.lower()) + 0.5 * (b in text.lower()) - 0.01 * max(0, len(text.split()) - 15)
        for text, a, b in zip(completions, first, second, strict=True)
    ]


def right_label(completions, label, **kwargs):
    """1 for the right label without the other one, less 0.02 for each word after the first, at most 0.5."""
    other = {"positive": "negative", "negative": "positive"}
    return [
        float(right in text.lower() and other[right] not in text.lower())
        - min(0.02 * max(0, len(text.split()) - 1), 0.5)
        for text, right in zip(completions, label, strict=True)
    ]
