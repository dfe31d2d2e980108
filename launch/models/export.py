"""Writes a trained policy as a folder that others load: a whole model or an adapter, all of it or nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from cory_env.tokenizer import load_tokenizer
from launch.console.errors import CommandError, make_folder
from launch.models.model_card import base_path, model_card
from launch.models.trained import PolicySet, trainable
from launch.run_folder.storage import check_location
from policies.compat.transformers import unsaved_weights
from policies.models.adapters import add_lora, lora_delta, peft_config, peft_names
from policies.models.atomic import atomic_dir
from policies.models.language_model import load_language_model, meta_model
from policies.models.model_names import model_path
from policies.models.stored_weights import StoredWeights
from policies.settings.settings import Settings, Tokenizers

TensorLoader = Callable[[str], Tensor]
"""Gives a tensor by its name in a model."""
SHARD_BYTES = 5_000_000_000
"""Of one file, which is in memory while it is written."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SAFETENSORS_METADATA = {"format": "pt"}


def choose_policy(trained: PolicySet, name: str | None) -> str:
    """Returns the policy of a name that a user gave, or, without one, the only one there is.

    Raises:
        CommandError: there is none of that name, or there are several.
    """
    if name is None and len(trained.policies) > 1:
        raise CommandError(f"Which policy? Name one of: {trained.names}.")
    return trained.named([name or trained.policies[0]])[0]


def export_warnings(trained: PolicySet, policy: str) -> list[str]:
    """Returns what whoever exports a policy should know: health warnings, and what has changed since it was trained.

    Raises:
        CommandError: the model or its tokenizer is gone.
    """
    return [f"At update {trained.update}, {text}" for text in _health_warnings(trained, policy)] + trained.changes()


def _health_warnings(trained: PolicySet, policy: str) -> list[str]:
    return [warning["text"] for warning in trained.lines[-1].get("health", []) if warning["subject"] == policy]


def check_free_folder(out: Path) -> None:
    """Refuses a folder for a model that is not new or empty.

    Raises:
        CommandError: something is in its place, it would be gone with a job, or it is a URI.
    """
    check_location(str(out), "model")
    if out.exists() and (not out.is_dir() or out.is_mount() or any(out.iterdir())):  # a mount cannot be renamed to
        raise CommandError(f"{out} is not a new folder: name another one with --out.")


def write(trained: PolicySet, policy: str, out: Path, dtype: str = "fp32", merge: bool = False) -> None:
    """Writes a policy, all of it or nothing.

    Args:
        trained: where it is read from.
        policy: one of the run's, or the `AVERAGE` of them.
        out: a folder that does not exist or is empty.
        dtype: `fp32` or `bf16`.
        merge: an adapter into its base; else it is written as it is.

    Raises:
        CommandError: there is no adapter to merge, the checkpoint is damaged, the base model or its tokenizer is not
            what it was, or the folder is not free or could not be written.
        ModelError: there is no base model any more.
        OSError: the folder could not be written.
    """
    settings, out = trained.settings, out.resolve()
    check_free_folder(out)
    if merge and settings.lora is None:
        raise CommandError(f"{trained.place} trained all weights, so there is no adapter to merge. Leave out merge.")
    make_folder(out.parent)
    try:
        tokenizer = load_tokenizer(model_path(trained.base(policy)), settings.trust_remote_code)
        tokenizers = settings.make_tokenizers()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error
    sampling = generation_config(settings, tokenizers, policy if policy in tokenizers else settings.policy_ids[0])
    is_adapter = settings.lora is not None and not merge
    whole = None if is_adapter else merged_model(trained, policy)
    card = model_card(trained, policy, _health_warnings(trained, policy), adapter=is_adapter)
    try:
        with atomic_dir(out) as folder:
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if whole is None:
                save_adapter(trained, policy, folder, DTYPES[dtype])
            else:
                model, tensors = whole
                model.to(DTYPES[dtype]).generation_config = sampling  # else the base's is checked, and may not pass
                model.save_pretrained(folder, state_dict={})
                write_weights(model, tensors, folder)
            sampling.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):
                file.chmod(0o644)  # they are made so that only their owner can read them
    except Exception as error:
        # As of a full disk; the library of tokenizers has no class for it.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise CommandError(f"{out} could not be written: {error}.") from error
        raise


