"""The files in a run's folder.

config.yaml      every setting, resolved
sources.json     checksums of the run's queries, models and code
metrics.jsonl    one line per update; line 0 is the held-out evaluation before training
samples.jsonl    sample responses of the chain, every few updates, and on held-out queries before and after training
final.json       with `test_queries`: all responses of each policy alone, after the last update
tensorboard/     the metrics for TensorBoard
wandb/           with `tracker=wandb`: files of Weights & Biases
wandb.id         with `tracker=wandb`: the run's id there
trackio.id       with `tracker=trackio`: the run's name there
run.id           for a run in storage: its unique id
checkpoints/     the latest checkpoints, and `best`
log.txt          output of libraries and rewards
curves.png       plots, drawn at the end or by `cory plot`
evaluation/      results of `cory evaluate`, one folder per evaluation
"""

import re
import time
from pathlib import Path

from launch.console.errors import make_folder
from policies.settings.start import CONFIG as CONFIG
from policies.settings.start import POLICIES as POLICIES

RUNS = Path("runs")  # the parent folder of runs without `--out`
SOURCES = "sources.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
FINAL = "final.json"
LOG, CURVES = "log.txt", "curves.png"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"
WRITER = ".writer"  # the id of the process that trains a run in storage
RUN_ID = "run.id"
REJECTED_BATCH_FILE = "refused_update_{:06d}_{}.safetensors"
"""The batch of a rejected update, by the update's number and the policy whose gradient was not finite."""
CONFIG_HEADER = "# cory "
TENSORBOARD, WANDB = "tensorboard", "wandb"
WANDB_ID, TRACKIO_ID = "wandb.id", "trackio.id"
STARTED_FILES = (
    *(CONFIG, SOURCES, METRICS, SAMPLES, LOG, RUN_ID, WANDB_ID, TRACKIO_ID, CHECKPOINTS, TENSORBOARD, WANDB),
    *(f".{CONFIG}.new", f".{SOURCES}.new"),  # left by a kill during a write
)
"""Files that a run may leave if it ends before its first checkpoint."""


def new_folder(name: str) -> Path:
    """Creates a new folder `runs/NAME-TIME`. Concurrent processes get different folders."""
    safe_name = re.sub(r"[^\w.-]+", "-", name)
    base = RUNS / f"{safe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_folder(RUNS)
    path, number = base, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = base.with_name(f"{base.name}-{number}")
