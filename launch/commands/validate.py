"""`cory validate`: checks a task's data, prompts and reward without loading a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launch.console.cli import ConfigFiles, Debug, Words
from launch.console.errors import CommandError

if TYPE_CHECKING:
    from policies.settings.settings import Settings


def validate(words: Words = None, config: ConfigFiles = None, debug: Debug = False) -> int:
    """Check a task's data, prompts and reward, with the model's tokenizer but without the model.

    The first argument is a task (arithmetic, code, custom, drafts, gsm8k, imdb, math, sudoku, or your own), a preset,
    or a file of settings. The command reads every query, prints each role's prompt, and calls the reward in its own
    process: on a few responses, and on all reference answers if the task has them. Of an environment (env=...), it runs
    PettingZoo's own test, and an episode of each split with placeholders as responses.

    Examples:
      cory validate "task=arithmetic?digits=3&operations=sums"
      cory validate gsm8k data=train.jsonl eval_data=test.jsonl max_response_tokens=256
      cory validate custom data=questions.jsonl reward=my_rewards:brevity model=./my-model
      cory validate env=my_games:negotiation
      cory validate mine.yaml

    Exit codes:
      0 the task is valid; 2 it is invalid or cannot be read.
    """
    from launch.cluster import session
    from launch.console.configuration import presets, split_arguments

    session.quiet_libraries(debug)
    request = split_arguments(words or (), config or ())
    if request.preset is not None and request.preset not in presets():
        request = request._replace(preset=None, pairs=[f"task={request.preset}", *request.pairs])
    request.check_task()
    settings = request.settings()

    from launch.training.description import describe_settings
    from launch.training.env_validation import validate_env
    from launch.training.preflight import data_warnings, fill_in_settings, load_task, make_chains
    from launch.training.validation import validate as validate_chain

    set_names = settings.model_fields_set
    settings = fill_in_settings(settings)
    task, tokenizers = load_task(settings)
    print(describe_settings(settings, set_names, task), end="\n\n")
    families = settings.families()
    warnings = [*data_warnings(settings, task), *_memory_warnings(settings)]
    is_valid = True
    for policy_id, chain in make_chains(settings, task, tokenizers).items():
        report = validate_env(chain, settings) if settings.env else validate_chain(chain, settings.reward_timeout)
        same_tokenizer = [name for name in families if tokenizers[name] is tokenizers[policy_id]]
        report.facts += dict.fromkeys(f"model family {families[name]}" for name in same_tokenizer)
        report.warnings += warnings
        if len(same_tokenizer) < len(families):
            print(f"With the tokenizer of {settings.models[policy_id]}:\n")
        print(report)
        is_valid = is_valid and report.ok
    return 0 if is_valid else 2


def _memory_warnings(settings: Settings) -> list[str]:
    """Returns a warning if a run with these settings does not fit into this machine's memory."""
    from launch.cluster.memory import check_run_memory

    try:
        check_run_memory(settings)
    except CommandError as error:
        return [str(error)]
    return []
