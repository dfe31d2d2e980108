"""`cory export RUN --out DIR`: exports a trained policy as a Hugging Face model or PEFT adapter."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.console.cli import CheckpointOption, Debug, RunArgument, local_path


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=local_path, help="A new or empty folder.")],
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="Policy, such as llm_1, or `mean` for the mean of all; required if there are several."
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base (weights=lora).")] = False,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Data type of the weights.")] = "fp32",
    debug: Debug = False,
) -> None:
    """Export a trained policy as a Hugging Face model or PEFT adapter.

    DIR will contain the weights (safetensors), config, tokenizer, chat template, a generation config that samples as in
    training, and a model card. `transformers` and `vllm serve DIR` load it like any other model. A run with
    weights=lora exports a PEFT adapter; --merge merges it into its base model.

    `--policy mean` exports the mean of the weights of all LLMs, called llm_mean in evaluations. For adapters it is the
    mean of the products B A, whose rank is the sum of their ranks.

    `hf upload OWNER/NAME DIR` uploads the folder to the Hugging Face Hub.

    Examples:
      cory export runs/demo --policy llm_1 --out my-model
      cory export runs/adapters --policy llm_1 --merge --out my-model
      cory export runs/demo --policy mean --out my-model
      cory export runs/demo --policy llm_2 --checkpoint latest --dtype bf16 --out my-model
    """
    from launch.cluster import session

    session.quiet_libraries(debug)  # before libraries are imported
    from launch.models.export import export_policy
    from launch.models.trained import open_trained

    trained = open_trained(run, checkpoint)
    policy_id = export_policy(
        trained, policy, out, dtype, merge, warn=lambda text: print(f"Warning: {text}", file=sys.stderr)
    )
    megabytes = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{out}: {policy_id} after update {trained.update}, {dtype}, {megabytes:,.0f} MB.")
