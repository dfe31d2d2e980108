"""Pretraining of small Llamas whose tokens are single characters, on generated documents.

A document is a list of pieces of text, each with whether the loss includes it.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

EOS, UNKNOWN = "<eos>", "<unk>"

Document = list[tuple[str, bool]]
"""Pieces of text, each with whether the loss includes it."""


def make_tokenizer(characters: str, positions: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character; EOS also serves as BOS and padding."""
    vocabulary = {token: number for number, token in enumerate((EOS, UNKNOWN, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def new_model(
    tokenizer: PreTrainedTokenizerBase, *, layers: int, width: int, heads: int, rope_theta: float, seed: int
) -> LlamaForCausalLM:
    """Returns an untrained Llama, with tied embeddings.

    Args:
        tokenizer: Its vocabulary and maximum length become the model's.
        layers: Transformer blocks.
        width: Hidden size; the MLP has three times as many units.
        heads: Attention heads, with 32 dimensions each.
        rope_theta: Base of the rotary position embeddings.
        seed: Random seed of the weights.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=32,  # a size that vLLM serves on CPUs
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates, by five Newton-Schulz iterations in fp32 (Jordan et al., 2024)."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates every matrix."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix)).mul_(0.95).add_(matrix.grad)
                update = orthogonalize(matrix.grad + 0.95 * momentum)
                rows, columns = update.shape
                matrix.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Returns approximately the nearest matrix `[m, n]` with all singular values 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def make_batch(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and labels of documents, int64 `[B, T]` each; the label is −100 outside the loss."""
    rows = [[*document, (EOS, True)] for document in documents]
    length = max(sum(len(text) if text != EOS else 1 for text, _ in row) for row in rows)
    tokens, labels = np.full((len(rows), length), tokenizer.eos_token_id), np.full((len(rows), length), -100)
    vocabulary = tokenizer.get_vocab()
    for i, row in enumerate(rows):
        start = 0
        for text, in_loss in row:
            ids = [vocabulary[character] for character in ([text] if text == EOS else text)]
            tokens[i, start : start + len(ids)] = ids
            if in_loss:
                labels[i, start : start + len(ids)] = ids
            start += len(ids)
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    draw_batches: Callable[[int], Sequence[Sequence[Document]]],
    *,
    steps: int,
    lr: float,
    warmup: int,
    decay: float,
    log: Callable[[str], None],
    autocast: bool = False,
) -> None:
    """Trains a model on documents, in place.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        draw_batches: Returns the documents of a step, from 0, in one or several batches. Their gradients add up;
            documents of the same length belong into one batch, so that nothing is padded.
        steps: Number of optimizer steps.
        lr: Learning rate of Muon; Adam's is a tenth.
        warmup: Warmup steps.
        decay: Share of the steps, at the end, in which the learning rate falls to 0.
        log: Called with one line of progress.
        autocast: Compute in bfloat16.
    """
    optimizers = make_optimizers(model, lr)
    schedules = [
        LambdaLR(optimizer, lambda step: learning_rate(step, steps, warmup, decay)) for optimizer in optimizers
    ]
    started, losses = time.monotonic(), []
    for step in range(steps):
        batches = [make_batch(documents, tokenizer) for documents in draw_batches(step)]
        counts = [int((labels[:, 1:] >= 0).sum()) for _, labels in batches]
        model.train()
        loss = 0.0
        for (tokens, labels), count in zip(batches, counts, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                part = model(tokens, labels=labels).loss * (count / sum(counts))
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        losses.append(loss)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            log(f"step {step + 1}/{steps}: loss {np.mean(losses[-100:]):.3f}, {time.monotonic() - started:.0f} s")
    model.eval()


def make_optimizers(model: LlamaForCausalLM, lr: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns Muon for the matrices of the blocks, and AdamW for the other parameters."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return Muon(matrices, lr), torch.optim.AdamW(others, lr / 10, (0.9, 0.98), weight_decay=0.0)


def learning_rate(step: int, steps: int, warmup: int, decay: float) -> float:
    """Returns the factor of the learning rate in a step: warmup, constant, then linear decay.

    Args:
        step: The step, from 0.
        steps: Number of steps.
        warmup: Steps of the warmup.
        decay: Share of the steps, at the end, in which the rate falls to 0.
    """
    return min(1.0, (step + 1) / warmup) * min(1.0, (steps - step) / (decay * steps))
