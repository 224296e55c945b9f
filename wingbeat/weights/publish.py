"""Publishing policy versions: one safetensors file each, in a folder that receivers can map.

Invariant: a path, once published, never changes its content.  Files are written under a temporary name
and renamed; the name contains the checksum, so re-doing a version after a roll-back makes another file.

For receivers on other hosts there are *deltas*, too: what turns the version before into this one.  The last ones
stay, so that a receiver that missed some versions catches up from delta to delta.  They are their publisher's alone:
releasing a version says nothing of them, and a successor begins a new chain.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from wingbeat.core.errors import SetupError
from wingbeat.core.files import sha256_of
from wingbeat.core.weight_protocol import AdapterInfo, Manifest, WeightFile
from wingbeat.weights.checksum import describe, tensors_checksum
from wingbeat.weights.codecs import encode_delta
from wingbeat.weights.host import make_own
from wingbeat.weights.names import DELTA, WHOLE, file_name, names_of, shown

logger = logging.getLogger(__name__)

_HEADER_ROOM_BYTES = 2**20
_TEMPORARY = ".partial"


class NoRoom(SetupError):
    """The folder takes no more weights now; it may once older versions are released, or somebody makes room."""


class WeightPublisher:
    """Owns the files of one policy in ``directory``; create one per policy and close it.

    Raises SetupError where the folder belongs to another user, who could put other weights under ours.

    Construction adopts the versions that a killed predecessor left of this policy: an engine that
    restarts meanwhile still finds the live one, and releasing them works as if this publisher had
    written them.

    One thread may publish while another releases.
    """

    def __init__(self, directory: Path, *, host_id: str, policy: str, delta_chain: int = 8) -> None:
        """``delta_chain``: how many deltas stay at most."""
        if not policy or "/" in policy or policy.startswith("."):
            raise ValueError(f"expected a policy name without '/' or leading '.', got {policy!r}")
        self._directory = directory
        self._host_id = host_id
        self._policy = policy
        self._paths: dict[int, set[Path]] = {}
        self._lock = threading.Lock()
        """Of ``_paths`` and ``_newest``."""
        self._newest: Manifest | None = None
        """What was published last."""
        self._delta_chain = delta_chain
        self._deltas: tuple[WeightFile, ...] = ()
        """The last one leads to the newest version, each other one to the base of the one behind it."""
        make_own(directory)
        self._adopt_leftovers()

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        kind: Literal["full", "adapter"],
        base_model: str,
        adapter: AdapterInfo | None = None,
        delta: bool = False,
    ) -> Manifest:
        """Write one version and describe it; with ``delta`` also what turns the one before into it.

        There is no delta where the version before is not there any more, or is of other tensors.

        Raises ValueError where ``kind`` and ``adapter`` contradict each other or there is nothing to
        publish, and NoRoom where the folder has no room.
        """
        if (kind == "adapter") != (adapter is not None):
            raise ValueError(f"kind {kind!r} needs {'an' if kind == 'adapter' else 'no'} AdapterInfo, got {adapter!r}")
        if not tensors:
            raise ValueError(f"policy {self._policy!r} version {version}: there are no tensors to publish")
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        checksum = tensors_checksum(ready)
        path = self._directory / file_name(self._policy, version, checksum)
        base = self._newest_tensors() if delta else None
        self._write(ready, path)
        size = path.stat().st_size
        whole = WeightFile(path.name, size, sha256_of(path), "full", checksum=checksum)
        self._extend_chain(ready, base, version=version, checksum=checksum, at_most=size)
        manifest = Manifest(
            policy=self._policy,
            version=version,
            kind=kind,
            path=str(path),
            host_id=self._host_id,
            checksum=checksum,
            size_bytes=size,
            tensors=describe(ready),
            base_model=base_model,
            adapter=adapter,
            files=(whole, *self._deltas),
        )
        with self._lock:
            self._paths.setdefault(version, set()).add(path)
            self._newest = manifest
        return manifest

    def release(self, version: int, *, checksum: str = "") -> None:
        """Delete a version's files, or the one of a checksum; receivers that mapped it keep their memory.

        Versions come again after a rollback, so one may have several files.  Unknown ones are fine.
        """
        with self._lock:
            self._release(version, checksum)

    def _release(self, version: int, checksum: str = "") -> None:
        paths = self._paths.get(version, set())
        for path in [path for path in paths if path.stem.endswith(shown(checksum))]:
            path.unlink(missing_ok=True)
            paths.discard(path)
        if not paths:
            self._paths.pop(version, None)

    def keep(self, checksums: Collection[str]) -> None:
        """Delete the files of all other checksums, whoever wrote them, but for the newest version."""
        with self._lock:
            newest = () if self._newest is None else (self._newest.checksum,)
            kept = {shown(checksum) for checksum in (*checksums, *newest)}
            for version, paths in tuple(self._paths.items()):
                for path in tuple(paths):
                    checksum = path.stem.rpartition("-")[2]
                    if checksum not in kept:
                        self._release(version, checksum)

    def close(self) -> None:
        """Delete every version, and the folder if that leaves it empty.  May be called twice."""
        for version in list(self._paths):
            self.release(version)
        self._replace_chain(())
        if self._directory.is_dir() and not any(self._directory.iterdir()):
            self._directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _newest_tensors(self) -> tuple[Manifest, Mapping[str, Tensor]] | None:
        """What was published last, mapped; None where its file was released, or is damaged."""
        newest = self._newest
        if newest is None:
            return None
        try:
            return newest, load_file(newest.path)
        except (FileNotFoundError, SafetensorError):
            return None

    def _extend_chain(
        self,
        tensors: Mapping[str, Tensor],
        base: tuple[Manifest, Mapping[str, Tensor]] | None,
        *,
        version: int,
        checksum: str,
        at_most: int,
    ) -> None:
        """Add the delta that leads from ``base`` here; together the deltas have fewer bytes than ``at_most``.

        Where there can be none, receivers pull all of the next version.
        """
        if base is not None and base[0].checksum == checksum:  # nothing has changed since
            return
        delta = None if base is None else self._write_delta(tensors, base, version=version, checksum=checksum)
        chain = () if delta is None else (*self._deltas, delta)[-self._delta_chain :]
        while sum(one.size_bytes for one in chain) >= at_most:
            chain = chain[1:]
        self._replace_chain(chain, gone=delta)

    def _write_delta(
        self, tensors: Mapping[str, Tensor], base: tuple[Manifest, Mapping[str, Tensor]], *, version: int, checksum: str
    ) -> WeightFile | None:
        """None where names or shapes differ, or there is no room."""
        try:
            data = encode_delta(base[1], tensors, base_checksum=base[0].checksum, target_checksum=checksum)
        except ValueError:
            return None
        path = self._directory / file_name(self._policy, version, checksum, suffix=DELTA)
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            self._require_room(len(data))
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except (OSError, NoRoom) as error:
            logger.warning("no delta of policy %s version %d: %s", self._policy, version, error)
            return None
        finally:
            temporary.unlink(missing_ok=True)
        digest = hashlib.sha256(data).hexdigest()
        return WeightFile(path.name, len(data), digest, "delta", base[0].checksum, checksum)

    def _replace_chain(self, chain: tuple[WeightFile, ...], *, gone: WeightFile | None = None) -> None:
        """``gone``: one more that may not be of the chain."""
        names = {delta.name for delta in chain}
        for old in (*self._deltas, *(() if gone is None else (gone,))):
            if old.name not in names:
                (self._directory / old.name).unlink(missing_ok=True)
        self._deltas = chain

    def _require_room(self, size: int) -> None:
        needed = size + _HEADER_ROOM_BYTES
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise NoRoom(
                f"publishing policy {self._policy!r} needs {needed} bytes in {self._directory}, which has {free}; "
                "free some, or publish to another folder"
            )

    def _write(self, tensors: dict[str, Tensor], path: Path) -> None:
        self._require_room(sum(tensor.nbytes for tensor in tensors.values()))
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            save_file(tensors, temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:  # somebody else was faster, or a quota is reached
            raise NoRoom(f"cannot publish policy {self._policy!r} to {self._directory}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _adopt_leftovers(self) -> None:
        names = names_of(self._policy, endings=f"({re.escape(_TEMPORARY)})?")
        for path in self._directory.iterdir():
            match = names.fullmatch(path.name)
            if match is None:
                continue
            if path.suffix != WHOLE:  # half-written, or of a chain that is broken now
                path.unlink(missing_ok=True)
            else:
                self._paths.setdefault(int(match["version"]), set()).add(path)
