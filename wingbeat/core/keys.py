"""Keys as they are kept: only their SHA-256, in the configuration written ``sha256:HEX``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

HASH_PREFIX = "sha256:"
WORKER_KEY_VARIABLE = "WINGBEAT_WORKER_KEY"
ADMIN_KEY_VARIABLE = "WINGBEAT_OWN_ADMIN_KEY"
CLIENT_KEY_VARIABLE = "WINGBEAT_OWN_CLIENT_KEY"
"""Environment variables with the keys that the supervisor makes for its own processes, plain or as sha256:HEX."""
KEY_VARIABLE = "WINGBEAT_KEY"
"""What commands call a server with; followed by ``_NAME``, one of several servers."""
_HASHED = re.compile(r"sha256:[0-9a-f]{64}")


def is_key_variable(name: str) -> bool:
    """Whether an environment variable holds a key of ours."""
    own = (WORKER_KEY_VARIABLE, ADMIN_KEY_VARIABLE, CLIENT_KEY_VARIABLE, KEY_VARIABLE)
    return name in own or name.startswith(f"{KEY_VARIABLE}_")


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that need no key of ours, or are given their own."""
    return {name: value for name, value in environment.items() if not is_key_variable(name)}


def digest(key: str) -> str:
    """What is stored and compared instead of a key.

    Keys that Wingbeat makes have 192 random bits, so nobody can try them out, and a slow hash would protect nothing.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def is_hashed(text: str) -> bool:
    """Whether ``text`` stands for a key without telling it."""
    return _HASHED.fullmatch(text) is not None


def hashed(text: str) -> str:
    """``sha256:HEX`` of a plain key; a hashed one stays as it is."""
    return text if is_hashed(text) else HASH_PREFIX + digest(text)


def digest_of(text: str) -> str:
    """The digest of a key that is given plain or as ``sha256:HEX``."""
    return hashed(text).removeprefix(HASH_PREFIX)
