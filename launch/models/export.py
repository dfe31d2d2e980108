"""Exports a trained policy as a Hugging Face model or PEFT adapter folder with a model card, atomically."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from cory_env.pickled import display_name
from cory_env.tokenizer import load_tokenizer
from launch.console.errors import CommandError, make_folder
from launch.display.tables import format_metric, metric_format
from launch.models.trained import PolicySet
from launch.run_folder.manifest import own_version
from launch.run_folder.storage import check_location
from launch.training.summary import SUMMARY_METRICS
from policies.files import atomic_dir
from policies.generation.vllm_lora import MAX_LORA_RANK, vllm_max_rank
from policies.models.adapters import add_lora, merge_lora, peft_config, peft_names
from policies.models.families import fix_rope_factors
from policies.models.language_model import load_language_model, meta_model
from policies.models.model_check import load_config
from policies.models.model_names import AVERAGE_POLICY, is_bundled
from policies.models.revision import split_revision
from policies.settings.settings import settings_in_categories
from policies.settings.yaml12 import write_yaml

CARD_TEMPLATE = Path(__file__).with_name("model_card.md")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export_policy(
    trained: PolicySet,
    policy: str | None,
    out: Path,
    dtype: str = "fp32",
    merge: bool = False,
    warn: Callable[[str], object] = warnings.warn,
) -> str:
    """Exports a policy atomically, and returns its id.

    Args:
        policy: its name or id; None: the only one.
        dtype: `fp32` or `bf16`.
        merge: merge an adapter into its base model; otherwise write the adapter.
        warn: called with health warnings of the policy, and changes of its model since training.
    """
    check_location(str(out), "model")
    settings, out = trained.settings, out.resolve()
    if out.exists() and (not out.is_dir() or out.is_mount() or any(out.iterdir())):  # a mount point cannot be replaced
        raise CommandError(f"{out} is not a new or empty folder. Choose another one with --out.")
    policy_id = _choose_policy(trained, policy)
    is_adapter = settings.lora is not None and not merge
    if merge and settings.lora is None:
        raise CommandError(f"--merge requires an adapter, but {trained.location} trained all weights.")
    health = [entry["text"] for entry in trained.metrics[-1].get("health", []) if entry["subject"] == policy_id]
    for text in [*(f"At update {trained.update}, {text}" for text in health), *trained.warnings()]:
        warn(text)
    make_folder(out.parent)
    path = trained.base_path(policy_id)
    tokenizer, sampling = load_tokenizer(path, settings.trust_remote_code), generation_config(trained, policy_id)
    model = None if is_adapter else full_model(trained, policy_id, DTYPES[dtype])
    long_rope = fix_rope_factors(load_config(path, settings.trust_remote_code), settings.max_length)
    card = model_card(trained, policy_id, health, is_adapter, long_rope)
    try:
        with atomic_dir(out) as folder:
            tokenizer.save_pretrained(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if model is None:
                save_adapter(trained, policy_id, folder, DTYPES[dtype])
            else:
                model.generation_config = sampling  # the base's may be invalid, which `save_pretrained` rejects
                model.save_pretrained(folder)
            sampling.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors creates files that only their owner can read
    except Exception as error:
        # Such as a full disk, for which the tokenizers library has no exception class.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise CommandError(f"{out} could not be written: {error}.") from error
        raise
    return policy_id


def _choose_policy(trained: PolicySet, name: str | None) -> str:
    """Returns the policy id for a user's name; without a name, the id of the only policy."""
    if name is None and len(trained.available_policy_ids) > 1:
        raise CommandError(f"Missing --policy. Use one of: {trained.available_names}.")
    policy_id = trained.resolve_names([name or trained.available_policy_ids[0]])[0]
    if model := trained.settings.frozen_models.get(policy_id):
        raise CommandError(f"{policy_id} is the frozen model {model}, which training did not change. Use it itself.")
    return policy_id


