"""The model card of an exported policy: description, usage, results and training settings."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from cory_env.pickled import display_name
from launch.display.tables import format_metric, metric_format
from launch.models.trained import PolicySet
from launch.run_folder.manifest import own_version
from launch.run_folder.sources import restore_task
from launch.training.summary import SUMMARY_METRICS
from policies.generation.vllm_lora import MAX_LORA_RANK, vllm_max_rank
from policies.models.model_names import AVERAGE_POLICY, is_bundled
from policies.models.revision import split_revision
from policies.settings.settings import settings_in_categories
from policies.settings.yaml12 import write_yaml

CARD_TEMPLATE = Path(__file__).with_suffix(".md")
"""Jinja template of the card."""


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
    header = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_hub_id else None,
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


def _prompts(trained: PolicySet) -> str:
    """Returns the prompt templates of training, or a reference to the task if its data is not available here."""
    settings = trained.settings
    try:
        task = restore_task(trained.sources) or settings.make_task()
    except (ValueError, OSError):
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
