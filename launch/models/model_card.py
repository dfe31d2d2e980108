"""The model card of an exported policy: what it is, how to ask it, what it reached, and how it was trained."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import cached_file

from cory_env.pickled import shown as without_code
from launch.display.tables import shown, written
from launch.models.exported import base_name
from launch.models.trained import Trained
from launch.run_folder.manifest import own_version
from launch.run_folder.records import Figures
from launch.run_folder.sources import task_alone
from launch.training.summary import COLUMNS
from policies.generation.vllm_lora import MOST, room
from policies.models.model_names import AVERAGE, model_path
from policies.settings.core_yaml import write_yaml
from policies.settings.settings import Settings, deciding

PAPER = "https://arxiv.org/abs/2410.06101"

CARD = """{header}
# {name}

`{base}`, trained by reinforcement learning on the task `{task}`: {updates} updates of {how}, by cory-rllib {version}.
{made}{warnings}
## Use
```python
from transformers import AutoTokenizer
{load}
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
{example}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={max_response})[0]))
```

{serve} `generation_config.json` has both sample as in training, by temperature {temperature:g}
alone. It was trained on responses of at most {max_response} tokens.{stop}

## Prompts
{prompts}

## Results
{results}

Held-out: on queries never trained on, each answered by this policy alone. KL: from the base, in nats per response.
Combined: task reward − {kl_coef:g} · KL.

## Training
{origin}

