"""The weight files that control gives to other hosts: a trainer's own where both share a host, else its uploads.

Only what a manifest names that is held can be asked for, so no name leads anywhere else.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wingbeat.core.errors import ConflictError, NotFoundError, PayloadTooLarge, RequestError, UnavailableError
from wingbeat.core.files import NO_ROOM, sha256_of
from wingbeat.core.weight_protocol import Manifest, WeightFile
from wingbeat.weights.host import make_private, run_weights_candidates, run_weights_dir
from wingbeat.weights.names import names_of

if TYPE_CHECKING:
    from wingbeat.server.policies.host import PolicyHost

_PARTIAL = ".partial"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class WrongOffset(ConflictError):
    """A part of an upload is not the one that comes next; the answer says which one does."""

    code = "wrong_offset"

    def __init__(self, offset: int) -> None:
        super().__init__(f"expected the part from byte {offset} on")
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that a trainer on another host brings."""

    policy: str
    name: str
    sha256: str
    """Of the whole file."""
    start: int
    total: int
    data: bytes


class WeightFiles:
    """Of one control."""

    def __init__(self, policies: Mapping[str, PolicyHost], *, run_dir: Path, host_id: str) -> None:
        self._policies = policies
        self._run_dir = run_dir
        self._roots = (*run_weights_candidates(run_dir), run_dir / "snapshots")
        """Where the trainers of this run publish, and control copies to: nothing else is given."""
        self.host_id = host_id
        self.relay_key = secrets.token_urlsafe(24)
        """With what workers ask one another."""
        self._uploads: Path | None = None
        self._brought: dict[str, set[str]] = {}
        """Per policy, names of uploads that a manifest has named."""
        self._taking: dict[str, threading.Lock] = {}
        """Per policy."""

    def find(self, policy: str, name: str) -> tuple[Path, WeightFile]:
        """A file of a version that is held.  Raises NotFoundError."""
        host = self._policies.get(policy)
        for manifest in host.versions.held if host is not None else ():
            for file in manifest.files:
                if file.name == name:
                    return self._path(manifest, file), file
        raise NotFoundError(f"no weight file {name!r} of policy {policy!r} is held; its version was released")

    def path_of(self, manifest: Manifest) -> Path:
        """The whole set of a version, on this host.  Raises FileNotFoundError where it was not brought here."""
        try:
            if manifest.host_id == self.host_id:
                return self._own(manifest)
            path = self._path(manifest, manifest.files[0]) if manifest.files else None
        except NotFoundError as error:
            raise FileNotFoundError(error.message) from None
        if path is None or not path.exists():
            raise FileNotFoundError(f"the weights lie on the trainer's host {manifest.host_id}")
        return path

    def _path(self, manifest: Manifest, file: WeightFile) -> Path:
        if names_of(manifest.policy).fullmatch(file.name) is None:  # no name that a worker makes up leads elsewhere
            raise NotFoundError(f"no weight file of {manifest.policy!r} has the name {file.name!r:.200}")
        if manifest.host_id != self.host_id:
            return self._uploads_dir() / file.name
        path = self._own(manifest)
        return path if file.encoding == "full" else path.with_name(file.name)

    def _own(self, manifest: Manifest) -> Path:
        """What a trainer of this host published.  Raises NotFoundError where that is none of this run's files."""
        path = Path(manifest.path)
        if not any(path.resolve().is_relative_to(root.resolve()) for root in self._roots):
            raise NotFoundError(f"version {manifest.version} of {manifest.policy!r} lies in no folder of this run")
        return path

    def _uploads_dir(self) -> Path:
        if self._uploads is None:
            self._uploads = run_weights_dir(self._run_dir) / "uploads"
        return self._uploads

    # --- uploads ------------------------------------------------------------------------------

    def take(self, part: Part) -> int:
        """Add a part to an upload; how many bytes of it are here now.  Blocks: call it on a thread.

        Raises WrongOffset where another part is next (also: the file is here), RequestError for a name or a part that
        cannot be, UnavailableError where the disk is full or the whole file is damaged: it is deleted, and begins anew.
        """
        self._check(part)
        with self._taking.setdefault(part.policy, threading.Lock()):  # a part may be sent again while it is taken
            return self._append(part)

    def _append(self, part: Part) -> int:
        folder = self._uploads_dir()
        make_private(folder)
        path = folder / part.name
        partial = folder / (part.name + _PARTIAL)
        if path.exists():
            raise WrongOffset(part.total)
        size = partial.stat().st_size if partial.exists() else 0
        if size >= part.total:  # an earlier control died before it had looked at it
            self._finish(partial, path, part)
            raise WrongOffset(part.total)
        if part.start != size:
            raise WrongOffset(size)
        try:
            with partial.open("ab") as out:
                out.write(part.data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise UnavailableError(f"no room for {part.name}: {error}") from error
            raise
        size += len(part.data)
        if size == part.total:
            self._finish(partial, path, part)
        return size

    def _finish(self, partial: Path, path: Path, part: Part) -> None:
        if not hmac.compare_digest(sha256_of(partial), part.sha256):
            partial.unlink()
            raise UnavailableError(f"{part.name} came damaged; bring it again from its first byte")
        partial.replace(path)
        self._sweep(part)

    def _check(self, part: Part) -> None:
        if part.policy not in self._policies:
            raise NotFoundError(f"there is no policy {part.policy!r}, only {', '.join(self._policies)}")
        if names_of(part.policy).fullmatch(part.name) is None:
            raise RequestError(f"expected the name of a weight file of {part.policy!r}, got {part.name!r}")
        if _SHA256.fullmatch(part.sha256) is None:
            raise RequestError(f"expected the SHA-256 of the file in hexadecimal, got {part.sha256!r:.80}")
        if part.start + len(part.data) > part.total or not part.data:
            raise PayloadTooLarge(f"a part from byte {part.start} with {len(part.data)} bytes of {part.total}")

    def _sweep(self, part: Part) -> None:
        """Delete uploads that no version needs: of released ones, of trainers that died over them, of earlier controls.

        What a trainer brings for its next version is named by no manifest yet.
        """
        manifests = [m for m in self._policies[part.policy].versions.held if m.host_id != self.host_id]
        held = {file.name for manifest in manifests for file in manifest.files}
        oldest = min((manifest.version for manifest in manifests), default=0)
        known = self._brought.setdefault(part.policy, set())
        for path in self._uploads_dir().iterdir():
            name = path.name.removesuffix(_PARTIAL)
            match = names_of(part.policy).fullmatch(name)
            if match is None or name in held or name == part.name:
                continue
            if path.suffix == _PARTIAL or name in known or int(match["version"]) < oldest:
                path.unlink(missing_ok=True)
        self._brought[part.policy] = held
