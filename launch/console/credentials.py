"""Secrets in URIs, which run folders, logs and job lists would show."""

import re
from urllib.parse import parse_qsl

_SECRET_NAME = re.compile(
    r"(TOKEN|KEY|(\b|_)KEYS|SECRET|PASSWORD|PASSWD|(\b|_|PG)(PASS|PAT|SIG)|CONNECTION_STRING|SIGNATURE|CREDENTIALS?)"
    r"(_?ID)?(_?\d+)?$",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(://[^/?#\s:]*:)[^/?#\s]+(?=@)")


def find_secret(uri: str) -> str | None:
    """Returns a message such as `s3://… contains a password`, or a secret option after `?`; None if there is none."""
    names = [name for name, _ in parse_qsl(uri.partition("?")[2]) if _SECRET_NAME.search(name)]
    if not names and not _PASSWORD.search(uri):
        return None
    return f"{uri.partition('://')[0]}://… contains {names[0] if names else 'a password'}"


def mask_passwords(text: str) -> str:
    """Returns the text with passwords in URIs replaced by `***`."""
    return _PASSWORD.sub(r"\1***", text)
