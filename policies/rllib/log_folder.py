"""The folder that RLlib makes for each algorithm."""

import os
import tempfile

from ray.tune import Trainable


class TemporaryLogdir(Trainable):
    """An algorithm whose folder, outside of Tune, is among temporary files.

    RLlib makes it in the home directory, which containers with a random user cannot write to, and has no public setting
    for it.
    """

    def _setup_logdir(self) -> None:
        if self._storage is not None:
            super()._setup_logdir()
        else:
            place = os.environ.get("TMPDIR", "")  # a command's own, which goes when that ends; Python remembers another
            self._logdir = tempfile.mkdtemp(prefix="rllib-", dir=place if os.path.isdir(place) else None)
