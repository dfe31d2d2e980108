"""Training runs from Python: start a run in a folder, like `cory train`, and read its results."""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cory_env.home import expand_home
from launch.cluster import session
from launch.models.trained import PolicySet, open_trained
from launch.run_folder import environment, run
from launch.run_folder.layout import FROM_PYTHON
from launch.training.steps import train_run

if TYPE_CHECKING:
    from launch.models.trained_chain import TrainedChain
    from policies.cory import CoryConfig


class Run(run.Run):
    """A run's folder. Properties read the files on each access, except the settings, so the run may still train."""

    def __repr__(self) -> str:
        return f"Run({self.location!r})"

    def _repr_png_(self) -> bytes | None:
        """The training curves for notebooks; None until the run ends."""
        return self.read(self.curves.name)

    @property
    def config(self) -> CoryConfig:
        """Configuration with the run's settings, to build the same algorithm again."""
        from policies.cory import CoryConfig

        return CoryConfig().cory(**self.settings.model_dump())

    def open_policies(self, checkpoint: str | int | None = None) -> PolicySet:
        """Opens the policies of a checkpoint.

        Args:
            checkpoint: `best`, `latest` or an update; None: the best, or the latest if none was evaluated.

        Returns:
            The policies; weights are loaded on demand.

        Raises:
            CommandError: the checkpoint does not exist or is damaged.
        """
        return open_trained(self.location, None if checkpoint is None else str(checkpoint))

    def chain(
        self,
        roles: Sequence[str] | None = None,
        *,
        checkpoint: str | int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        feedback: bool = True,
    ) -> TrainedChain:
        """Loads the trained chain for repeated use with `answer`; for a single call, use `generate`.

        Args:
            roles: policy ids in the order of the chain; None: all, in their roles at the checkpoint.
            checkpoint: as in `open_policies`.
            temperature: sampling temperature, 0 for greedy decoding; None: the run's.
            seed: random seed of sampling; None: the run's.
            feedback: give feedback on responses, and stop chains by it, if the run does.

        Returns:
            The chain with loaded weights.

        Raises:
            CommandError: the checkpoint or a policy does not exist, or prompts require more columns than the query.
        """
        return load_chain(self.open_policies(checkpoint), roles, temperature, seed, feedback=feedback)


def load_chain(
    policies: PolicySet,
    roles: Sequence[str] | None,
    temperature: float | None,
    seed: int | None,
    *,
    feedback: bool = True,
) -> TrainedChain:
    """Loads a chain of policies.

    Args:
        policies: from a run or an algorithm.
        roles: policy ids in the order of the chain; None: all, in their current roles.
        temperature: sampling temperature, 0 for greedy decoding; None: as in training.
        seed: random seed of sampling; None: as in training.
        feedback: give feedback on responses, and stop chains by it, as in the run.

    Raises:
        CommandError: a policy does not exist, or prompts require feedback.
    """
    from launch.models.trained_chain import TrainedChain

    settings = policies.settings
    for text in policies.warnings():
        warnings.warn(text, stacklevel=3)
    return TrainedChain(
        policies,
        policies.policy_ids if roles is None else policies.resolve_names(roles),
        settings.temperature if temperature is None else temperature,
        settings.seed if seed is None else seed,
        feedback=feedback,
    )


def load_run(location: str | Path) -> Run:
    """Opens a run of `cory train` or `train`.

    Args:
        location: folder of the run.

    Returns:
        The run.

    Raises:
        CommandError: there is no run at the location, or it is a URI.
    """
    return Run.open(expand_home(str(location)))


def start_ray(config: CoryConfig) -> None:
    """Starts Ray on this machine until this process ends, or connects to the cluster of RAY_ADDRESS.

    A local Ray is reachable only from this machine, has no dashboard, and has the resources that the configuration
    requires. If Ray runs in this process already, nothing changes. `train` starts Ray itself.

    Args:
        config: determines the required resources.

    Raises:
        SettingsError: a setting is invalid or conflicts with another.
        CommandError: the cluster is unreachable or lacks resources, or Ray did not start in time.
    """
    from policies.settings.processes import processes

    required = processes(config.settings)
    session.quiet_libraries(debug=True)
    stack = contextlib.ExitStack()
    stack.enter_context(session.ray_session(required, debug=False))
    atexit.register(stack.close)


def train(config: CoryConfig, out: str | Path | None = None, *, max_failures: int = 0, quiet: bool = False) -> Run:
    """Trains a whole run in a folder like `cory train`; `cory train --resume` can continue it.

    Output of libraries and rewards goes to the run's `log.txt`. Only settings passed to `config.cory()` have an effect;
    other RLlib settings are ignored. Ray starts and stops with the run, unless it runs already.

    Args:
        config: the run's configuration.
        out: folder of the run, new or empty; or a URI, to which it is uploaded; None: a new folder in `runs/`.
        max_failures: how often to resume from the latest checkpoint after processes or machines are lost.
        quiet: whether to print only the location of the results.

    Returns:
        The run. For a URI, it reads the local copy, `Run.path`.

    Raises:
        SettingsError: a setting is invalid or conflicts with another.
        CommandError: the task, model, reward or folder is invalid; no files are left.
        KeyboardInterrupt: Ctrl-C stopped the run; its progress is saved.
    """
    settings = config.settings
    session.quiet_libraries(debug=True)  # their output goes to the log, not to this process's terminal

    trained, code = train_run(
        settings,
        f"{FROM_PYTHON}  # {environment.describe_environment()}",
        location=None if out is None else expand_home(str(out)),
        name=settings.task.partition("?")[0],
        max_failures=max_failures,
        quiet=quiet,
        keep_local=True,
    )
    if code:
        raise KeyboardInterrupt
    return load_run(trained.path)
