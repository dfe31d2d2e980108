"""Runs from Python: begun in a folder as `cory train` makes it, and read again."""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cory_env.home import expand_home
from launch.cluster import session
from launch.models.trained import PolicySet, open_trained
from launch.run_folder import environment
from launch.run_folder.layout import FROM_PYTHON
from launch.run_folder.records import SampleLine, Update
from launch.run_folder.run import Run as RunFolder
from launch.run_folder.status import read_run
from launch.run_folder.storage import REPORTED
from launch.training.steps import train_run
from policies.settings.settings import Settings

if TYPE_CHECKING:
    from launch.models.trained_chain import TrainedChain
    from policies.cory import CoryConfig


class Run:
    """What lies in a run's folder, which may go on training meanwhile: each look reads the files anew.

    Of a run in storage they are those that `load_run` has copied.
    """

    def __init__(self, directory: RunFolder) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Run({self.place!r})"

    def _repr_png_(self) -> bytes | None:
        """The curves, which a notebook shows; they are drawn when a run ends."""
        return self.directory.read(self.directory.curves.name)

    @property
    def place(self) -> str:
        """The run's folder or URI, as commands take it."""
        return self.directory.shown(self.directory.path)

    @property
    def path(self) -> Path:
        """The folder; of a run in storage the local copy."""
        return self.directory.path

    @property
    def settings(self) -> Settings:
        """Every setting of the run."""
        return self.directory.settings()

    @property
    def config(self) -> CoryConfig:
        """A configuration with the run's settings, to build an algorithm like its own."""
        from policies.cory import CoryConfig

        return CoryConfig().cory(**self.settings.model_dump())

    @property
    def metrics(self) -> list[Update]:
        """The lines of `metrics.jsonl`, one per update; line 0 is the evaluation before training.

        Each is a dictionary as an algorithm's `report`, but for `samples`; a number that is not finite is None.
        """
        return self.directory.updates()

    @property
    def samples(self) -> list[SampleLine]:
        """The lines of `samples.jsonl`: responses of the chain, with the update, and whether the query is held out."""
        return cast(list[SampleLine], self.directory.samples.read())

    @property
    def best_update(self) -> int | None:
        """The update of the highest held-out combined reward; None where none was evaluated."""
        return self.directory.best_update()

    def trained(self, checkpoint: str | int | None = None) -> PolicySet:
        """What the run had learned at a checkpoint.

        Args:
            checkpoint: `best`, `latest` or an update; None: the best, or the latest where none was evaluated.

        Raises:
            CommandError: there is no such checkpoint, or it is damaged.
        """
        return open_trained(self.place, None if checkpoint is None else str(checkpoint))

    def chain(
        self,
        roles: Sequence[str] | None = None,
        *,
        checkpoint: str | int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> TrainedChain:
        """Loads the trained chain, to be asked again and again by `answer`; for a few queries there is `generate`.

        Args:
            roles: the policies in the order in which they answer; None: all, as training left them.
            checkpoint: as of `trained`.
            temperature: of sampling, 0 for the likeliest token always; None: the run's.
            seed: of sampling; None: the run's.

        Raises:
            CommandError: there is no such checkpoint or policy, or prompts need more than a query.
        """
        return chain_of(self.trained(checkpoint), roles, temperature, seed)


def chain_of(
    policies: PolicySet, roles: Sequence[str] | None, temperature: float | None, seed: int | None
) -> TrainedChain:
    """Loads a chain of policies; what is None is as in training.

    Raises:
        CommandError: there is no such policy, or prompts need more than a query.
    """
    from launch.models.trained_chain import TrainedChain

    settings = policies.settings
    for text in policies.changes():
        warnings.warn(text, stacklevel=3)
    return TrainedChain(
        policies,
        policies.policy_ids if roles is None else policies.named(roles),
        settings.temperature if temperature is None else temperature,
        settings.seed if seed is None else seed,
    )


def load_run(place: str | Path) -> Run:
    """Opens a run that `cory train`, or `train`, made.

    Args:
        place: its folder, or its URI.

    Raises:
        CommandError: there is no run.
        StorageError: storage cannot be read.
    """
    return Run(read_run(expand_home(str(place)), REPORTED))


def start_ray(config: CoryConfig) -> None:
    """Starts Ray on this machine as commands do, until this process ends; or joins the cluster that RAY_ADDRESS names.

    Only this machine can reach it, it has no dashboard, and room for what the configuration asks for. Where Ray runs in
    this process already, it stays as it is. `train` needs no such call.

    Raises:
        SettingsError: a setting is wrong or contradicts another.
        CommandError: the cluster does not answer or has no room, or Ray did not start in time.
    """
    from policies.settings.processes import processes

    asked = processes(config.settings)
    session.quiet_libraries(debug=True)
    held = contextlib.ExitStack()
    held.enter_context(session.ray_session(asked, debug=False))
    atexit.register(held.close)


def train(config: CoryConfig, out: str | Path | None = None, *, max_failures: int = 0, quiet: bool = False) -> Run:
    """Trains a whole run, in a folder as `cory train` leaves it, from which `cory train --resume` can go on.

    What libraries and rewards print goes to the run's `log.txt`. Of the configuration the settings of `cory` count;
    what else of RLlib's is set on it has no effect here. Ray starts and ends with the run, unless it runs already.

    Args:
        config: what is trained.
        out: the run's folder, which must be new or empty, or a URI; None: a fresh folder under `runs/`.
        max_failures: go on from the latest checkpoint after so many losses of processes or machines.
        quiet: print only where the results are.

    Returns:
        The run; with `stop_on_collapse` it may have ended early.

    Raises:
        SettingsError: a setting is wrong or contradicts another.
        CommandError: the task, model, reward or folder cannot be used; nothing is left then.
        KeyboardInterrupt: Ctrl-C stopped it; all until then is saved.
    """
    settings = config.settings
    session.quiet_libraries(debug=True)  # what they print is the log's, not this process's business

    from launch.training.training import COLLAPSED

    run, code = train_run(
        settings,
        f"{FROM_PYTHON}  # {environment.in_words()}",
        location=None if out is None else expand_home(str(out)),
        name=settings.task.partition("?")[0],
        max_failures=max_failures,
        quiet=quiet,
    )
    if code not in (0, COLLAPSED):
        raise KeyboardInterrupt
    return load_run(run.place)
