"""The versions of one policy whose weights exist as files: served, pinned, released.

A version is (lineage, number).  After a rollback the numbers come again: the files of abandoned versions go
once no engine loads them and no evaluation pins them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from wingbeat.core.weight_protocol import KeepVersions, Manifest, Place, ReleaseVersion
from wingbeat.core.worker_protocol import ControlMessage
from wingbeat.dataflow.lineages import Ancestry
from wingbeat.server.workers.engines import EnginePool


class PolicyVersions:
    """Owns the manifests of a policy; runs on control's event loop."""

    def __init__(self, policy: str, engines: EnginePool, *, send: Callable[[ControlMessage], None]) -> None:
        """``send`` reaches the trainer, which owns the files (where there is one now)."""
        self._policy = policy
        self._engines = engines
        self._send = send
        self._held: dict[Place, Manifest] = {}
        self._pins: Counter[int] = Counter()
        self._pinned: dict[int, Manifest] = {}
        self.live: Manifest | None = None

    @property
    def held(self) -> tuple[Manifest, ...]:
        """All whose files may be asked for, newest first."""
        found = {id(m): m for m in (*([self.live] if self.live else []), *self._held.values(), *self._pinned.values())}
        return tuple(sorted(found.values(), key=lambda manifest: manifest.place, reverse=True))

    def adopt(self, manifest: Manifest) -> None:
        """Serve these weights from now on, unless later ones are served."""
        if self.live is not None and self.live.place > manifest.place:
            return
        self.live = manifest
        self._held[manifest.place] = manifest
        self._engines.publish(manifest)
        self.release_unused()

    def of(self, version: int, ancestry: Ancestry) -> Manifest | None:
        """The manifest of a surviving version whose file still exists.

        None, too, where its number :meth:`is_taken`.
        """
        found = self._newest(version, ancestry)
        return None if found is None or self._is_taken(found) else found

    def is_taken(self, version: int, ancestry: Ancestry) -> bool:
        """Whether an evaluation still pins an abandoned version of the same number: engines know pins by number."""
        found = self._newest(version, ancestry)
        return found is not None and self._is_taken(found)

    def _is_taken(self, manifest: Manifest) -> bool:
        pinned = self._pinned.get(manifest.version)
        return pinned is not None and pinned.checksum != manifest.checksum

    def _newest(self, version: int, ancestry: Ancestry) -> Manifest | None:
        found = [
            held
            for key, held in self._held.items()
            if key[1] == version and (held is self.live or ancestry.contains(*key))
        ]
        return found[-1] if found else None

    def release_unused(self) -> None:
        """Delete files of versions that nobody can ask for any more.

        An engine that loads an older one for a long time keeps that one, and none of those that came since.
        """
        live = self.live
        for key, manifest in tuple(self._held.items()):
            if manifest is not live and not self._engines.holds(manifest):
                del self._held[key]
                if manifest.path not in (other.path for other in self._held.values()):
                    self._release(manifest)

    def release_unknown(self, manifest: Manifest) -> None:
        """Delete a file that only a replay made; one that is still known may be pinned."""
        if manifest.path not in (other.path for other in self._held.values()):
            self._release(manifest)

    def sweep(self) -> None:
        """Have the trainer delete what is not known here: a release that found no trainer, or died with a control."""
        held = (*self._held.values(), *self._pinned.values())
        self._send(KeepVersions(self._policy, tuple(sorted({manifest.checksum for manifest in held}))))

    def _release(self, manifest: Manifest) -> None:
        self._send(ReleaseVersion(self._policy, manifest.version, manifest.checksum))

    def pin(self, manifest: Manifest) -> None:
        """Keep a version served until as many :meth:`unpin` (evaluations may share one)."""
        self._pins[manifest.version] += 1
        if self._pins[manifest.version] == 1:
            self._pinned[manifest.version] = manifest
            self._engines.pin(manifest)

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version], self._pinned[version]
            self._engines.unpin(self._policy, version)
            self.release_unused()

    def is_pinned(self, version: int) -> bool:
        return version in self._pins
