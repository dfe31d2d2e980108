"""`cory serve RUN`: trained policies, and their chain, behind an address that OpenAI's clients know."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.console.errors import CommandError
from launch.console.parser import Parser, number_type, path_or_uri, positive_int, run

if TYPE_CHECKING:
    from launch.models.trained import Trained
    from launch.serving.request_queue import Backend

KEY = "CORY_API_KEY"
"""The variable that holds what --api-key says, where others could read a command."""
CHAIN = "chain"

EPILOG = """Clients find each policy, such as llm_1, under its name, and the chain as `chain`: its policies answer in
turn, and the last response is the answer; the earlier ones are its `drafts` (docs/serving.md).

  POST /v1/chat/completions   a query, or a conversation where the run has chat=true
  POST /v1/completions        a policy goes on from a text as it is; the chain answers it as a query
  GET  /v1/models, /health

Several clients are answered at once. Ctrl-C, SIGTERM or SIGHUP ends it when the answers that it has begun are written,
which have 5 s; another one ends it at once.

examples:
  cory serve runs/demo
  cory serve runs/demo --roles llm_1 --port 8001
  cory serve runs/demo --host 0.0.0.0 --api-key KEY       or CORY_API_KEY in the environment
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "chain", "prompt": "This movie"}'
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when it was ended by Ctrl-C or SIGTERM; 2 after a user's mistake.
    """
    parser = Parser(
        prog="cory serve",
        description="Serve the policies of a run, and their chain, by OpenAI's API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=path_or_uri, metavar="RUN", help="the run's folder, or its URI")
    parser.add_argument(
        "--roles",
        default=CHAIN,
        metavar="P,...",
        help="the chain's policies in the order they answer, or one alone (default: chain, as training left them)",
    )
    parser.add_argument(
        "--checkpoint", metavar="C", help="best, latest or an update's number (default: best, or else latest)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=number_type(most=65535), default=8000, help="0: any free one (default: 8000)")
    parser.add_argument("--api-key", metavar="KEY", help=f"what clients must bring (default: ${KEY}, or else nothing)")
    parser.add_argument(
        "--backend", choices=("vllm", "transformers"), help="(default: vllm, where it is installed and can)"
    )
    parser.add_argument("--at-once", type=positive_int, default=32, metavar="N", help="responses at once (default: 32)")
    parser.add_argument("--max-prompt", type=positive_int, metavar="N", help="tokens (default: the run's)")
    parser.add_argument("--max-response", type=positive_int, metavar="N", help="tokens (default: the run's)")
    parser.add_argument("--debug", action="store_true", help="show libraries' logs and tracebacks")
    options = parser.parse_args(argv)
    return run(lambda: serve(options), debug=options.debug)


def serve(options: argparse.Namespace) -> int:
    """Loads the policies and answers clients.

    Raises:
        CommandError: no such run, checkpoint or policy, a port in use, or prompts that need more than a query.
        EngineStartError: vLLM could not start.
    """
    from launch.cluster import session
    from launch.console import output
    from launch.console.interrupts import hangup_blocked

    session.quiet_libraries(options.debug)
    try:
        from launch.serving import server
    except ModuleNotFoundError as error:
        raise CommandError(
            f"`cory serve` needs the package {error.name}. Run `pip install 'cory-rllib[serve]'`."
        ) from error
    from launch.models.generators import choose_backend
    from launch.models.trained import open_trained
    from launch.models.trained_chain import chain_of
    from launch.serving.request_queue import RequestQueue
    from launch.serving.responses import ServedModel

    trained = open_trained(options.run, options.checkpoint)
    limits = {"max_prompt": options.max_prompt, "max_response": options.max_response}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    trained = dataclasses.replace(trained, settings=trained.settings.model_copy(update=limits))
    roles = options.roles.replace(" ", "")
    players = trained.players if roles == CHAIN else trained.named(roles.split(","))
    try:
        sock = server.listen(options.host, options.port)
    except OSError as error:
        raise CommandError(
            f"Cannot listen at {options.host}:{options.port}: {error.strerror}. Choose another --port or --host."
        ) from error
    with sock:
        policies = tuple(dict.fromkeys(players))
        models = {policy: ServedModel(policy, (policy,), chain_of(trained, [policy])) for policy in policies}
        for change in trained.changes():
            print(f"Warning: {change}", file=sys.stderr)
        if len(players) > 1:
            models[CHAIN] = ServedModel(CHAIN, players, chain_of(trained, players))
        name = choose_backend(options.backend, trained.settings)
        print(f"{' then '.join(players)}, after update {trained.update} of {options.run}: loading.", file=sys.stderr)
        quiet = contextlib.nullcontext() if options.debug else output.output_into(Path(os.devnull))
        usual = signal.signal(signal.SIGINT, signal.SIG_DFL)  # libraries that load may swallow a KeyboardInterrupt
        try:
            with quiet, hangup_blocked():  # C++ and engines heed no other setting
                backend = _load(name, trained, policies, options.at_once)
        finally:
            signal.signal(signal.SIGINT, usual)
        queue = RequestQueue(backend)
        api_key = options.api_key or os.environ.get(KEY) or None
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{sock.getsockname()[1]}/v1"
        seconds = server.SHUTDOWN_SECONDS
        tell = functools.partial(print, file=sys.stderr, flush=True)
        server.serve(
            server.make_app(queue, models, trained.settings.temperature, api_key),
            queue,
            sock,
            ready=lambda: tell(f"Serving {', '.join(models)} at {address} ({name}). Ctrl-C ends it."),
            ending=lambda: tell(
                f"Ending: answers that are being written have {seconds:.0f} s. Ctrl-C again ends it at once."
            ),
        )
        queue.close()
    print("Ended.", file=sys.stderr)
    return 0


def _load(name: str, trained: Trained, policies: tuple[str, ...], at_once: int) -> Backend:
    if name == "vllm":
        from launch.serving.vllm_backend import VLLMBackend

        return VLLMBackend(trained, policies, at_once)
    from launch.serving.transformers_backend import TransformersBackend

    return TransformersBackend(trained, policies, at_once)
