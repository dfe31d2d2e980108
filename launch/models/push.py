"""Sends an exported folder to the Hugging Face Hub, as a model of the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from launch.console.errors import CommandError
from launch.run_folder.manifest import own_version


class HubError(CommandError):
    """The hub refuses, or cannot be reached; the message says why, and what to do."""


class HubModel:
    """A model on the hub to be written; whether it can be is asked before anything is made."""

    def __init__(self, name: str, private: bool) -> None:
        """Checks the name and the token.

        Args:
            name: of the model, `OWNER/NAME`.
            private: only its owner is to see it; where it exists already, it must be so.

        Raises:
            HubError: there is no such name, no token, or no way to the hub.
        """
        self.name = name
        self._private = private
        self._hub = HfApi(library_name="cory-rllib", library_version=own_version())
        with self._explained():
            validate_repo_id(name)
            if name.count("/") != 1:
                raise HFValidationError("write OWNER/NAME")
            self._hub.whoami()

    def send(self, folder: Path, message: str) -> str:
        """Makes the model, unless it exists, and gives it the files of a folder in one commit.

        Args:
            folder: what is sent, all of it.
            message: of the commit.

        Returns:
            Where it is.

        Raises:
            HubError: the token may not write there, or the hub cannot be reached; the folder stays as it is.
        """
        with self._explained(f" The model is in {folder}."):
            url = self._hub.create_repo(self.name, private=self._private or None, exist_ok=True)
            if self._private and not self._hub.model_info(self.name).private:
                raise HFValidationError(f"{url} exists, and everybody sees it. Make it private first")
            self._hub.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        return str(url)

    @contextlib.contextmanager
    def _explained(self, state: str = "") -> Iterator[None]:
        try:
            yield
        # Of the hub, the network, who answers, an upload, or a missing token.
        except (
            *(HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled),
            *(OSError, ValueError, RuntimeError),
        ) as error:
            reason = " ".join(str(getattr(error, "server_message", None) or error).split()).rstrip(".")
            raise HubError(
                f"--push {self.name}: {reason}.{state} Is {self._hub.endpoint} the right hub (HF_ENDPOINT), and may "
                "your token write there (`hf auth login`, or HF_TOKEN)?"
            ) from error
