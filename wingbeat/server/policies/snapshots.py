"""Snapshot policies: older copies of a policy that trains, served under names of their own (self-play).

    original reaches version 20 ──▶ its published file is copied to RUN_DIR/snapshots/NAME/
                                └─▶ every engine serves the copy as policy NAME, version 20

The copy is what makes a snapshot outlive the original's file, its trainer, this process and the machine. It is
taken between two steps of the original, so no version that ``snapshot_every`` divides is missed while copying
works; where it does not (a full disk), the snapshot stays what it was, and an event says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from wingbeat.core.events import EventLog
from wingbeat.core.files import write_atomically
from wingbeat.core.signals import Changed
from wingbeat.core.weight_protocol import Manifest, Place
from wingbeat.dataflow.lineages import Lineage
from wingbeat.server.policies.host import PolicyHost
from wingbeat.weights.host import host_id
from wingbeat.weights.names import file_name

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Snapshot:
    """One policy that copies another."""

    host: PolicyHost
    original: PolicyHost
    folder: Path
    files: dict[int, Path] = field(default_factory=dict[int, Path])
    """Copies on disk, by version: that which is served, and older ones that an engine may still be asked for."""
    seen: Place = (0, 0)
    """The original's last place that was copied, or could not be."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def every(self) -> int:
        return self.host.config.snapshot_every

    def due(self) -> Manifest | None:
        """The original's weights, where they are to be copied now."""
        manifest = self.original.manifest
        if manifest is None or manifest.version == 0 or manifest.version % self.every:
            return None
        return manifest if manifest.place > self.seen else None


class Snapshots:
    """All snapshot policies of this control; runs on its event loop."""

    def __init__(
        self,
        policies: Mapping[str, PolicyHost],
        *,
        run_dir: Path,
        events: EventLog,
        changed: Changed,
        path_of: Callable[[Manifest], Path] = lambda manifest: Path(manifest.path),
    ) -> None:
        """``path_of`` gives the file of a version on this host, or raises OSError."""
        self._path_of = path_of
        self._events = events
        self._changed = changed
        self._host_id = host_id()
        self._all = [
            Snapshot(host, policies[host.config.snapshot_of], run_dir / "snapshots" / name)
            for name, host in policies.items()
            if host.config.snapshot_of is not None
        ]

    def restore(self) -> None:
        """Serve the newest copy of each that an earlier control of this run made; the versions of all policies
        are those of the ledger already."""
        for snapshot in self._all:
            for manifest, path in _copies(snapshot.folder):
                if snapshot.files:
                    _delete(path)  # an older copy
                else:
                    self._serve(snapshot, manifest, path)
            self._tell_if_behind(snapshot)

    async def run(self) -> None:
        """Follow the originals where no step of theirs does: a trainer that comes back, engines that catch up."""
        while self._all:
            for snapshot in self._all:
                await self._take(snapshot)
                self._sweep(snapshot)
            await self._changed.wait()

    async def follow(self, original: PolicyHost) -> None:
        """``original`` took a step: copy it where that is due.  Its next step waits for weights and copy."""
        version = original.version
        for snapshot in self._all:
            if snapshot.original is original and version % snapshot.every == 0:
                await original.until_published(version)
                await self._take(snapshot)

    async def _take(self, snapshot: Snapshot) -> None:
        async with snapshot.lock:
            manifest = snapshot.due()
            if manifest is None:
                return
            snapshot.seen = manifest.place
            try:
                with self._open(manifest) as source:
                    path = snapshot.folder / f"{manifest.lineage}-{manifest.version:08d}.safetensors"
                    copied = _renamed(manifest, snapshot.host.name, path)
                    await asyncio.to_thread(_copy, source, copied)
            except OSError as error:
                logger.warning("snapshot %s of version %d: %s", snapshot.host.name, manifest.version, error)
                self._events.emit(
                    "snapshot_failed", policy=snapshot.host.name, version=manifest.version, error=str(error)
                )
                return
            self._serve(snapshot, copied, path)
            self._sweep(snapshot)

    def _open(self, manifest: Manifest) -> BinaryIO:
        """The published file: once it is open, its deletion does not matter.  Raises OSError."""
        return self._path_of(manifest).open("rb")

    def _serve(self, snapshot: Snapshot, manifest: Manifest, path: Path) -> None:
        abandoned = snapshot.files.get(manifest.version)
        if abandoned is not None and abandoned != path:  # of another lineage
            _delete(abandoned)
        snapshot.files[manifest.version] = path
        snapshot.seen = max(snapshot.seen, manifest.place)
        host = snapshot.host
        if manifest.lineage:  # to the host it is its own: one that was never rolled back behind
            lineage = Lineage(host.name, manifest.lineage, base_lineage=0, base_step=0, reason="its original's")
            host.ancestry = host.ancestry.with_lineage(lineage)
        # The file is ours, wherever this run's directory was when it was written.
        host.serve(msgspec.structs.replace(manifest, path=str(path), host_id=self._host_id))
        self._events.emit("snapshot", policy=host.name, original=snapshot.original.name, version=manifest.version)

    def _tell_if_behind(self, snapshot: Snapshot) -> None:
        """After a restart whose files are gone, the newest that is there is used."""
        version = snapshot.original.version
        expected = version - version % snapshot.every
        if snapshot.host.version < expected:
            self._events.emit(
                "snapshot_behind", policy=snapshot.host.name, version=snapshot.host.version, expected=expected
            )

    def _sweep(self, snapshot: Snapshot) -> None:
        """Delete copies of versions that no engine can be asked for any more."""
        if len(snapshot.files) < 2:
            return
        snapshot.host.release_unused()
        for version in [v for v in snapshot.files if snapshot.host.manifest_of(v) is None]:
            _delete(snapshot.files.pop(version))


def _renamed(manifest: Manifest, policy: str, path: Path) -> Manifest:
    """The same weights as another policy's, of which there is the whole file alone."""
    name = file_name(policy, manifest.version, manifest.checksum)
    whole = tuple(msgspec.structs.replace(file, name=name) for file in manifest.files[:1])
    return msgspec.structs.replace(manifest, policy=policy, path=str(path), files=whole)


def _copy(source: BinaryIO, manifest: Manifest) -> None:
    """The tensors first, then the manifest that vouches for them, each on disk before the next.  Raises OSError."""
    path = Path(manifest.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
            target.flush()
            os.fsync(target.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    write_atomically(path.with_suffix(".json"), msgspec.json.encode(manifest))


def _copies(folder: Path) -> list[tuple[Manifest, Path]]:
    """Whole copies, newest first."""
    found: list[tuple[Manifest, Path]] = []
    for description in folder.glob("*.json"):
        manifest = msgspec.json.decode(description.read_bytes(), type=Manifest)
        path = description.with_suffix(".safetensors")
        if path.is_file() and path.stat().st_size == manifest.size_bytes:
            found.append((manifest, path))
    return sorted(found, key=lambda copy: copy[0].place, reverse=True)


def _delete(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
