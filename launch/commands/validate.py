"""`cory validate`: checks a task's data, prompts and reward before any model is loaded."""

from __future__ import annotations

from launch.console.cli import ConfigFiles, Debug, Words
from launch.console.errors import CommandError


def validate(words: Words = None, config: ConfigFiles = None, debug: Debug = False) -> int:
    """Check a task's data, prompts and reward, without a model (its tokenizer is needed).

    The first word is a task (arithmetic, code, custom, drafts, gsm8k, imdb, math, or your own), a preset, or a file of
    settings. It reads every query, shows each role's prompt, and calls the reward in its own process: on a few
    responses, and on all gold answers of a task that has them. Without max_prompt_tokens, it says which one the task
    needs.

    Examples:
      cory validate arithmetic digits=3 operations=sums
      cory validate gsm8k data=train.jsonl eval_data=test.jsonl max_response_tokens=256
      cory validate custom data=questions.jsonl reward=my_rewards:brevity model=./my-model
      cory validate mine.yaml

    Exit codes:
      0 the task is sound; 2 it is not, or cannot be read.
    """
    from launch.cluster import session
    from launch.console.configuration import presets, read_file, read_words, split_words

    session.quiet_libraries(debug)
    request = split_words(words or (), config or ())
    if request.preset is not None and request.preset not in presets():
        request = request._replace(preset=None, pairs=[f"task={request.preset}", *request.pairs])
    given = {*read_words(request.pairs), *(name for file in request.files for name in read_file(file))}
    if "task" not in given and request.preset is None:
        raise CommandError(f"Name the task, or a file that does: cory validate {' '.join(['TASK', *request.pairs])}")
    settings = request.settings()

    from cory_env.validate import validate as examine
    from launch.training.preflight import load_task

    task, tokenizers = load_task(settings)
    families = settings.families()
    sound, first_readers = True, dict[int, str]()
    for policy, tokenizer in tokenizers.items():
        first_readers.setdefault(id(tokenizer), policy)
    for policy in first_readers.values():
        chain = settings.chain_settings(tokenizers, policy)
        if "max_prompt_tokens" not in given:
            chain["max_prompt_tokens"] = None
        try:
            report = examine(task, tokenizers[policy], **chain, reward_timeout=settings.reward_timeout)
        except ValueError as error:
            raise CommandError(str(error)) from error
        readers = [name for name in families if tokenizers[name] is tokenizers[policy]]
        report.facts += dict.fromkeys(f"model family {families[name]}" for name in readers)
        if "max_prompt_tokens" not in given and report.max_prompt_tokens > settings.max_prompt_tokens:
            report.warnings.append(
                f"max_prompt_tokens is {settings.max_prompt_tokens} unless it is set, too little for some prompts "
                "with full-length "
                f"references. Train with max_prompt_tokens={report.max_prompt_tokens}."
            )
        if len(readers) < len(families):
            print(f"As {settings.models[policy]} reads it:\n")
        print(report)
        sound = sound and report.ok
    return 0 if sound else 2
