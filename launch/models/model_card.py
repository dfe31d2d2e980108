"""The model card of an exported policy: what it is, how to ask it, what it reached, and how it was trained."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

from cory_env.pickled import display_name as without_code
from launch.display.tables import format_metric, metric_format
from launch.models.trained import PolicySet
from launch.run_folder.manifest import own_version
from launch.run_folder.records import Figures
from launch.run_folder.sources import task_without_queries
from launch.training.summary import COLUMNS
from policies.generation.vllm_lora import MOST, room
from policies.models.model_names import AVERAGE, model_path
from policies.settings.settings import Settings, settings_in
from policies.settings.yaml12 import write_yaml

CARD_TEMPLATE = Path(__file__).with_suffix(".md")
"""The card's text, as a Jinja template."""


def model_card(trained: PolicySet, policy: str, warnings: list[str], adapter: bool = False) -> str:
    """Returns the card as Markdown, with the header that model hubs read.

    Args:
        trained: what the policy is of.
        policy: one of its policies, or the `AVERAGE` of them.
        warnings: the health warnings that stood for it.
        adapter: it is an adapter alone, without its base.
    """
    settings, base, lora = trained.settings, trained.base(policy), trained.lora(policy)
    system = [] if settings.system_prompt is None else [{"role": "system", "content": settings.system_prompt}]
    card = ModelCard.from_template(
        _header(settings, base, adapter),
        template_path=str(CARD_TEMPLATE),
        s=settings,
        policy=policy,
        run=trained.name,
        base_model=Path(base).name if Path(base).is_dir() else base,
        base_path=base_path(trained, policy),
        updates=trained.update,
        version=own_version(),
        llms=settings.policy_ids,
        teams=len(settings.policy_ids) // settings.num_agents,
        is_mean=policy == AVERAGE,
        warnings=warnings,
        adapter=adapter,
        lora=lora,
        quantized=settings.quantization != "none",
        max_rank=MOST,
        rank_limit=room(lora) if lora and lora.rank <= MOST else None,
        messages=[*system, {"role": "user", "content": "PROMPT"}],
        prompts=_prompts(trained),
        results=_results(trained, policy),
        origin=_block(without_code(trained.origin)),
        settings=_block(write_yaml(_training_settings(settings)), "yaml"),
    )
    return str(card)


def base_path(trained: PolicySet, policy: str) -> str:
    """Returns where a policy's base is: a hub id, or a folder whatever folder one is in."""
    path = model_path(trained.base(policy))
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _training_settings(settings: Settings) -> dict[str, object]:
    """Returns the settings that say what was learned, without those that are unset."""
    told = settings_in("task", "policy", "sampling", "learning")
    return {name: value for name, value in settings.public_dict().items() if name in told and value is not None}


def _header(settings: Settings, model: str, adapter: bool) -> ModelCardData:
    named = model == model_path(model) and not Path(model).is_dir()  # no name of ours: a hub id
    base = _base_card(model)
    return ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=model if named else None,
        license=base.license,
        language=base.language,
        tags=["cory", "multi-agent", "ppo" if settings.critic else settings.advantage, "reinforcement-learning"],
    )


def _base_card(model: str) -> ModelCardData:
    """Returns the header of the base model's own card, empty where it has none that can be read."""
    file = cached_file(
        model_path(model),
        "README.md",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:
        return ModelCardData() if file is None else ModelCard.load(file).data
    except (ValueError, TypeError, yaml.YAMLError):
        return ModelCardData()


def _prompts(trained: PolicySet) -> str:
    """Returns the templates that the policy was trained with; those of a task are known only where its data is."""
    settings = trained.settings
    try:
        task = task_without_queries(trained.sources) or settings.make_task()
    except (ValueError, OSError):
        return f"Those of the task `{settings.task}`."
    prompts = {"pioneer": task.prompt_template}
    if settings.num_agents > 1 and settings.knowledge_transfer:
        prompts |= dict.fromkeys(settings.roles[1:], task.observer_template)
    return "\n\n".join(f"As {role}:\n{_block(text)}" for role, text in prompts.items())


def _results(trained: PolicySet, policy: str) -> str:
    """Returns the policy's figures: alone on held-out queries, before and after, and in its last update."""
    columns: dict[str, Figures] = {}
    evaluated = [line for line in trained.lines if policy in line.get("evaluation", {})]
    for line in (evaluated[0], evaluated[-1]) if evaluated else ():
        columns[f"held-out, update {line['update']}"] = line["evaluation"][policy]
    last = trained.lines[-1]
    if policy in last.get("policy", {}):
        columns[f"training, update {last['update']}"] = last["policy"][policy]
    if not columns:
        return "None: the run did not evaluate it (eval_average=true does). `cory evaluate FOLDER` can."
    heading = ["", *columns]
    rows = [
        [metric_format(key).heading, *(format_metric(key, figures[key]) for figures in columns.values())]
        for key in COLUMNS
    ]
    table = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _block(text: str, language: str = "") -> str:
    """Returns a block of code, between fences that are longer than any in the text."""
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
