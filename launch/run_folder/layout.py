"""The names of what lies in a run's folder.

config.yaml      every setting, resolved
sources.json     checksums of the queries, models and code that the run is made from
metrics.jsonl    one line per update; line 0 is the held-out evaluation before training
samples.jsonl    responses of the chain, every few updates, and on held-out queries before and after
final.json       with `test_queries`: every response of each policy, alone, after the last update
tensorboard/     the metrics again, for TensorBoard
wandb/           with `wandb`, what Weights & Biases keeps
wandb.id         and the run's id there
trackio.id       with `trackio`, the run's name there
run.id           of a run in storage, what no other run has
checkpoints/     the last few and `best`
log.txt          what libraries and rewards printed
curves.png       drawn at the end, or by `cory plot`
evaluation/      what `cory evaluate` found, a folder each time
"""

import itertools
import re
import time
from pathlib import Path

from launch.console.errors import CommandError
from policies.settings.start import CONFIG as CONFIG
from policies.settings.start import POLICIES as POLICIES

RUNS = Path("runs")
"""Where the folders of runs without `--out` lie."""
SOURCES = "sources.json"
"""What the run is made from (`launch.run_folder.sources`)."""
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
FINAL = "final.json"
LOG, CURVES = "log.txt", "curves.png"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
LEASE = ".lease"
"""Who may write to a run in storage (`launch.run_folder.lease`)."""
WRITERS = (LOCK, LEASE)
"""How the names of files begin that say who may write."""
RUN_ID = "run.id"
"""Of a run in storage."""
REFUSED = "refused_update_{:06d}_{}.safetensors"
"""Of the batch of an update that was refused, by its number and the policy, whose gradient was not finite."""
ORIGIN = "# cory "
"""How `config.yaml` begins."""
FROM_PYTHON = "cory train, from Python"
"""What stands there as the command of a run that `cory_rllib.train` began."""
TENSORBOARD = "tensorboard"
WANDB, WANDB_ID = "wandb", "wandb.id"
"""What Weights & Biases keeps, and the id under which its run goes on."""
TRACKIO_ID = "trackio.id"
"""The name under which Trackio's run goes on."""
BEGUN = (
    *(CONFIG, SOURCES, METRICS, SAMPLES, LOG, RUN_ID, WANDB_ID, TRACKIO_ID, CHECKPOINTS, TENSORBOARD, WANDB),
    *(f".{CONFIG}.new", f".{SOURCES}.new"),  # of a kill in the middle of a write
)
"""What a run that ended before anything of it was saved may have left."""


def new_folder(name: str) -> Path:
    """Makes a fresh folder under `runs/`, after a name and the time. Processes that ask at once get one each.

    Raises:
        CommandError: it cannot be made.
    """
    plain = re.sub(r"[^\w.-]+", "-", name)
    base = RUNS / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not RUNS.is_dir():
                raise CommandError(f"{RUNS} is a file: move it, or name a folder with --out.") from None
        except OSError as error:
            raise CommandError(f"The folder {path} cannot be made: {error.strerror}.") from error
        else:
            break
    return path
