"""`cory export RUN --policy P --out DIR`: a trained policy as an ordinary Hugging Face folder, or PEFT adapter."""

from __future__ import annotations

import argparse
import sys

from launch.console.errors import CommandError
from launch.console.parser import Parser, local_path, path_or_uri, run

EPILOG = """DIR gets the weights (safetensors), config, tokenizer, chat template, a generation config that samples as in
training, and a model card. `transformers` and `vllm serve DIR` load it as they load any model. What was trained with
weights=lora becomes a PEFT adapter, which is loaded onto its base; --merge makes a whole model of both.

`--policy mean` is the LLM whose weights are the mean of all the run's LLMs, which evaluations call llm_mean. Of
adapters it has the mean of their products, so it has the rank of all of them together.

--push sends the folder to the Hugging Face Hub, with its card, as the model OWNER/NAME, which is made unless it exists.
It takes the token that `hf auth login` has kept, or HF_TOKEN; HF_ENDPOINT names another hub.

Resuming a run can execute what is in its checkpoint; this cannot: it reads the policy's weights and nothing else. The
base model is loaded as in training, its own code included if the run has trust_remote_code.

examples:
  cory export runs/demo --policy llm_1 --out my-model
  cory export runs/adapters --policy llm_1 --merge --out my-model
  cory export runs/demo --policy mean --step-scale 1.15 --out my-model
  cory export runs/demo --policy llm_2 --checkpoint latest --dtype bf16 --out my-model
  cory export runs/demo --policy llm_1 --out my-model --push my-name/my-model --private
"""


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
    parser.add_argument("run", type=path_or_uri, metavar="RUN", help="the run's folder, or its URI")
    parser.add_argument(
        "--policy",
        metavar="P",
        help="such as llm_1, or `mean`: the mean of the weights of all; may be left out where there is one only",
    )
    parser.add_argument(
        "--step-scale",
        type=float,
        default=1.0,
        metavar="S",
        help="go S times as far from the base as training did: base + S * (policy - base) (default: 1)",
    )
    parser.add_argument("--out", type=local_path, metavar="DIR", required=True, help="a folder that is new, or empty")
    parser.add_argument(
        "--checkpoint", metavar="C", help="best, latest or an update's number (default: best, or else latest)"
    )
    parser.add_argument("--merge", action="store_true", help="put the adapter into its base (runs with weights=lora)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default: fp32)")
    parser.add_argument("--push", metavar="OWNER/NAME", help="send it to the Hugging Face Hub as this model")
    parser.add_argument("--private", action="store_true", help="with --push: for its owner alone")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_args(argv)
    return run(lambda: export(options), debug=options.debug)


def export(options: argparse.Namespace) -> int:
    """Writes the folder and says what is in it.

    Raises:
        CommandError: no such run, checkpoint or policy, a folder that is in use, or a hub that refuses.
    """
    from launch.cluster import session

    session.quiet_libraries(options.debug)  # before the libraries are imported
    from launch.models.export import export_warnings, free_folder, write
    from launch.models.trained import open_trained

    place = free_folder(options.out)
    if options.private and options.push is None:
        raise CommandError("--private is for --push OWNER/NAME.")
    pushing = None
    if options.push is not None:
        from launch.models.push import Pushing

        pushing = Pushing(options.push, options.private)
    trained = open_trained(options.run, options.checkpoint)
    policy = trained.chosen(options.policy, "with --policy")
    for text in export_warnings(trained, policy):
        print(f"Warning: {text}", file=sys.stderr)
    write(trained, policy, place, options.dtype, options.merge, options.step_scale)
    megabytes = sum(file.stat().st_size for file in place.iterdir()) / 1e6
    scale = "" if options.step_scale == 1 else f", its step from the base × {options.step_scale:g}"
    print(f"{options.out}: {policy} after update {trained.update}{scale}, {options.dtype}, {megabytes:,.0f} MB.")
    if pushing is not None:
        print(pushing.send(options.out, f"{policy} after update {trained.update}, by cory-rllib"))
    return 0
