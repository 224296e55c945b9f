"""Publishing policy versions: one safetensors file each, in a folder that receivers can map.

Invariant: a path, once published, never changes its content.  Files are written under a temporary name
and renamed; the name contains the checksum, so re-doing a version after a roll-back makes another file.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wingbeat.core.errors import SetupError
from wingbeat.core.worker_protocol import AdapterInfo, Manifest
from wingbeat.weights.checksum import describe, tensors_checksum

_HEADER_ROOM_BYTES = 2**20
_TEMPORARY = ".partial"
_SHOWN = 16
"""Digits of the checksum in a file's name."""


class NoRoom(SetupError):
    """The folder takes no more weights now; it may once older versions are released, or somebody makes room."""


class WeightPublisher:
    """Owns the files of one policy in ``directory``; create one per policy and close it.

    Raises SetupError where the folder belongs to another user, who could put other weights under ours.

    Construction adopts the versions that a killed predecessor left of this policy: an engine that
    restarts meanwhile still finds the live one, and releasing them works as if this publisher had
    written them.
    """

    def __init__(self, directory: Path, *, host_id: str, policy: str) -> None:
        if not policy or "/" in policy or policy.startswith("."):
            raise ValueError(f"expected a policy name without '/' or leading '.', got {policy!r}")
        self._directory = directory
        self._host_id = host_id
        self._policy = policy
        self._paths: dict[int, set[Path]] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = directory.stat().st_uid
        if owner != os.getuid():
            raise SetupError(
                f"cannot publish weights to {directory}: it belongs to user {owner}, this is user {os.getuid()}; "
                "remove it, or use another run directory"
            )
        self._adopt_leftovers()

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: int,
        kind: Literal["full", "adapter"],
        base_model: str,
        adapter: AdapterInfo | None = None,
    ) -> Manifest:
        """Write one version and describe it.

        Raises ValueError where ``kind`` and ``adapter`` contradict each other or there is nothing to
        publish, and NoRoom where the folder has no room.
        """
        if (kind == "adapter") != (adapter is not None):
            raise ValueError(f"kind {kind!r} needs {'an' if kind == 'adapter' else 'no'} AdapterInfo, got {adapter!r}")
        if not tensors:
            raise ValueError(f"policy {self._policy!r} version {version}: there are no tensors to publish")
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        checksum = tensors_checksum(ready)
        path = self._directory / f"{self._policy}-{version:08d}-{checksum[:_SHOWN]}.safetensors"
        self._write(ready, path)
        self._paths.setdefault(version, set()).add(path)
        return Manifest(
            policy=self._policy,
            version=version,
            kind=kind,
            path=str(path),
            host_id=self._host_id,
            checksum=checksum,
            size_bytes=path.stat().st_size,
            tensors=describe(ready),
            base_model=base_model,
            adapter=adapter,
        )

    def release(self, version: int, *, checksum: str = "") -> None:
        """Delete a version's files, or the one of a checksum; receivers that mapped it keep their memory.

        Versions come again after a rollback, so one may have several files.  Unknown ones are fine.
        """
        paths = self._paths.get(version, set())
        for path in [path for path in paths if path.stem.endswith(checksum[:_SHOWN])]:
            path.unlink(missing_ok=True)
            paths.discard(path)
        if not paths:
            self._paths.pop(version, None)

    def keep(self, checksums: Collection[str]) -> None:
        """Delete the files of all other checksums, whoever wrote them."""
        kept = {checksum[:_SHOWN] for checksum in checksums}
        for version, paths in tuple(self._paths.items()):
            for path in tuple(paths):
                checksum = path.stem.rpartition("-")[2]
                if checksum not in kept:
                    self.release(version, checksum=checksum)

    def close(self) -> None:
        """Delete every version, and the folder if that leaves it empty.  May be called twice."""
        for version in list(self._paths):
            self.release(version)
        if self._directory.is_dir() and not any(self._directory.iterdir()):
            self._directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, tensors: dict[str, Tensor], path: Path) -> None:
        needed = sum(tensor.nbytes for tensor in tensors.values()) + _HEADER_ROOM_BYTES
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise NoRoom(
                f"publishing policy {self._policy!r} needs {needed} bytes in {self._directory}, which has {free}; "
                "free some, or publish to another folder"
            )
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            save_file(tensors, temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:  # somebody else was faster, or a quota is reached
            raise NoRoom(f"cannot publish policy {self._policy!r} to {self._directory}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _adopt_leftovers(self) -> None:
        name = re.compile(
            rf"{re.escape(self._policy)}-(\d{{8,}})-[0-9a-f]{{16}}\.safetensors({re.escape(_TEMPORARY)})?"
        )
        for path in self._directory.iterdir():
            match = name.fullmatch(path.name)
            if match is None:
                continue
            if match[2]:  # half-written
                path.unlink(missing_ok=True)
            else:
                self._paths.setdefault(int(match[1]), set()).add(path)