def full_model(trained: PolicySet, policy_id: str, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a policy as a full model on the CPU, with any adapter merged in fp32.

    Its configuration is the base's own, in which longrope has the factors of training for rows of all lengths.
    """
    settings, lora = trained.settings, trained.lora(policy_id)
    if settings.quantization != "none":
        raise CommandError(
            f"--merge conflicts with quantization={settings.quantization}: the adapter was trained on a quantized base "
            "and would respond differently on another one. Remove --merge."
        )
    path, weights = trained.base_path(policy_id), trained.checked_weights(policy_id)
    model = load_language_model(path, settings.trust_remote_code, dtype if lora is None else torch.float32)
    policy = model if lora is None else add_lora(model.requires_grad_(False), lora)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in weights:
                parameter.copy_(torch.tensor(weights[name]))
        if lora is not None:
            merge_lora(policy)
    # Training disables dropout in the configuration; users who continue training may want it back.
    model.config = load_config(path, settings.trust_remote_code)
    fix_rope_factors(model.config, settings.max_length)
    return cast(PreTrainedModel, model.to(dtype))


def save_adapter(trained: PolicySet, policy_id: str, folder: Path, dtype: torch.dtype) -> None:
    """Writes a policy's adapter in PEFT's format: `adapter_model.safetensors` and `adapter_config.json`."""
    lora, weights = trained.lora(policy_id), trained.checked_weights(policy_id)
    assert lora is not None
    config = peft_config(meta_model(trained.base_path(policy_id), trained.settings.trust_remote_code), lora)
    config.base_model_name_or_path, config.revision = base_model(trained, policy_id)
    config.inference_mode = True
    config.save_pretrained(folder)
    tensors = {name: torch.tensor(array).to(dtype) for name, array in peft_names(weights).items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def generation_config(trained: PolicySet, policy_id: str) -> GenerationConfig:
    """Returns a generation config with which `transformers` and vLLM sample and stop as in training."""
    settings, tokenizers, policy_id = trained.settings, trained.tokenizers, trained.initial_id(policy_id)
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


def model_card(
    trained: PolicySet, policy_id: str, warnings: list[str], adapter: bool = False, long_rope: bool = False
) -> str:
    """Returns the card as Markdown, with the metadata header of model hubs.

    Args:
        adapter: the export is an adapter without its base.
        long_rope: longrope's long factors were used in training (`fix_rope_factors`).
    """
    settings, lora = trained.settings, trained.lora(policy_id)
    base, _ = split_revision(trained.base(policy_id))
    base_path, revision = base_model(trained, policy_id)
    is_hub_id = not is_bundled(base) and not Path(base).is_dir()
    base_card = _base_card(trained.base_path(policy_id))
    header = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_hub_id else None,
        license=base_card.license,
        language=base_card.language,
        tags=["cory", "multi-agent", "ppo" if settings.critic else settings.advantage, "reinforcement-learning"],
    )
    names = settings_in_categories("task", "policy", "sampling", "learning")
    values = {name: value for name, value in settings.public_dict().items() if name in names and value is not None}
    card = ModelCard.from_template(
        header,
        template_path=str(CARD_TEMPLATE),
        s=settings,
        policy_id=policy_id,
        trained=trained,
        base_model=Path(base).name if Path(base).is_dir() else base,
        base_path=base_path,
        revision=revision,
        version=own_version(),
        is_mean=policy_id == AVERAGE_POLICY,
        warnings=warnings,
        adapter=adapter,
        lora=lora,
        long_rope=long_rope,
        max_rank=MAX_LORA_RANK,
        rank_limit=vllm_max_rank(lora) if lora and lora.rank <= MAX_LORA_RANK else None,
        prompts=_prompts(trained),
        results=_results(trained, policy_id),
        command=_block(display_name(trained.command)),
        settings=_block(write_yaml(values), "yaml"),
    )
    return str(card)


def base_model(trained: PolicySet, policy_id: str) -> tuple[str, str | None]:
    """Returns the base model of a policy: a hub id, or an absolute path; and its revision, if the run set one."""
    path, revision = split_revision(trained.base_path(policy_id))
    return str(Path(path).resolve()) if Path(path).is_dir() else path, revision.get("revision")


def _base_card(path: str) -> ModelCardData:
    """Returns the metadata of the base model's card; empty if there is none or it cannot be parsed."""
    hub_id, revision = split_revision(path)
    file = cached_file(
        hub_id,
        "README.md",
        **revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:
        return ModelCardData() if file is None else ModelCard.load(file).data
    except (ValueError, TypeError, yaml.YAMLError):
        return ModelCardData()


def _prompts(trained: PolicySet) -> str:
    """Returns the prompt templates of training, or a reference to the task if it is not recorded."""
    settings, task = trained.settings, trained.task
    if task is None:
        return f"Those of the task `{settings.task}`."
    sees_others = settings.knowledge_transfer
    prompts = {
        position.role.name: position.role.prompt
        or (task.observer_template if position.stage and sees_others else task.prompt_template)
        for position in settings.positions[: None if sees_others or settings.roles else 1]
    }
    return "\n\n".join(f"As {role}:\n{_block(text)}" for role, text in prompts.items())


def _results(trained: PolicySet, policy_id: str) -> str:
    """Returns a table of the policy's held-out metrics before and after training."""
    evaluated = [line for line in trained.metrics if policy_id in line.get("evaluation", {})]
    columns = {f"update {line['update']}": line["evaluation"][policy_id] for line in evaluated[:1] + evaluated[-1:]}
    if not columns:
        return f"The run did not evaluate {policy_id}: set eval_average for the mean, or use `cory evaluate`."
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    for key in SUMMARY_METRICS:
        rows.append([metric_format(key).heading, *(format_metric(key, values[key]) for values in columns.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _block(text: str, language: str = "") -> str:
    """Returns a fenced code block, with fences longer than any run of backticks in the text."""
    fence = "`" * max([3, *(len(backticks) + 1 for backticks in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
