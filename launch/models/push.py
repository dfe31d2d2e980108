"""Uploads an exported folder to the Hugging Face Hub."""

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
    """The hub rejected a request or could not be reached."""


class HubModel:
    """A model repository on the hub. The constructor checks access before anything is exported."""

    def __init__(self, name: str, private: bool) -> None:
        """Checks the name and the token.

        Args:
            name: of the model, `OWNER/NAME`.
            private: create it as private; an existing model must be private.

        Raises:
            HubError: the name is invalid, the token is missing or invalid, or the hub cannot be reached.
        """
        self.name = name
        self._private = private
        self._hub = HfApi(library_name="cory-rllib", library_version=own_version())
        with self._translate_errors():
            validate_repo_id(name)
            if name.count("/") != 1:
                raise HFValidationError("write OWNER/NAME")
            self._hub.whoami()

    def upload(self, folder: Path, message: str) -> str:
        """Uploads all files of a folder in one commit. Creates the model if it does not exist.

        Args:
            folder: to upload; it is not changed.
            message: of the commit.

        Returns:
            The URL of the model.

        Raises:
            HubError: the token has no write access, or the hub cannot be reached.
        """
        with self._translate_errors(f" The model is in {folder}."):
            url = self._hub.create_repo(self.name, private=self._private or None, exist_ok=True)
            if self._private and not self._hub.model_info(self.name).private:
                raise HFValidationError(f"{url} exists and is public. Make it private first")
            self._hub.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        return str(url)

    @contextlib.contextmanager
    def _translate_errors(self, state: str = "") -> Iterator[None]:
        try:
            yield
        # Errors of the hub, the network, a server, an upload, or a missing token.
        except (
            *(HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled),
            *(OSError, ValueError, RuntimeError),
        ) as error:
            reason = " ".join(str(getattr(error, "server_message", None) or error).split()).rstrip(".")
            raise HubError(
                f"--push {self.name}: {reason}.{state} Check that {self._hub.endpoint} is the right hub (HF_ENDPOINT), "
                "and that your token has write access (`hf auth login`, or HF_TOKEN)."
            ) from error
