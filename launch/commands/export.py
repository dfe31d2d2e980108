"""`cory export RUN --policy P --out DIR`: a trained policy as an ordinary Hugging Face folder, or PEFT adapter."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, run

if TYPE_CHECKING:
    from launch.models.trained import Trained

EPILOG = """DIR gets the weights (safetensors), config, tokenizer, chat template, a generation config that samples as in
training, and a model card. `transformers` and `vllm serve DIR` load it as they load any model. What was trained with
weights=lora becomes a PEFT adapter, which is loaded onto its base; --merge makes a whole model of both.

Resuming a run can execute what is in its checkpoint; this cannot: it reads the policy's weights and nothing else. The
base model is loaded as in training, its own code included if the run has trust_remote_code.

examples:
  cory export runs/demo --policy llm_1 --out my-model
  cory export runs/adapters --policy llm_1 --merge --out my-model
  cory export runs/demo --policy llm_2 --checkpoint latest --dtype bf16 --out my-model
"""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0, or 2 after a user's mistake.
    """
    parser = Parser(
        prog="cory export",
        description="Write a trained policy as a Hugging Face folder, or as a PEFT adapter.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its URI")
    parser.add_argument("--policy", metavar="P", help="such as llm_1; may be left out where there is one only")
    parser.add_argument("--out", type=local_path, metavar="DIR", required=True, help="a folder that is new, or empty")
    parser.add_argument(
        "--checkpoint", metavar="C", help="best, latest or an update's number (default: best, or else latest)"
    )
    parser.add_argument("--merge", action="store_true", help="put the adapter into its base (runs with weights=lora)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_args(argv)
    return run(lambda: export(options), debug=options.debug)


def export(options: argparse.Namespace) -> int:
    """Writes the folder and says what is in it.

    Raises:
        CommandError: no such run, checkpoint or policy, or a folder that is in use.
    """
    from launch.cluster import session
    from launch.models.trained import open_trained

    session.quiet_libraries(options.debug)
    place = _free(options.out)
    trained = open_trained(options.run, options.checkpoint)
    if options.policy is None and trained.settings.num_agents > 1:
        raise CommandError(f"Which policy? Name it with --policy: {', '.join(trained.settings.modules)}.")
    policy = options.policy or trained.settings.modules[0]
    trained.check_policies([policy])
    for text in warnings_of(trained, policy):
        print(f"Warning: at update {trained.update}, {text}", file=sys.stderr)

    if options.merge and trained.settings.lora is None:
        raise CommandError(f"{options.run} trained all weights, so there is no adapter to merge. Leave out --merge.")
    write(trained, policy, place, options.dtype, options.merge)
    megabytes = sum(file.stat().st_size for file in place.iterdir()) / 1e6
    print(f"{options.out}: {policy} after update {trained.update}, {options.dtype}, {megabytes:,.0f} MB.")
    return 0


def warnings_of(trained: Trained, policy: str) -> list[str]:
    """Returns the health warnings that stood for a policy at the checkpoint."""
    return [warning["text"] for warning in trained.lines[-1].get("health", []) if warning["of"] == policy]


def write(trained: Trained, policy: str, place: Path, dtype: str, merge: bool) -> None:
    """Writes a policy, all of it or nothing.

    Args:
        trained: where it is read from.
        policy: one of the run's.
        place: a folder that does not exist or is empty.
        dtype: `fp32` or `bf16`.
        merge: an adapter into its base; else it is written as it is.

    Raises:
        CommandError: the checkpoint is damaged, the base model or its tokenizer is not what it was, or there can be no
            such folder.
        ModelError: there is no base model any more.
        OSError: the folder could not be written.
    """
    import torch

    from launch.models.exported import generation_config, save_adapter, whole_model
    from launch.models.model_card import model_card
    from policies.models.whole_folder import whole_folder

    settings = trained.settings
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"The folder {place} cannot be made: {error.strerror}.") from error
    try:
        tokenizer = settings.make_tokenizer()
    except ValueError as error:
        raise CommandError(" ".join(str(error).split())) from error
    sampling = generation_config(settings, tokenizer)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    model = whole_model(trained, policy).to(types[dtype]) if merge or settings.lora is None else None
    card = model_card(trained, policy, warnings_of(trained, policy), adapter=model is None)
    with whole_folder(place) as folder, rust_errors_told(place):
        if model is None:
            save_adapter(trained, policy, folder, types[dtype])
        else:
            model.generation_config = sampling  # else the base's is checked, and may not pass
            model.save_pretrained(folder)
        sampling.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors makes files that only their owner can read


@contextlib.contextmanager
def rust_errors_told(place: Path) -> Iterator[None]:
    """Turns what safetensors and tokenizers, which are written in Rust, raise on a full disk into an OSError."""
    try:
        yield
    except Exception as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(place)) from error


def _free(out: Path) -> Path:
    """Returns the folder to write.

    Raises:
        CommandError: there is something in its place, or it would be gone with a job.
    """
    from launch.run_folder.storage import check_place

    check_place(str(out), "model")
    place = out.resolve()
    if place.exists() and not place.is_dir():
        raise CommandError(f"{out} is a file: name a folder with --out.")
    if place.is_mount():  # nothing can be renamed to it
        raise CommandError(f"{out} is where a disk is mounted: name a folder in it with --out.")
    if place.is_dir() and any(place.iterdir()):
        raise CommandError(f"{out} is not empty: name another folder with --out.")
    return place
