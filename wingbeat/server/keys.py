"""Who is calling: admin, worker or one episode.  Keys are random, kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from wingbeat.core.errors import AuthenticationError

EPISODE_PREFIX = "wb-ep-"
HOW = (
    "as `Authorization: Bearer KEY`; the command line reads it from WINGBEAT_KEY or --key KEY,"
    " the SDK from Swarm(url, key=KEY)"
)


def digest(key: str) -> str:
    """What is stored and compared instead of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def new_episode_key() -> str:
    """An opaque key of 192 random bits."""
    return EPISODE_PREFIX + secrets.token_urlsafe(24)


def bearer(headers: Mapping[str, str]) -> str:
    """The key of a request, or "" without one."""
    return next(iter(keys_in(headers)), "")


def keys_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of a request: ``Authorization: Bearer``, then ``x-api-key`` (SDKs may send a stray one in the other)."""
    value = headers.get("authorization", "")
    given = (value[7:].strip() if value[:7].lower() == "bearer " else "", headers.get("x-api-key", "").strip())
    return tuple(key for key in given if key)


@dataclass(frozen=True, slots=True)
class RoleKeys:
    """The two fixed roles.  ``admin`` None (loopback only) lets every local caller administrate."""

    admin: str | None
    worker: str

    @classmethod
    def of(cls, admin_key: str | None, worker_key: str) -> RoleKeys:
        return cls(digest(admin_key) if admin_key is not None else None, digest(worker_key))

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        return self.admin is None or hmac.compare_digest(digest(bearer(headers)), self.admin)

    def require_admin(self, headers: Mapping[str, str]) -> None:
        """Raises AuthenticationError unless the caller is an admin."""
        if self.is_admin(headers):
            return
        given = bearer(headers)
        if not given:
            raise AuthenticationError(f"no API key: this call needs the server's admin key {HOW}")
        what = "the key of an episode" if given.startswith(EPISODE_PREFIX) else "another key than server.admin_key"
        raise AuthenticationError(f"wrong API key, it is {what}: this call needs the server's admin key {HOW}")

    def is_worker(self, headers: Mapping[str, str]) -> bool:
        return hmac.compare_digest(digest(bearer(headers)), self.worker)
