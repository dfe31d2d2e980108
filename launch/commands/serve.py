"""`cory serve RUN`: serves trained policies and their chain with an OpenAI-compatible API."""

import contextlib
import os
import signal
import socket
import sys
from typing import Annotated, Literal

import typer

from launch.console.cli import CheckpointOption, Debug, RunArgument
from launch.console.errors import CommandError

CHAIN_MODEL = "chain"
MAX_CONCURRENT = 32
"""Maximum number of chains that are generated concurrently; further requests wait."""


def serve(
    run: RunArgument,
    roles: Annotated[
        str | None,
        typer.Option(metavar="P,...", help="Policies in chain order, or one policy. [default: as after training]"),
    ] = None,
    checkpoint: CheckpointOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1: only this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key that clients must send. [default: $CORY_API_KEY, or none]")
    ] = None,
    backend: Annotated[
        Literal["vllm", "transformers"] | None, typer.Option(help="[default: vllm if installed]")
    ] = None,
    feedback: Annotated[
        bool, typer.Option("--feedback", help="Run the run's feedback function between the chain's responses.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve the policies of a run and their chain with an OpenAI-compatible API.

    Each policy is a model with its own name, such as llm_1. The model `chain` lets the policies respond in turn and
    returns the last response; the earlier ones are its `drafts` (docs/evaluate.md).

      POST /v1/chat/completions   a query, or a conversation if the run has chat=true
      POST /v1/completions        a policy continues the text; `chain` treats it as a query
      GET  /v1/models, /health

    If the run has feedback between agents (docs/feedback-and-roles.md), `chain` gets it, and stops by it, only with
    --feedback: the function then runs in this server, on the responses and on the requests' `columns`. Without
    --feedback, `chain` is not served if its prompts show feedback; otherwise all roles respond.

    Ctrl-C or SIGTERM stops the server after pending responses are finished, at most 5 s later.

    A streamed response comes in one piece, when it is complete.

    Examples:
      cory serve runs/demo
      cory serve runs/demo --roles llm_1 --port 8001
      cory serve runs/coder --feedback
      cory serve runs/demo --host 0.0.0.0 --api-key KEY       or CORY_API_KEY in the environment
    """
    from launch.cluster import session
    from launch.console import output

    session.quiet_libraries(debug)
    try:
        from launch.serving import server
    except ModuleNotFoundError as error:
        raise CommandError(f"cory serve requires {error.name}. Run `pip install 'cory-rllib[serve]'`.") from error
    from launch.models.generators import choose_backend, load_generator
    from launch.models.trained import open_trained
    from launch.models.trained_chain import FeedbackRequiredError, TrainedChain
    from launch.serving.batches import BatchRunner

    policies = open_trained(run, checkpoint)
    policy_ids = policies.policy_ids if roles is None else policies.resolve_names(roles.split(","))
    names = tuple(dict.fromkeys(policy_ids))
    engine = choose_backend(backend, policies.settings)
    if feedback and policies.settings.feedback is None:
        raise CommandError(f"--feedback requires a run with feedback between agents, but {run} has feedback=null.")
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise CommandError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --port or --host."
        ) from error
    settings = policies.settings
    with sock:
        models = {name: TrainedChain(policies, (name,), backend=engine, feedback=False) for name in names}
        worker = None
        if len(policy_ids) > 1 and settings.env is None:
            try:
                models[CHAIN_MODEL] = TrainedChain(policies, policy_ids, backend=engine, feedback=feedback)
            except FeedbackRequiredError:
                print("`chain` is not served: its prompts show feedback, which requires --feedback.", file=sys.stderr)
            else:
                worker = models[CHAIN_MODEL].worker
                if settings.feedback is not None and not feedback:
                    print("`chain` gets no feedback, so all roles respond (see --feedback).", file=sys.stderr)
        for model in models.values():
            _ = model.feedback_columns  # fails if the function cannot be loaded
        for warning in policies.warnings():
            print(f"Warning: {warning}", file=sys.stderr)
        chain_text = " then ".join(policy_ids)
        print(f"Loading {chain_text}, after update {policies.update} of {run}.", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # imported libraries may swallow a KeyboardInterrupt
        with output.hide_libraries(debug):
            runner = BatchRunner(load_generator(policies, names, engine, MAX_CONCURRENT), worker, MAX_CONCURRENT)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/v1"
        print(f"Serving {', '.join(models)} at {address} ({engine}). Ctrl-C to stop.", file=sys.stderr, flush=True)
        key = api_key or os.environ.get("CORY_API_KEY")
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn re-raises the signal after shutdown
            server.serve(server.make_app(runner, models, key), sock)
        if not runner.close(timeout=1):
            os._exit(0)  # an engine cannot be interrupted in a batch; its processes end with this one
