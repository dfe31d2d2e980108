"""The changes that `benchmarks.learner_ab` switches on and off: context managers, which undo what they changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policies.learning.forward.prefix_tree import Layout, Paths
from policies.learning.sharding import transformer_blocks

if TYPE_CHECKING:
    from benchmarks.learner_ab import Bench

CHANGES: dict[str, Callable[[Bench], contextlib.AbstractContextManager[None]]] = {}
"""Context managers by name; they take the bench and undo what they changed."""
ALWAYS_SAVED = (
    "mm",
    "addmm",
    "bmm",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


class Skip(Exception):
    """A case cannot run here; the message says why."""


def change(function: Callable[[Bench], Iterator[None]]) -> Callable[[Bench], Iterator[None]]:
    """Adds a change."""
    CHANGES[function.__name__] = contextlib.contextmanager(function)
    return function


@contextlib.contextmanager
def attributes(*triples: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes, `(object, name, value)`, and restores or deletes them."""
    missing, before = object(), []
    try:
        for thing, name, value in triples:
            own = (
                vars(thing).get(name, missing)
                if not isinstance(thing, nn.Module)
                else thing.__dict__.get(name, missing)
            )
            before.append((thing, name, own))
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in reversed(before):
            if value is missing:
                delattr(thing, name)
            else:
                setattr(thing, name, value)


# What is switched.


@change
def base(bench: Bench) -> Iterator[None]:
    """Nothing."""
    yield


@change
def casts(bench: Bench) -> Iterator[None]:
    """Norms hand on bf16, RoPE is computed in bf16. Otherwise each linear layer casts its input, five times a block."""

    def narrow(forward: Callable[..., Any]) -> Callable[..., Any]:
        def narrowed(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            return tuple(x.bfloat16() for x in out) if isinstance(out, tuple) else out.bfloat16()

        return narrowed

    modules = [
        m for lm in bench.lms() for m in lm.modules() if type(m).__name__.endswith(("RMSNorm", "RotaryEmbedding"))
    ]
    with attributes(*((m, "forward", narrow(m.forward)) for m in modules)):
        yield


@change
def residual(bench: Bench) -> Iterator[None]:
    """The residual stream is bf16, not fp32: the embedding's output is cast."""

    def narrow(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda tokens: forward(tokens).bfloat16()

    modules = [lm.get_input_embeddings() for lm in bench.lms()]
    with attributes(*((m, "forward", narrow(m.forward)) for m in modules)):
        yield


@change
def compile(bench: Bench) -> Iterator[None]:
    """torch.compile of each block, inside gradient checkpointing, for any lengths."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    layers = [layer for lm in bench.lms() for layer in transformer_blocks(lm)]
    for layer in layers:
        layer.compile(dynamic=True, backend=bench.backend)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


@change
def liger(bench: Bench) -> Iterator[None]:
    """liger-kernel's RMSNorm, RoPE and SwiGLU."""
    bench.need_triton()
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
    from transformers.models.qwen2 import modeling_qwen2

    originals = {name: getattr(modeling_qwen2, name) for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP")}
    try:
        for lm in bench.lms():
            _apply_liger_kernel_to_instance(
                lm.get_base_model() if hasattr(lm, "get_base_model") else lm,
                rope=True,
                rms_norm=True,
                swiglu=True,
                fused_linear_cross_entropy=False,
                cross_entropy=False,
            )
        yield
    finally:
        for name, value in originals.items():
            setattr(modeling_qwen2, name, value)
        for lm in bench.lms():
            for module in lm.modules():
                for name in ("forward", "extra_repr", "_get_name"):
                    module.__dict__.pop(name, None)


@change
def cudnn(bench: Bench) -> Iterator[None]:
    """CuDNN's attention, which takes masks, before the memory-efficient one."""
    if bench.device.type != "cuda":
        raise Skip("needs a GPU")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def _padded(layout: Layout, multiple: int) -> Layout:
    """Pads packs on the left to a multiple; indices into the last nodes stay."""
    extra = -layout.tokens.shape[1] % multiple
    pad = partial(nn.functional.pad, pad=(extra, 0))
    return layout._replace(
        tokens=pad(layout.tokens),
        depths=pad(layout.depths),
        preorder=pad(layout.preorder, value=-1),
        ends=pad(layout.ends),
    )


def _padding(multiple: int) -> contextlib.AbstractContextManager[None]:
    original = Paths.layout
    return attributes((Paths, "layout", lambda self, packs: _padded(original(self, packs), multiple)))


@change
def align(bench: Bench) -> Iterator[None]:
    """Packs are as long as a multiple of 64, so that no kernel copies masks to align them."""
    with _padding(64):
        yield


@change
def flex(bench: Bench) -> Iterator[None]:
    """FlexAttention over the tree (or padded rows), with a block mask instead of a dense one."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from transformers import AttentionInterface

    on_gpu = bench.device.type == "cuda"
    run = torch.compile(flex_attention, dynamic=True) if on_gpu else flex_attention
    heads = bench.model.lm.config.get_text_config()
    power_of_two = (heads.num_attention_heads // heads.num_key_value_heads).bit_count() == 1

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (x.to(bench.model.dtype) for x in (query, key, value))
        if not power_of_two:
            key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        compiling = torch.compiler.is_compiling()
        out = (flex_attention if compiling else run)(
            query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=power_of_two
        )
        return out.transpose(1, 2).contiguous(), None

    def attention_mask(layout: Layout, config: Any, dtype: torch.dtype) -> Any:
        preorder, ends = layout.preorder, layout.ends

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (preorder[b, k] <= preorder[b, q]) & (preorder[b, q] < ends[b, k])

        count, width = preorder.shape
        return create_block_mask(visible, count, None, width, width, device=preorder.device, _compile=on_gpu)

    AttentionInterface.register("learner_ab_flex", attend)
    for lm in bench.lms():
        lm.set_attn_implementation("learner_ab_flex")
    try:
        with attributes((Layout, "attention_mask", attention_mask)), _padding(128):
            if not on_gpu:
                raise Skip(
                    f"its backward pass needs a GPU; forward in fp32: {bench.forward_difference()} from the baseline"
                )
            yield
    finally:
        for lm in bench.lms():
            lm.set_attn_implementation("sdpa")


# Which activations are originals; without one of these, each block's input alone, as by gradient_checkpointing=true.


@change
def off(bench: Bench) -> Iterator[None]:
    """gradient_checkpointing=false."""
    bench.model.lm.gradient_checkpointing_disable()
    yield


@change
def every2(bench: Bench) -> Iterator[None]:
    """Every second block keeps its activations."""
    for layer in transformer_blocks(bench.model.lm)[::2]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]
    yield


@change
def sac(bench: Bench) -> Iterator[None]:
    """Selective checkpointing: products and attention are originals, what lies between is computed again."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    saved = {getattr(torch.ops.aten, name).default for name in ALWAYS_SAVED if hasattr(torch.ops.aten, name)}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    bench.model.lm.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    yield


@change
def budget50(bench: Bench) -> Iterator[None]:
    """The compiler chooses what blocks keep: half of what it would (needs compile before it)."""
    import torch._functorch.config as config

    bench.model.lm.gradient_checkpointing_disable()
    with config.patch(activation_memory_budget=0.5):
        yield
