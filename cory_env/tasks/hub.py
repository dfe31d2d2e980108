"""Reads a data set of the Hugging Face hub, or a folder laid out like one, through the library `datasets`."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cory_env.tasks.readers import DataError, Row

if TYPE_CHECKING:
    from datasets import Dataset

SETTINGS = ("split", "config", "revision")


def read_hub(name: str, split: str = "train", config: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """Yields the rows of one split, in the data set's order.

    Args:
        name: `OWNER/NAME` on the hub, or a folder: laid out like one there, of data files, or as `save_to_disk` writes.
        split: Its name, or part of it as the library writes it: `train[:1000]`, `test[10%:20%]`.
        config: The configuration (or subset), for data sets that have several.
        revision: A commit, tag or branch.

    Raises:
        DataError: The library is not installed, the hub cannot be reached, or it has no such data set, configuration,
            revision or split.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            f"The data set hub:{name} needs the library datasets: pip install 'cory-rllib[hub]'."
        ) from error
    if not name or (name.startswith((".", "/", "~")) and not os.path.isdir(name)):
        raise DataError(f"There is no data set hub:{name}. Write hub:OWNER/NAME, or hub: and an existing folder.")
    try:
        if any(os.path.isfile(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json")):
            rows = _load_saved(name, split, config or revision)
        else:
            rows = load_dataset(name, config, split=split, revision=revision)
        # Rows are decoded as they are read, which takes further libraries where there are images or sound.
        for number, row in enumerate(rows, start=1):
            yield f"row {number}", row
    except Exception as error:  # the library raises what its many sources raise; all of it is about this data set
        asked = ", ".join(f"{k}={v}" for k, v in (("split", split), ("config", config), ("revision", revision)) if v)
        raise DataError(
            f"The data set hub:{name} ({asked}) cannot be loaded: {' '.join(str(error).split()).rstrip('.')}. Correct "
            "its name or settings, check the connection to the hub, or set data to a file."
        ) from error


def _load_saved(folder: str, split: str, other: str | None) -> "Dataset":
    """Returns a split of what `save_to_disk` wrote.

    Raises:
        ValueError: There is no such split, or an `other` setting, which only data sets of other forms have.
    """
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(folder)
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    if other or split not in splits:
        raise ValueError(
            f"save_to_disk wrote it with the splits {', '.join(splits)}; these have no parts, configurations, revisions"
        )
    return splits[split]
