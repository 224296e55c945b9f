"""Receiving a version wherever it was published: map the publisher's file, or make one of our own of what is pulled.

    same host        map the file
    another host     held already? ── map
                     deltas from what is held, if they are fewer bytes ── decode, write, map
                     the whole file ── map

All engines of a host share what one of them pulls (:mod:`wingbeat.weights.store`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from wingbeat.core.errors import UnavailableError, VersionGone
from wingbeat.core.files import sha256_of
from wingbeat.core.weight_protocol import Manifest, WeightFile
from wingbeat.weights.codecs import decode_delta
from wingbeat.weights.pull import NoSource, PullLimits, Source, pull
from wingbeat.weights.receive import Received, map_file, receive
from wingbeat.weights.store import HostStore
from wingbeat.weights.wanted import Wanted

logger = logging.getLogger(__name__)

GONE_PATIENCE_S = 2.0
"""A file of this host that is gone: word that another version is wanted is on its way."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Remote:
    """How versions of other hosts come here."""

    open_store: Callable[[int], HostStore]
    """Where they are kept; given the bytes of a version.  Called once, when the first one comes."""
    source: Callable[[str], Source]
    """Of one of the names that control gives."""
    limits: PullLimits
    expect: Callable[[Manifest], None] = lambda manifest: None
    """Told before a version is pulled: others may ask for it."""


class WeightReceiver:
    """Used by several threads of one process at once, each with another version."""

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id
        self.remote: Remote | None = None
        """Set once control has said how; without it versions of other hosts are refused."""
        self._store: HostStore | None = None
        self._opening = threading.Lock()
        self._pinned: dict[tuple[str, int], str] = {}
        """By policy and version, the file that is kept for it."""

    def receive(
        self,
        manifest: Manifest,
        sources: tuple[str, ...] = (),
        *,
        pinned: bool = False,
        is_wanted: Wanted = lambda: True,
    ) -> Received:
        """The weights of a manifest, mapped and verified; ends early once they are not wanted any more.

        A ``pinned`` version keeps its file on this host until :meth:`unpin`.

        Raises SetupError for a manifest of another host without a way to it, VersionGone where the version was
        released, UnavailableError where no source gave what the manifest promises.
        """
        if manifest.host_id == self._host_id:
            return self._map(manifest, is_wanted)
        if self.remote is None or not sources or not manifest.files:
            return receive(manifest, host_id=self._host_id)  # which says why it cannot be
        whole, store = manifest.files[0], self._opened(self.remote, manifest)
        self.remote.expect(manifest)
        if pinned:
            self._pinned[(manifest.policy, manifest.version)] = whole.name
            store.pin(whole.name)
        try:
            with store.pulling(manifest.policy, is_wanted=is_wanted):
                started = time.monotonic()
                received = _Pulled(manifest, self.remote, store, sources, is_wanted).received()
                seconds = time.monotonic() - started
                store.sweep(manifest.policy, keep={file.name for file in manifest.files})
        except BaseException:
            self.unpin(manifest.policy, manifest.version)
            raise
        return replace(received, receive_s=seconds)

    def unpin(self, policy: str, version: int) -> None:
        """The file of a pinned version may go."""
        name = self._pinned.pop((policy, version), None)
        if name is not None and self._store is not None:
            self._store.unpin(name)

    def unpin_all(self) -> None:
        """Control is gone, and its evaluations with it."""
        for policy, version in tuple(self._pinned):
            self.unpin(policy, version)

    def close(self) -> None:
        """Nothing is received any more."""
        if self._store is not None:
            self._store.close()

    def _opened(self, remote: Remote, manifest: Manifest) -> HostStore:
        with self._opening:
            if self._store is None:
                self._store = remote.open_store(manifest.size_bytes)
            return self._store

    def _map(self, manifest: Manifest, is_wanted: Wanted) -> Received:
        """The publisher's own file.  One that is gone was released for a newer one, of which word is on its way."""
        until = time.monotonic() + GONE_PATIENCE_S
        while True:
            try:
                return receive(manifest, host_id=self._host_id)
            except VersionGone:
                if not is_wanted() or time.monotonic() >= until:
                    raise
            time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class _Pulled:
    """One version on its way to the store of this host, whose lock is held."""

    manifest: Manifest
    remote: Remote
    store: HostStore
    sources: Sequence[str]
    is_wanted: Wanted

    @property
    def whole(self) -> WeightFile:
        return self.manifest.files[0]

    def received(self) -> Received:
        path = self.store.path(self.whole.name)
        if path.exists():
            try:
                return map_file(self.manifest, path)
            except UnavailableError:
                logger.warning("%s was damaged on this host; it is pulled again", path)
                path.unlink()
        self._obtain(path)
        return map_file(self.manifest, path)

    def _obtain(self, path: Path) -> None:
        """Put the whole file at ``path``, verified."""
        chain = self._chain()
        if chain:
            try:
                self._make(chain, path)
                return
            except NoSource:
                raise
            except UnavailableError as error:
                if not self.is_wanted():
                    raise
                logger.warning("all of %s is pulled, as differences could not be used: %s", self.whole.name, error)
        os.replace(self._fetched(self.whole), path)

    def _chain(self) -> tuple[WeightFile, ...]:
        """The deltas that lead here from what this host holds, if they are fewer bytes than the whole."""
        chain: list[WeightFile] = []
        needed = self.manifest.checksum
        for delta in reversed(self.manifest.files[1:]):
            if delta.encoding != "delta" or delta.checksum != needed:
                return ()
            chain.insert(0, delta)
            needed = delta.base_checksum
            if self.store.of_checksum(self.manifest.policy, needed) is not None:
                break
        else:
            return ()
        return tuple(chain) if sum(delta.size_bytes for delta in chain) < self.whole.size_bytes else ()

    def _make(self, chain: tuple[WeightFile, ...], path: Path) -> None:
        """Of a file that is held, and deltas.  Raises UnavailableError where that gives another file."""
        base = self.store.of_checksum(self.manifest.policy, chain[0].base_checksum)
        if base is None:
            raise UnavailableError("the base of the first difference is gone")
        try:
            tensors = load_file(base)
        except SafetensorError as error:
            base.unlink(missing_ok=True)
            raise UnavailableError(f"{base} was damaged on this host: {error}") from error
        for delta in chain:
            tensors = decode_delta(self._kept(delta).read_bytes(), tensors)
        made = self.store.partial(f"{self.whole.name}.made")
        try:
            save_file(tensors, made)
            if sha256_of(made) != self.whole.sha256:
                raise UnavailableError("they give a file of other bytes; do both sides run the same safetensors?")
            os.replace(made, path)
        except SafetensorError as error:  # a full disk, or a folder that was swept away
            raise UnavailableError(f"cannot write {made}: {error}") from error
        finally:
            made.unlink(missing_ok=True)

    def _kept(self, delta: WeightFile) -> Path:
        """A delta, verified; it stays for hosts that pull from this one."""
        path = self.store.path(delta.name)
        if not path.exists() or path.stat().st_size != delta.size_bytes:
            os.replace(self._fetched(delta), path)
        return path

    def _fetched(self, file: WeightFile) -> Path:
        partial = self.store.partial(file.name)
        pull(
            file,
            policy=self.manifest.policy,
            sources=[self.remote.source(name) for name in self.sources],
            partial=partial,
            limits=self.remote.limits,
            is_wanted=self.is_wanted,
        )
        return partial
