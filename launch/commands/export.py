"""`cory export RUN --out DIR`: writes a trained policy as an ordinary Hugging Face folder, or PEFT adapter."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.console.cli import Checkpoint, Debug, RunArgument, local_path
from launch.console.errors import CommandError


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=local_path, help="A folder that is new, or empty.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="P", help="Such as llm_1, or `mean`: the mean of all. Needed if there are several."),
    ] = None,
    checkpoint: Checkpoint = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter into its base (weights=lora).")] = False,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32",
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Send it to the Hugging Face Hub as this model.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: for its owner alone.")] = False,
    debug: Debug = False,
) -> None:
    """Write a trained policy as a Hugging Face folder, or as a PEFT adapter.

    DIR gets the weights (safetensors), config, tokenizer, chat template, a generation config that samples as in
    training, and a model card. `transformers` and `vllm serve DIR` load it as they load any model. What was trained
    with weights=lora becomes a PEFT adapter, which is loaded onto its base; --merge makes a whole model of both.

    `--policy mean` is the model whose weights are the mean of all the run's LLMs, which evaluations call llm_mean. Of
    adapters it has the mean of their products, so it has the rank of all of them together.

    --push takes the token that `hf auth login` has kept, or HF_TOKEN; HF_ENDPOINT names another hub.

    Examples:
      cory export runs/demo --policy llm_1 --out my-model
      cory export runs/adapters --policy llm_1 --merge --out my-model
      cory export runs/demo --policy mean --out my-model
      cory export runs/demo --policy llm_2 --checkpoint latest --dtype bf16 --out my-model
      cory export runs/demo --policy llm_1 --out my-model --push my-name/my-model --private
    """
    from launch.cluster import session

    session.quiet_libraries(debug)  # before the libraries are imported
    from launch.models.export import check_free_folder, choose_policy, export_warnings, write
    from launch.models.trained import open_trained

    check_free_folder(out)
    if private and push is None:
        raise CommandError("--private requires --push OWNER/NAME.")
    if push is not None:
        from launch.models.push import HubModel

        hub_model = HubModel(push, private)
    trained = open_trained(run, checkpoint)
    name = choose_policy(trained, policy)
    for text in export_warnings(trained, name):
        print(f"Warning: {text}", file=sys.stderr)
    write(trained, name, out, dtype, merge)
    megabytes = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{out}: {name} after update {trained.update}, {dtype}, {megabytes:,.0f} MB.")
    if push is not None:
        print(hub_model.send(out, f"{name} after update {trained.update}, by cory-rllib"))
