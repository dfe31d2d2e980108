"""The names of what lies in a run's folder (`launch.run_folder.directory` says what each holds)."""

from policies.settings.start import CONFIG as CONFIG
from policies.settings.start import POLICIES as POLICIES

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
FINAL = "final.json"
LOCK = ".lock"
LEASE = ".lease"
"""Who may write to a run in storage (`launch.run_folder.lease`)."""
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
MLFLOW_ID, TRACKIO_ID = "mlflow.id", "trackio.id"
"""What Weights & Biases keeps, and the id under which its run goes on."""
