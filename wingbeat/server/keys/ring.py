"""Who is calling.  Keys are random, kept as hashes only, and belong to one role each.

A key comes from the configuration, from the key file (``wingbeat keys``), or was made for this start alone by the
supervisor, for its own processes.  The keys of episodes are not here: an attempt has its own
(:mod:`wingbeat.server.episodes.registry`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wingbeat.core.errors import AuthenticationError, PermissionDenied, SetupError
from wingbeat.core.keys import digest, digest_of
from wingbeat.server.keys.file import KeyFile, KeyRecord
from wingbeat.server.keys.principals import NEEDED, Principal, Role

logger = logging.getLogger(__name__)

EPISODE_PREFIX = "wb-ep-"
HOW = (
    "as `Authorization: Bearer KEY`; the command line reads it from WINGBEAT_KEY or --key KEY,"
    " the SDK from Swarm(url, key=KEY)"
)
KEY_HEADERS = ("authorization", "x-api-key")
__all__ = ["EPISODE_PREFIX", "KeyRing", "OwnKeys", "bearer", "digest", "key_headers", "keys_in", "new_episode_key"]


def new_episode_key() -> str:
    """An opaque key of 192 random bits."""
    return EPISODE_PREFIX + secrets.token_urlsafe(24)


def bearer(headers: Mapping[str, str]) -> str:
    """The key of a request, or "" without one."""
    return next(iter(keys_in(headers)), "")


def key_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Of a request's headers as they came, those that may hold a key: all that the functions here look at."""
    return {name: headers.get(name.encode(), b"").decode("latin-1") for name in KEY_HEADERS}


def keys_in(headers: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of a request: ``Authorization: Bearer``, then ``x-api-key`` (SDKs may send a stray one in the other)."""
    value = headers.get("authorization", "")
    given = (value[7:].strip() if value[:7].lower() == "bearer " else "", headers.get("x-api-key", "").strip())
    return tuple(key for key in given if key)


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """Keys of one start, which the supervisor makes for itself and its agents; plain or as ``sha256:HEX``."""

    admin: str | None = None
    client: str | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """A key that the ring knows."""

    principal: Principal
    record: KeyRecord | None = None
    """Of the key file."""


class KeyRing:
    """All keys of the server.

    Keys are found by their digest in a map: how long that takes tells about digests, from which no key follows.

    Without an admin key in the configuration or the key file the ring is *open*: whoever brings no key, or one that
    it does not know (SDKs send a dummy), is admin.  The server then listens on loopback only.  A ring that was
    closed once stays closed, whatever becomes of the file.
    """

    def __init__(
        self,
        fixed: Mapping[str, Principal],
        *,
        is_open: bool,
        file: KeyFile | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``fixed``: principals by digest.  Raises SetupError for a damaged key file."""
        self.file = file
        self.is_open = is_open
        self._now = now
        self._fixed = {key: _Known(principal) for key, principal in fixed.items()}
        self._known: Mapping[str, _Known] = self._fixed
        self._stamp: tuple[int, int, int] | None = None
        self._said = ""
        """Of the key file, as long as it cannot be read."""
        if file is not None:
            self._stamp = file.stamp()
            self._take(file.read())

    @classmethod
    def of(
        cls,
        admin_key: str | None,
        *worker_keys: str,
        own: OwnKeys = OwnKeys(),
        file: KeyFile | None = None,
        now: Callable[[], float] = time.time,
    ) -> KeyRing:
        """Keys are plain or ``sha256:HEX``."""
        fixed = {digest_of(key): Principal(Role.WORKER, name="worker") for key in worker_keys}
        for key, role in ((own.client, Role.CLIENT), (own.admin, Role.ADMIN), (admin_key, Role.ADMIN)):
            if key is not None:
                fixed[digest_of(key)] = Principal(role, name=role.value)
        return cls(fixed, is_open=admin_key is None, file=file, now=now)

    def _take(self, records: tuple[KeyRecord, ...]) -> None:
        self._known = {key.digest: _Known(key.principal, key) for key in records} | self._fixed
        self.is_open = self.is_open and not any(key.role is Role.ADMIN for key in records)

    def refresh(self) -> None:
        """Read the key file again if it changed; a damaged one changes nothing and is told once."""
        if self.file is None or (stamp := self.file.stamp()) == self._stamp:
            return
        try:
            self._take(self.file.read())
            self._said = ""
        except SetupError as error:
            if error.message != self._said:
                logger.error("%s; the keys stay as they were", error)
            self._said = error.message
            if isinstance(error.__cause__, OSError):
                return  # not read, and perhaps readable the next time: a revoked key must not live on
        self._stamp = stamp

    def principal(self, headers: Mapping[str, str], *, path_key: str = "") -> Principal:
        """Who calls; the key of the path goes before those of the headers.

        Raises AuthenticationError: no key, an unknown one, one that expired or was revoked.
        """
        given = (path_key,) if path_key else keys_in(headers)
        known = next((found for key in given if (found := self._known.get(digest(key))) is not None), None)
        if known is not None:
            self._check(known)
            return known.principal
        if self.is_open:
            return Principal(Role.ADMIN)
        if not given:
            raise AuthenticationError(f"no API key: send one {HOW}")
        is_episode = given[0].startswith(EPISODE_PREFIX)
        what = "the key of an episode" if is_episode else "a key that this server does not know"
        raise AuthenticationError(f"wrong API key, it is {what}: send the right one {HOW}")

    def _check(self, known: _Known) -> None:
        """Raises AuthenticationError for a key that is no longer good."""
        record = known.record
        if record is None or (state := record.state(self._now())) == "active":
            return
        raise AuthenticationError(
            f"the API key {record.id}{f' ({record.name})' if record.name else ''} {_ENDED[state]}: an admin makes"
            " another with `wingbeat keys create`"
        )

    def require(self, headers: Mapping[str, str], allowed: frozenset[Role]) -> Principal:
        """Who calls, if its role is one of ``allowed``.  Raises AuthenticationError, PermissionDenied."""
        needed = NEEDED[allowed]
        try:
            caller = self.principal(headers)
        except AuthenticationError as error:
            raise AuthenticationError(f"{error.message} (this call needs {needed})") from None
        if caller.role not in allowed:
            raise PermissionDenied(f"this call needs {needed}, and yours is {_ARTICLES[caller.role]} key")
        return caller

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        return self._is(headers, Role.ADMIN)

    def is_worker(self, headers: Mapping[str, str]) -> bool:
        return self._is(headers, Role.WORKER)

    def _is(self, headers: Mapping[str, str], role: Role) -> bool:
        try:
            return self.principal(headers).role is role
        except AuthenticationError:
            return False


_ENDED = {"expired": "has expired", "revoked": "was revoked"}
_ARTICLES = {Role.ADMIN: "an admin", Role.CLIENT: "a client", Role.WORKER: "a worker", Role.COLLECT: "a collect"}
