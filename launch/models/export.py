"""Exports a trained policy as a Hugging Face model or PEFT adapter folder, atomically."""

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
from launch.models.model_card import base_model, model_card
from launch.models.trained import PolicySet, trainable
from launch.run_folder.storage import check_location
from policies.compat.transformers import unsaved_weights
from policies.files import atomic_dir
from policies.models.adapters import add_lora, lora_delta, peft_config, peft_names
from policies.models.families import fix_rope_factors
from policies.models.language_model import load_language_model, meta_model
from policies.models.model_check import load_config
from policies.models.revision import split_revision
from policies.models.stored_weights import StoredWeights
from policies.settings.settings import Settings, Tokenizers

TensorLoader = Callable[[str], Tensor]
"""Returns a tensor of a model by its name."""
SHARD_BYTES = 5_000_000_000
"""Maximum size of a weights file, which is in memory while it is written."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SAFETENSORS_METADATA = {"format": "pt"}


def choose_policy(trained: PolicySet, name: str | None) -> str:
    """Returns the policy id for a user's name; without a name, the id of the only policy.

    Raises:
        CommandError: the name is unknown, is a frozen model's, or is missing although there are several policies.
    """
    if name is None and len(trained.available_policy_ids) > 1:
        raise CommandError(f"Missing --policy. Use one of: {trained.available_names}.")
    policy_id = trained.resolve_names([name or trained.available_policy_ids[0]])[0]
    if model := trained.settings.frozen_models.get(policy_id):
        raise CommandError(f"{policy_id} is the frozen model {model}, which training did not change. Use it itself.")
    return policy_id


def export_warnings(trained: PolicySet, policy_id: str) -> list[str]:
    """Returns warnings for the user: health warnings of the policy, and changes of its model since training.

    Raises:
        CommandError: the model or its tokenizer was not found.
    """
    return [f"At update {trained.update}, {text}" for text in _health_warnings(trained, policy_id)] + trained.warnings()


def _health_warnings(trained: PolicySet, policy_id: str) -> list[str]:
    return [warning["text"] for warning in trained.metrics[-1].get("health", []) if warning["subject"] == policy_id]


def check_free_folder(out: Path) -> None:
    """Checks that a model can be exported to a folder.

    Raises:
        CommandError: the folder exists and is not empty, would disappear with a Ray job, or is a URI.
    """
    check_location(str(out), "model")
    if out.exists() and (not out.is_dir() or out.is_mount() or any(out.iterdir())):  # a mount point cannot be replaced
        raise CommandError(f"{out} is not a new or empty folder. Choose another one with --out.")


def export_policy(trained: PolicySet, policy_id: str, out: Path, dtype: str = "fp32", merge: bool = False) -> None:
    """Exports a policy atomically.

    Args:
        trained: the policies.
        policy_id: one of the run's, or `AVERAGE_POLICY`.
        out: a folder that does not exist or is empty.
        dtype: `fp32` or `bf16`.
        merge: merge an adapter into its base model; otherwise write the adapter.

    Raises:
        CommandError: there is no adapter to merge, the checkpoint is damaged, the base model or its tokenizer has
            changed, or the folder is not empty or could not be written.
        ModelError: the base model was not found.
        OSError: the folder could not be written.
    """
    settings, out = trained.settings, out.resolve()
    check_free_folder(out)
    if merge and settings.lora is None:
        raise CommandError(f"--merge requires an adapter, but {trained.location} trained all weights.")
    make_folder(out.parent)
    try:
        tokenizer = load_tokenizer(trained.base_path(policy_id), settings.trust_remote_code)
        tokenizers = settings.make_tokenizers()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error
    sampling = generation_config(settings, tokenizers, policy_id if policy_id in tokenizers else settings.policy_ids[0])
    is_adapter = settings.lora is not None and not merge
    full_model = None if is_adapter else merged_model(trained, policy_id)
    base_config = load_config(trained.base_path(policy_id), settings.trust_remote_code)
    long_rope = fix_rope_factors(base_config, settings.max_length)
    card = model_card(trained, policy_id, _health_warnings(trained, policy_id), is_adapter, long_rope)
    try:
        with atomic_dir(out) as folder:
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if full_model is None:
                save_adapter(trained, policy_id, folder, DTYPES[dtype])
            else:
                model, tensors = full_model
                # Otherwise `save_pretrained` validates the base's generation config, which may be invalid.
                model.to(DTYPES[dtype]).generation_config = sampling
                model.save_pretrained(folder, state_dict={})
                write_weights(model, tensors, folder)
            sampling.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors creates files that only their owner can read
    except Exception as error:
        # Such as a full disk, for which the tokenizers library has no exception class.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise CommandError(f"{out} could not be written: {error}.") from error
        raise


def merged_model(trained: PolicySet, policy_id: str) -> tuple[PreTrainedModel, TensorLoader]:
    """Returns a policy as a full model, with any adapter merged.

    Args:
        trained: the policies.
        policy_id: one of the run's, or `AVERAGE_POLICY`.

    Returns:
        The base model on the meta device with the base's own configuration, in which longrope has the factors of
        training for rows of all lengths; and a function that computes a fp32 weight by its name in the model.

    Raises:
        CommandError: the weights do not match the base model, or the base model was quantized in training.
        ModelError: the base model cannot be loaded.
    """
    settings = trained.settings
    if settings.quantization != "none":
        raise CommandError(
            f"--merge conflicts with quantization={settings.quantization}: the adapter was trained on a quantized base "
            "and would respond differently on another one. Remove --merge."
        )
    path = trained.base_path(policy_id)
    model = load_language_model(path, settings.trust_remote_code, device="meta")
    base = _base_tensors(path, settings.trust_remote_code, model)
    weights, lora = trained.weights(policy_id), trained.lora(policy_id)
    lora_model = model if lora is None else add_lora(model.requires_grad_(False), lora)
    trained.check_base(policy_id, weights, trainable(lora_model))
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}  # tied weights have several

    def make_tensor(name: str) -> Tensor:
        name = first_names.get(id(model.get_parameter_or_buffer(name)), name)
        if name in weights:
            return torch.from_numpy(weights[name])
        layer = name.removesuffix(".weight")
        factors = {
            factor.removeprefix(f"{layer}."): torch.tensor(weights[factor])
            for factor in weights
            if factor.startswith(f"{layer}.lora_")
        }
        return base(name) + lora_delta(lora_model, layer, factors) if factors else base(name)

    # Training disables dropout in the configuration; users who continue training may want it back.
    hub_id, revision = split_revision(path)
    model.config = AutoConfig.from_pretrained(hub_id, **revision, trust_remote_code=settings.trust_remote_code)
    fix_rope_factors(model.config, settings.max_length)
    return model, make_tensor


def _base_tensors(path: str, trust_remote_code: bool, model: PreTrainedModel) -> TensorLoader:
    """Returns a function that reads a model's initial fp32 tensors from its files.

    If the files have another layout than the model, the tensors come from the model in memory.
    """
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
    """Writes a model's weights like `save_pretrained`, but file by file, to limit memory to one file.

    Args:
        model: on the meta device; provides names, dtypes, tied weights and the storage format of its family.
        tensors: returns weights and persistent buffers, on the CPU.
        folder: an existing folder.
        shard_bytes: maximum size of a file; a file with a single layer may be larger.

    Raises:
        OSError: the folder cannot be written.
    """
    unsaved = unsaved_weights(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    state = remove_tied_weights_from_state_dict(state, model)
    layers: dict[str, list[str]] = {}  # some families split a layer's tensors, or store several as one
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
        del stored  # before the tensors of the next file are created
    if len(files) > 1:
        metadata = {"total_parameters": model.num_parameters(), "total_size": sum(x.nbytes for x in state.values())}
        text = json.dumps({"metadata": metadata, "weight_map": index}, indent=2, sort_keys=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n", encoding="utf-8")


def save_adapter(trained: PolicySet, policy_id: str, folder: Path, dtype: torch.dtype) -> None:
    """Writes a policy's adapter in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        trained: the policies.
        policy_id: one of the run's, or `AVERAGE_POLICY`.
        folder: an existing folder.
        dtype: of the weights.

    Raises:
        CommandError: the weights do not match the base model.
        ModelError: the base model was not found.
        OSError: the folder cannot be written.
    """
    lora, weights = trained.lora(policy_id), trained.weights(policy_id)
    assert lora is not None
    base = meta_model(trained.base_path(policy_id), trained.settings.trust_remote_code)
    trained.check_base(policy_id, weights, trainable(add_lora(base, lora)))
    config = peft_config(base, lora)
    config.base_model_name_or_path, config.revision = base_model(trained, policy_id)
    config.inference_mode = True
    config.save_pretrained(folder)
    tensors = {name: torch.tensor(array).to(dtype) for name, array in peft_names(weights).items()}
    save_file(tensors, folder / "adapter_model.safetensors", _SAFETENSORS_METADATA)


def generation_config(settings: Settings, tokenizers: Tokenizers, policy_id: str) -> GenerationConfig:
    """Returns a generation config with which `transformers` and vLLM sample and stop as in training."""
    tokenizer = tokenizers[policy_id]
    candidates = (tokenizer.eos_token_id, *settings.stop_token_ids(tokenizers, policy_id))
    candidates += tuple(chat.turn_end(candidates) for chat in settings.chat_formats({policy_id: tokenizer}).values())
    vocab_size = settings.vocab_size(tokenizers, policy_id)  # the tokenizer may have more tokens than the model
    end_ids = [token for token in dict.fromkeys(candidates) if token is not None and token < vocab_size]
    pad_id = tokenizer.pad_token_id
    return GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,  # the default of transformers is 50
        top_p=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end_ids,
        pad_token_id=end_ids[0] if pad_id is None or pad_id >= vocab_size else pad_id,
    )
