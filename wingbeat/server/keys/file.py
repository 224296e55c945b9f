"""The keys that ``wingbeat keys`` makes: a JSON file of digests, changed by several programs, read by the server.

A key is 192 random bits, shown once.  The file holds its SHA-256: against so many random bits there is nothing to
guess, so a slow hash would only slow every request down.  Writers hold a lock beside the file and replace it whole;
readers need no lock.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wingbeat.core.errors import NotFoundError, RequestError, SetupError
from wingbeat.core.files import OWNER_ONLY, write_atomically
from wingbeat.core.key_protocol import KeyReply, KeyRequest
from wingbeat.core.keys import digest
from wingbeat.server.keys.principals import Principal, Role

FILE_NAME = "keys.json"
FORMAT = 1
MAX_KEYS = 10_000
KEY_PREFIXES = {role: f"wb-{role.value}-" for role in Role}
"""How keys begin, so that people, programs and scanners of leaked secrets know them."""


class KeyRecord(BaseModel):
    """One key, without the key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=r"^key-[0-9a-f]{12}$")]
    role: Role
    name: Annotated[str, Field(pattern=r"^[^/\x00-\x1f\x7f-\x9f]{0,64}$")] = ""
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    created: float
    """Seconds since 1970, as all times here."""
    expires: float | None = None
    revoked: float | None = None
    train: bool = False
    """Role ``collect``: whether the conversations may train."""
    record: bool = True
    """Role ``collect``: whether they are kept at all."""
    policies: tuple[str, ...] = ()
    """Role ``collect``: what it may call; () means all."""

    @property
    def principal(self) -> Principal:
        return Principal(
            self.role, key_id=self.id, name=self.name, train=self.train, record=self.record, policies=self.policies
        )

    def reply(self, now: float) -> KeyReply:
        """As people see it."""
        return KeyReply(
            id=self.id,
            role=self.role.value,
            name=self.name,
            state=self.state(now),
            created_s=self.created,
            expires_s=self.expires,
            revoked_s=self.revoked,
            train=self.train,
            record=self.record,
            policies=list(self.policies),
        )

    def state(self, now: float) -> str:
        """``active``, ``expired`` or ``revoked``."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


@dataclass(frozen=True, slots=True)
class NewKey:
    """What is asked for."""

    role: Role
    name: str = ""
    expires_s: float | None = None
    """From now; None: never."""
    train: bool = False
    record: bool = True
    policies: tuple[str, ...] = ()

    @classmethod
    def of(cls, wanted: KeyRequest) -> Self:
        """As a caller over HTTP asks for it."""
        asked = wanted.model_dump()
        return cls(Role(asked.pop("role")), policies=tuple(asked.pop("policies")), **asked)

    def request(self) -> KeyRequest:
        """To ask a running server for it.  Raises RequestError for what it would refuse unread."""
        try:
            return KeyRequest.model_validate(asdict(self) | {"role": self.role.value, "policies": list(self.policies)})
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            raise RequestError(f"`{where}`: {fault['msg']}, got {fault['input']!r:.100}", param=where) from None

    def record_of(self, key: str, *, key_id: str, created: float) -> KeyRecord:
        """Raises RequestError for what does not fit the role or the format."""
        if self.role is not Role.COLLECT and (self.train or self.policies or not self.record):
            raise RequestError(f"train, record and policies are of collect keys; the role is {self.role}", param="role")
        if self.train and not self.record:
            raise RequestError("what is not recorded cannot train: ask for one of the two", param="train")
        if self.expires_s is not None and not 0 < self.expires_s < float("inf"):
            raise RequestError(f"expected a time above 0 until it expires, got {self.expires_s:g} s", param="expires_s")
        try:
            return KeyRecord(
                id=key_id,
                role=self.role,
                name=self.name,
                digest=digest(key),
                created=created,
                expires=None if self.expires_s is None else created + self.expires_s,
                train=self.train,
                record=self.record,
                policies=self.policies,
            )
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            expected = "expected at most 64 printable characters without a slash"
            raise RequestError(f"`{where}`: {expected}, got {self.name!r:.100}", param=where) from None


class _Contents(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    keys: tuple[KeyRecord, ...] = ()


class KeyFile:
    """One key file, which need not exist yet."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._now = now

    def stamp(self) -> tuple[int, int, int] | None:
        """Changes whenever the file does; None without one that can be looked at."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def check_present(self) -> None:
        """Raises SetupError where keys were made once and their file is gone: without it the server might be open."""
        if self._lock.exists() and not self.path.exists():
            raise SetupError(
                f"the key file {self.path} is gone: restore it from a copy; to begin without keys, remove {self._lock}"
            )

    @property
    def _lock(self) -> Path:
        """Stays once a key was made."""
        return self.path.with_name(f".{self.path.name}.lock")

    def read(self) -> tuple[KeyRecord, ...]:
        """All keys, oldest first; none without a file.  Raises SetupError for a file that is none of ours."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SetupError(f"cannot read the key file {self.path}: {error}") from error
        try:
            contents = _Contents.model_validate_json(data)
        except ValidationError as error:
            fault = error.errors(include_input=False)[0]
            where = ".".join(map(str, fault["loc"])) or "the file"
            raise SetupError(
                f"the key file {self.path} is damaged ({where}: {fault['msg']}): restore it from a copy, or move it"
                " away and make new keys with `wingbeat keys create`"
            ) from None
        if contents.format != FORMAT:
            raise SetupError(
                f"the key file {self.path} has format {contents.format}, this release reads format {FORMAT}"
            )
        return contents.keys

    def create(self, wanted: NewKey) -> tuple[KeyRecord, str]:
        """A new key: its record, and the key itself, which nobody can read again.  Raises RequestError."""
        key = f"{KEY_PREFIXES[wanted.role]}{secrets.token_urlsafe(24)}"
        created = self._now()
        record = wanted.record_of(key, key_id=f"key-{secrets.token_hex(6)}", created=created)
        with self._locked():
            keys = self.read()
            if len(keys) >= MAX_KEYS:
                raise RequestError(f"{self.path} has {MAX_KEYS} keys; move it away and make those that are needed anew")
            self._write((*keys, record))
        return record, key

    def revoke(self, key_id: str) -> KeyRecord:
        """A key is refused from now on; twice is harmless.  Raises NotFoundError."""
        if not self.path.exists():
            raise self._unknown(key_id)
        with self._locked():
            keys = self.read()
            found = next((key for key in keys if key.id == key_id), None)
            if found is None:
                raise self._unknown(key_id)
            if found.revoked is None:
                found = found.model_copy(update={"revoked": self._now()})
                self._write(tuple(found if key.id == key_id else key for key in keys))
        return found

    def _unknown(self, key_id: str) -> NotFoundError:
        return NotFoundError(f"no key {key_id!r} in {self.path}; `wingbeat keys list` shows their ids")

    def _write(self, keys: tuple[KeyRecord, ...]) -> None:
        write_atomically(self.path, _Contents(keys=keys).model_dump_json(indent=1).encode(), mode=OWNER_ONLY)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Held while the file is read, changed and written, by one program at a time."""
        import fcntl  # which clients on other systems lack; they ask a server

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._lock, os.O_WRONLY | os.O_CREAT, OWNER_ONLY)
        except OSError as error:
            raise SetupError(f"cannot write the key file {self.path}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def exposed(host: str, keys: Path, *, setting: str = "server.host") -> str:
    """What is wrong with a server that listens beyond loopback without an admin key."""
    return (
        f"{setting} = {host!r} is reachable from other machines, and there is no admin key: make one with"
        f" `wingbeat keys create admin --file {keys}`, set server.admin_key, or bind 127.0.0.1"
    )


def key_file_path(keys_file: str | None, *, runs: Path, folder: Path = Path()) -> Path:
    """Where the keys are: ``server.keys_file`` in ``folder`` where it is set, else beside the run directories."""
    return runs / FILE_NAME if keys_file is None else folder / Path(keys_file).expanduser()