def merged_model(trained: PolicySet, policy: str) -> tuple[PreTrainedModel, TensorLoader]:
    """Returns the base model with the base's own configuration, on the meta device, and a policy's weights for it.

    Those are fp32, by the model's names, each made when it is asked for. An adapter is merged into its base.

    Args:
        trained: where the policy is read from.
        policy: one of the run's, or the `AVERAGE` of them.

    Raises:
        CommandError: the weights are not of this model, or the base that the adapter is for is quantised.
        ModelError: it cannot be loaded.
    """
    settings = trained.settings
    if settings.quantization != "none":
        raise CommandError(
            f"The adapter was trained on a base in {settings.quantization}. Merged into anything else it would answer "
            "otherwise: leave --merge out."
        )
    path = model_path(trained.base(policy))
    model = load_language_model(path, settings.trust_remote_code, device="meta")
    base = _base_tensors(path, settings.trust_remote_code, model)
    weights, lora = trained.weights(policy), trained.lora(policy)
    skeleton = model if lora is None else add_lora(model.requires_grad_(False), lora)
    trained.check_base(policy, weights, trainable(skeleton))
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # of the names of tied weights

    def make(name: str) -> Tensor:
        name = first.get(id(model.get_parameter_or_buffer(name)), name)
        if name in weights:
            return torch.from_numpy(weights[name])
        layer = name.removesuffix(".weight")
        factors = {
            factor.removeprefix(f"{layer}."): torch.tensor(weights[factor])
            for factor in weights
            if factor.startswith(f"{layer}.lora_")
        }
        return base(name) + lora_delta(skeleton, layer, factors) if factors else base(name)

    # Training switches dropout off in the configuration; who trains on may want it back.
    model.config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    return model, make


def _base_tensors(path: str, trust_remote_code: bool, model: PreTrainedModel) -> TensorLoader:
    """What gives a model's initial tensors, fp32: from its files, or, where those have another form, from memory."""
    stored = StoredWeights(path)
    names = stored.names(model)
    if names is not None:
        return lambda name: _fp32(stored.read(names[name]))

    @cache
    def state() -> dict[str, Tensor]:
        state: dict[str, Tensor] = load_language_model(path, trust_remote_code).state_dict()
        return state

    return lambda name: state()[name]


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def write_weights(model: PreTrainedModel, tensors: TensorLoader, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model's weights as `save_pretrained` does, but file by file, so that they are never all in memory.

    Args:
        model: on the meta device: names, types, what is tied, and how its family is stored.
        tensors: its weights and persistent buffers, on the CPU.
        folder: that exists.
        shard_bytes: of a file; one that holds a single layer may be larger.

    Raises:
        OSError: the folder cannot be written.
    """
    unsaved = unsaved_weights(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    state = remove_tied_weights_from_state_dict(state, model)
    layers: dict[str, list[str]] = {}  # some families store parts of a layer's tensors, or several in one
    for name in state:
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else "", []).append(name)
    files: list[list[str]] = [[]]
    for names in layers.values():
        if files[-1] and sum(state[name].nbytes for name in (*files[-1], *names)) > shard_bytes:
            files.append([])
        files[-1] += names
    index: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SAFE_WEIGHTS_NAME
        stored = revert_weight_conversion(model, {name: tensors(name).to(state[name].dtype) for name in names})
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / file, _SAFETENSORS_METADATA)
        index |= dict.fromkeys(stored, file)
        del stored  # before the next file's tensors are made
    if len(files) > 1:
        metadata = {"total_parameters": model.num_parameters(), "total_size": sum(x.nbytes for x in state.values())}
        text = json.dumps({"metadata": metadata, "weight_map": index}, indent=2, sort_keys=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n", encoding="utf-8")


def save_adapter(trained: PolicySet, policy: str, folder: Path, dtype: torch.dtype) -> None:
    """Writes a policy's adapter as PEFT does: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        trained: where the policy is read from.
        policy: one of the run's, or the `AVERAGE` of them.
        folder: where to.
        dtype: of the weights.

    Raises:
        CommandError: it is not of this base.
        ModelError: there is no base.
        OSError: the folder cannot be written.
    """
    lora, weights = trained.lora(policy), trained.weights(policy)
    assert lora is not None
    base = meta_model(model_path(trained.base(policy)), trained.settings.trust_remote_code)
    trained.check_base(policy, weights, trainable(add_lora(base, lora)))
    config = peft_config(base, lora)
    config.base_model_name_or_path = base_path(trained, policy)
    config.inference_mode = True
    config.save_pretrained(folder)
    tensors = {name: torch.tensor(array).to(dtype) for name, array in peft_names(weights).items()}
    save_file(tensors, folder / "adapter_model.safetensors", _SAFETENSORS_METADATA)


def generation_config(settings: Settings, tokenizers: Tokenizers, policy: str) -> GenerationConfig:
    """Returns what makes `transformers` and vLLM sample and stop as in training: by temperature alone."""
    tokenizer = tokenizers[policy]
    named = (tokenizer.eos_token_id, *settings.stop_token_ids(tokenizers, policy))
    named += tuple(chat.turn_end(named) for chat in settings.chat_formats({policy: tokenizer}).values())
    known = settings.vocab_size(tokenizers, policy)  # a tokenizer may have more
    ends = [token for token in dict.fromkeys(named) if token is not None and token < known]
    pad = tokenizer.pad_token_id
    return GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,  # without it, transformers samples from the likeliest 50
        top_p=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=ends[0] if pad is None or pad >= known else pad,
    )
