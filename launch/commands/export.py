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
    step_scale: Annotated[
        float, typer.Option(metavar="S", help="Scale of training's step: base + S * (policy - base).")
    ] = 1.0,
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
      cory export runs/demo --policy mean --step-scale 1.15 --out my-model
      cory export runs/demo --policy llm_2 --checkpoint latest --dtype bf16 --out my-model
      cory export runs/demo --policy llm_1 --out my-model --push my-name/my-model --private
    """
    from launch.cluster import session

    session.quiet_libraries(debug)  # before the libraries are imported
    from launch.models.export import export_warnings, free_folder, write
    from launch.models.trained import open_trained

    place = free_folder(out)
    if private and push is None:
        raise CommandError("--private is for --push OWNER/NAME.")
    pushing = None
    if push is not None:
        from launch.models.push import Pushing

        pushing = Pushing(push, private)
    trained = open_trained(run, checkpoint)
    chosen = trained.chosen(policy, "with --policy")
    for text in export_warnings(trained, chosen):
        print(f"Warning: {text}", file=sys.stderr)
    write(trained, chosen, place, dtype, merge, step_scale)
    megabytes = sum(file.stat().st_size for file in place.iterdir()) / 1e6
    scale = "" if step_scale == 1 else f", its step from the base × {step_scale:g}"
    print(f"{out}: {chosen} after update {trained.update}{scale}, {dtype}, {megabytes:,.0f} MB.")
    if pushing is not None:
        print(pushing.send(out, f"{chosen} after update {trained.update}, by cory-rllib"))