{settings}
"""


def model_card(trained: Trained, policy: str, warnings: list[str], adapter: bool = False, step: float = 1.0) -> str:
    """Returns the card as Markdown, with the header that model hubs read.

    Args:
        trained: what the policy is of.
        policy: one of its policies, or the `AVERAGE` of them.
        warnings: the health warnings that stood for it.
        adapter: it is an adapter alone, without its base.
        step: of the way from the base to the policy.
    """
    settings = trained.settings
    return CARD.format(
        header=_header(settings, trained.base(policy), adapter),
        name=f"{policy} of {trained.name}",
        base=_base_name(trained.base(policy)),
        task=settings.task,
        updates=trained.update,
        how=_how(settings),
        made=_made(trained, policy, step),
        version=own_version(),
        warnings="".join(f"\n> **Warning.** {text}\n" for text in warnings),
        load=_load(settings, adapter),
        serve=_serve(trained, policy, adapter),
        example=_example(settings),
        max_response=settings.max_response,
        temperature=settings.temperature,
        stop=_stop(settings),
        prompts=_prompts(trained),
        results=_results(trained, policy, step),
        kl_coef=settings.report_kl_coef,
        settings=_block(write_yaml(_training(settings)), "yaml"),
        origin=_block(without_code(trained.origin)),
    )


def _training(settings: Settings) -> dict[str, object]:
    """Returns the settings that say what was learned, without those that are unset."""
    told = deciding("task", "policy", "sampling", "learning")
    return {name: value for name, value in settings.told().items() if name in told and value is not None}


def _header(settings: Settings, model: str, adapter: bool) -> str:
    named = model == model_path(model) and not Path(model).is_dir()  # no name of ours: a hub id
    base = _base_card(model)
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=model if named else None,
        license=base.license,
        language=base.language,
        tags=["cory", "multi-agent", "ppo" if settings.critic else settings.advantage, "reinforcement-learning"],
    )
    return f"---\n{data.to_yaml()}\n---"


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


def _base_name(model: str) -> str:
    return Path(model).name if Path(model).is_dir() else model


def _how(settings: Settings) -> str:
    teams = len(settings.modules) // settings.num_agents
    averaged = ""
    if settings.average_period is not None:
        share = "" if settings.average_share == 1 else f"{settings.average_share:g} of the way "
        averaged = f"move {share}to the mean of their weights every {settings.average_period} updates"
    if settings.num_agents == 1:
        apart = f", of {teams} LLMs that each answer queries of their own{', and ' * bool(averaged)}{averaged}"
        return settings.algorithm + apart * (teams > 1)
    exchange = f"every {settings.exchange_period} updates" if settings.exchange_period else "never"
    policies, roles = len(settings.modules), ", ".join(settings.roles)
    who = f"a chain of {settings.num_agents} agents ({roles}), played by {policies} LLMs, that answer"
    if policies == 1:
        who = f"one LLM in all roles of a chain of {settings.num_agents} agents ({roles}) that answer"
    if teams > 1:
        who = f"{teams} chains of {settings.num_agents} agents ({roles}), played by {policies} LLMs, that answer"
    turns = "" if policies == 1 else f" and exchange roles {exchange}"
    turns += f"{', ' * bool(averaged)}{averaged}"
    return f"CORY ([paper]({PAPER})), {who} each query in turn{turns}, by {settings.algorithm}"


def _made(trained: Trained, policy: str, step: float) -> str:
    """Returns what was made of what was trained, in sentences."""
    told = ""
    if policy == AVERAGE:
        llms, adapters = ", ".join(trained.settings.modules), trained.settings.lora is not None
        what = "what the adapters add to the base (the mean of the products B A)" if adapters else "the weights"
        told = f" It is the mean of {what} of {llms}, which started from that base."
    if step != 1:
        told += f" Its step from the base is {step:g} times as long: base + {step:g} · (trained − base)."
    return told and f"\n{told.strip()}\n"


def _load(settings: Settings, adapter: bool) -> str:
    """Returns the code that loads the policy."""
    if not adapter:
        return 'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("FOLDER")'
    imports, more = "GenerationConfig", ""
    if settings.quantization != "none":  # as the base was in training
        bits = f'load_in_4bit=True, bnb_4bit_quant_type="{settings.quantization}"'
        imports, more = "BitsAndBytesConfig, GenerationConfig", f", quantization_config=BitsAndBytesConfig({bits})"
    return (
        f"from peft import AutoPeftModelForCausalLM\nfrom transformers import {imports}\n\n"
        f'model = AutoPeftModelForCausalLM.from_pretrained("FOLDER"{more})  # the adapter on its base\n'
        'model.base_model.model.generation_config = GenerationConfig.from_pretrained("FOLDER")'
    )


def _serve(trained: Trained, policy: str, adapter: bool) -> str:
    """Returns a sentence on how to serve the policy."""
    settings, lora = trained.settings, trained.lora(policy)
    if not adapter:
        return "`vllm serve FOLDER` serves it."
    assert lora is not None
    if settings.quantization != "none":
        return f"It was trained on a base in {settings.quantization}, which vLLM does not serve by itself."
    if lora.rank > MOST:
        return f"vLLM serves adapters of a rank up to {MOST}, and this one has {lora.rank}: export it with --merge."
    command = (
        f"`vllm serve {base_name(trained, policy)} --enable-lora --max-lora-rank {room(lora)} "
        "--lora-modules NAME=FOLDER --generation-config FOLDER`"
    )
    return f"{command} serves it, where vLLM can adapt its family (GPT-2: export it with --merge)."


def _example(settings: Settings) -> str:
    if not settings.chat:
        return 'inputs = tokenizer("PROMPT", return_tensors="pt")'
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    setup = dates = ""
    if settings.chat_date is not None:
        setup = (
            "from datetime import date\n"
            f"today = date.fromisoformat({settings.chat_date!r}).strftime  # what the template was given in training\n"
        )
        dates = ',\n    strftime_now=today, date_string=today("%d %b %Y")'
    return (
        f"{setup}messages = {[*system, {'role': 'user', 'content': 'PROMPT'}]}\n"
        "inputs = tokenizer.apply_chat_template(\n"
        f'    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"{dates}\n)'
    )


def _stop(settings: Settings) -> str:
    """Returns how to get the text of a response that ends at the text of `stop`."""
    if settings.stop is None:
        return ""
    return (
        f" A response is the text before `{settings.stop!r}`: cut it there. vLLM leaves out the whole token that holds "
        'this, unless it is asked with `"include_stop_str_in_output": true`.'
    )


def _prompts(trained: Trained) -> str:
    """Returns the templates that the policy was trained with; those of a task are known only where its data is."""
    settings = trained.settings
    try:
        task = task_alone(trained.sources) or settings.make_task()
    except (ValueError, OSError):
        return f"Those of the task `{settings.task}`."
    prompts = {"pioneer": task.prompt_template}
    if settings.num_agents > 1 and settings.knowledge_transfer:
        prompts |= dict.fromkeys(settings.roles[1:], task.observer_template)
    return "\n\n".join(f"As {role}:\n{_block(text)}" for role, text in prompts.items())


def _results(trained: Trained, policy: str, step: float) -> str:
    """Returns the policy's figures: alone on held-out queries, before and after, and in its last update."""
    if step != 1:
        return "None: the run evaluated no policy at this step from the base. `cory evaluate FOLDER` can."
    columns: dict[str, Figures] = {}
    evaluated = [line for line in trained.lines if policy in line.get("evaluation", {})]
    for line in (evaluated[0], evaluated[-1]) if evaluated else ():
        columns[f"held-out, update {line['update']}"] = line["evaluation"][policy]
    last = trained.lines[-1]
    if policy in last.get("policy", {}):
        columns[f"training, update {last['update']}"] = last["policy"][policy]
    if not columns:
        return "None: the run did not evaluate it (evaluate_average=true does). `cory evaluate FOLDER` can."
    heading = ["", *columns]
    rows = [[shown(key).heading, *(written(key, figures[key]) for figures in columns.values())] for key in COLUMNS]
    table = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _block(text: str, language: str = "") -> str:
    """Returns a block of code, between fences that are longer than any in the text."""
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall("`+", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
