"""Sends an exported folder to the Hugging Face Hub, as a model of the user's."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from launch.console.errors import CommandError
from launch.run_folder.manifest import own_version

TOKEN = "Log in by `hf auth login`, or set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens)."


class HubError(CommandError):
    """The hub refuses, or cannot be reached; the message says why, and what to do."""


class Pushing:
    """A model on the hub to be written; whether it can be is asked before anything is made."""

    def __init__(self, name: str, private: bool) -> None:
        """Checks the name and the token.

        Args:
            name: of the model, `OWNER/NAME`.
            private: only its owner is to see it; where it exists already, it must be so.

        Raises:
            HubError: there is no such name, no token, or no way to the hub.
        """
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise HubError(f"--push {name}: {str(error).rstrip('.')}. Write OWNER/NAME.") from error
        if name.count("/") != 1:
            raise HubError(f"--push {name}: write OWNER/NAME, such as my-name/my-model.")
        if get_token() is None:
            raise HubError(f"There is no token for the hub. {TOKEN}")
        self.name = name
        self._private = private
        self._hub = HfApi(library_name="cory-rllib", library_version=own_version())
        with self._told("asked who you are"):
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
        try:
            with self._told("written to"):
                place = self._hub.create_repo(self.name, private=self._private or None, exist_ok=True)
                if self._private and not self._hub.model_info(self.name).private:
                    raise HubError(
                        f"{place} is there already, and everybody sees it: make it private first, at {place}/settings."
                    )
                self._hub.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except HubError as error:
            later = f"`hf upload {self.name} {shlex.quote(str(folder))}{' --private' * self._private}` sends it"
            # To a model that is there already that command would send it whoever sees that.
            later += f", where {self.name} is private or not there yet" * self._private
            raise HubError(f"{error} The model is in {folder}; {later}.") from error
        return str(place)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        hub = self._hub.endpoint
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise HubError("HF_HUB_OFFLINE is set, so nothing can be sent. Unset it, or leave --push out.") from error
        except HfHubHTTPError as error:
            said = " ".join((error.server_message or str(error)).split()).rstrip(".")
            status = error.response.status_code
            if status == 401:
                raise HubError(f"{hub} does not know the token ({said}). {TOKEN}") from error
            if status == 403:
                raise HubError(f"Your token may not write to {self.name} on {hub} ({said}). {TOKEN}") from error
            raise HubError(f"{hub} cannot be {what}: {status}, {said}. Try again later.") from error
        except (HTTPError, OSError, ValueError, RuntimeError) as error:  # of the network, of who answers, of an upload
            said = " ".join(str(error).split()).rstrip(".")
            raise HubError(f"{hub} cannot be {what}: {said}. Is there a network, and is HF_ENDPOINT right?") from error
