"""A tiny model that thinks: the bundled one with the tokens `<think>` and `</think>`, and a chat template."""

from pathlib import Path

from cory_env.tokenizer import DEFAULT_TOKENIZER, load_tokenizer

TAGS = ("<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}</think>\n\n{% endif %}{% endif %}"
)
"""As in Qwen's templates of reasoning models: the prompt begins the thought, and may end it at once."""


def save_thinking_model(folder: Path, end_like: str = ".") -> str:
    """Saves the model.

    Args:
        folder: a new folder.
        end_like: a token of the bundled model. `</think>` has its embedding, slightly longer, so that greedy decoding
            writes `</think>` where the bundled model would write this token.

    Returns:
        The folder's path.
    """
    import torch

    from policies.models.language_model import load_language_model

    tokenizer = load_tokenizer(str(DEFAULT_TOKENIZER))
    tokenizer.add_tokens([*TAGS], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    model = load_language_model(str(DEFAULT_TOKENIZER))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    weight = model.get_input_embeddings().weight
    (like,) = tokenizer(end_like, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        weight[tokenizer.convert_tokens_to_ids(TAGS[0])] = 0.0
        weight[tokenizer.convert_tokens_to_ids(TAGS[1])] = 1.5 * weight[like]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
