"""The model card of an exported policy: description, usage, results and training settings."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

from cory_env.pickled import display_name
from cory_env.tasks import Task
from launch.display.tables import format_metric, metric_format
from launch.models.trained import PolicySet
from launch.run_folder.manifest import own_version
from launch.run_folder.records import MetricValues
from launch.run_folder.sources import restore_task
from launch.training.summary import SUMMARY_METRICS
from policies.generation.vllm_lora import MAX_LORA_RANK, vllm_max_rank
from policies.models.model_names import AVERAGE_POLICY, is_bundled
from policies.models.revision import split_revision
from policies.settings.settings import Settings, settings_in_categories
from policies.settings.yaml12 import write_yaml

CARD_TEMPLATE = Path(__file__).with_suffix(".md")
"""Jinja template of the card."""


def model_card(
    trained: PolicySet, policy_id: str, warnings: list[str], adapter: bool = False, long_rope: bool = False
) -> str:
    """Returns the card as Markdown, with the metadata header of model hubs.

    Args:
        trained: the policies.
        policy_id: one of the run's, or `AVERAGE_POLICY`.
        warnings: health warnings of the policy.
        adapter: the export is an adapter without its base.
        long_rope: longrope's long factors were used in training (`fix_rope_factors`).
    """
    settings, base, lora = trained.settings, trained.base(policy_id), trained.lora(policy_id)
    system = [] if settings.system_prompt is None else [{"role": "system", "content": settings.system_prompt}]
    base_path, revision = base_model(trained, policy_id)
    card = ModelCard.from_template(
        _header(settings, base, trained.base_path(policy_id), adapter),
        template_path=str(CARD_TEMPLATE),
        s=settings,
        policy_id=policy_id,
        run=trained.name,
        base_model=Path(base).name if Path(base).is_dir() else base,
        base_path=base_path,
        revision=revision,
        updates=trained.update,
        version=own_version(),
        policy_ids=settings.policy_ids,
        frozen_roles=[
            f"{role.name}: `{role.frozen_model}`" for role in settings.roles or () if role.frozen_model is not None
        ],
        num_teams=settings.teams,
        is_mean=policy_id == AVERAGE_POLICY,
        warnings=warnings,
        adapter=adapter,
        lora=lora,
        quantized=settings.quantization != "none",
        long_rope=long_rope,
        max_rank=MAX_LORA_RANK,
        rank_limit=vllm_max_rank(lora) if lora and lora.rank <= MAX_LORA_RANK else None,
        messages=[*system, {"role": "user", "content": "PROMPT"}],
        prompts=_prompts(trained),
        results=_results(trained, policy_id),
        command=_block(display_name(trained.command)),
        settings=_block(write_yaml(_training_settings(settings)), "yaml"),
    )
    return str(card)


def base_model(trained: PolicySet, policy_id: str) -> tuple[str, str | None]:
    """Returns the base model of a policy: a hub id, or an absolute path; and its revision, if the run set one."""
    path, revision = split_revision(trained.base_path(policy_id))
    return str(Path(path).resolve()) if Path(path).is_dir() else path, revision.get("revision")


def _training_settings(settings: Settings) -> dict[str, object]:
    """Returns the settings that affect the trained policy, without unset ones."""
    names = settings_in_categories("task", "policy", "sampling", "learning")
    return {name: value for name, value in settings.public_dict().items() if name in names and value is not None}


def _header(settings: Settings, model: str, path: str, adapter: bool) -> ModelCardData:
    is_hub_id = not is_bundled(model) and not Path(model).is_dir()  # neither a bundled model nor a folder
    base = _base_card(path)
    return ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=model if is_hub_id else None,
        license=base.license,
        language=base.language,
        tags=["cory", "multi-agent", "ppo" if settings.critic else settings.advantage, "reinforcement-learning"],
    )


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
    parts = [f"As {role}:\n{_block(text)}" for role, text in prompts.items()]
    shown = any("feedback}" in text for text in prompts.values())
    return "\n\n".join([*parts, *_feedback(settings, task, shown=shown)])


def _feedback(settings: Settings, task: Task, *, shown: bool) -> list[str]:
    """Returns a paragraph about the feedback between agents, if there was any; `shown`: prompts contained it."""
    if task.feedback is None or settings.num_agents == 1:
        return []
    name = f"`{display_name(task.feedback)}`"
    if shown:
        text = (
            f"`{{feedback}}` is what the feedback function {name} returned for the last of the earlier answers, or "
            f"`{task.solved_feedback}` if it had nothing to correct."
        )
        if settings.roles is not None:
            text += " `{ROLE.feedback}` is the same for the answers of an earlier role."
    else:
        text = f"The feedback function {name} checked each response, but prompts did not show what it returned."
    if settings.stop_when is not None:
        training = "in training and evaluation" if settings.stop_in_training else "in evaluation, but not in training"
        text += f" A chain ended as soon as there was nothing to correct, {training}."
    return [text]


def _results(trained: PolicySet, policy_id: str) -> str:
    """Returns a table of the policy's metrics: held-out before and after training, and in the last update."""
    columns: dict[str, MetricValues] = {}
    evaluated = [line for line in trained.metrics if policy_id in line.get("evaluation", {})]
    for line in (evaluated[0], evaluated[-1]) if evaluated else ():
        columns[f"held-out, update {line['update']}"] = line["evaluation"][policy_id]
    last = trained.metrics[-1]
    if policy_id in last.get("policy", {}):
        columns[f"training, update {last['update']}"] = last["policy"][policy_id]
    if not columns:
        subject = "the LLM with the mean weights" if policy_id == AVERAGE_POLICY else "this policy"
        return (
            f"There are no figures for {subject}, as the run did not evaluate it: training does so with "
            "eval_average=true, and `cory evaluate` for a finished run."
        )
    heading = ["", *columns]
    rows = [
        [metric_format(key).heading, *(format_metric(key, figures[key]) for figures in columns.values())]
        for key in SUMMARY_METRICS
    ]
    table = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _block(text: str, language: str = "") -> str:
    """Returns a fenced code block, with fences longer than any run of backticks in the text."""
    fence = "`" * max([3, *(len(backticks) + 1 for backticks in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
