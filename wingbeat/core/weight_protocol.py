"""What control, trainers and engines say to each other about weights; part of the worker protocol.

A trainer publishes a version as files, which a :class:`Manifest` names; control has engines serve it live or beside the
live one (pinned), and tells the trainer which versions are still needed.  :mod:`wingbeat.core.worker_protocol` has the
frames in which these messages travel.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Place = tuple[int, int]
"""(lineage, version): orders a policy's versions by when they came to be; any of a later lineage is newer."""

CONTROL = "control"
"""Among the sources of weights: the server that the worker dials, under whatever address it does."""


class TensorInfo(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    """safetensors name, e.g. "F32", "BF16"."""
    shape: tuple[int, ...]


class AdapterInfo(msgspec.Struct, frozen=True):
    """How to merge a published LoRA adapter: ``W + alpha / rank * B @ A`` per target."""

    rank: int
    alpha: float


class WeightFile(msgspec.Struct, frozen=True):
    """A file from which receivers on other hosts make a version's tensors."""

    name: str
    """``GET /weights/v1/{policy}/{name}`` at every source."""
    size_bytes: int
    sha256: str
    """Of the file's bytes, hex."""
    encoding: Literal["full", "delta"]
    """The whole set as safetensors, or what differs from another set (``wingbeat.weights.codecs``)."""
    base_checksum: str = ""
    """Of the tensors that a delta starts from."""
    checksum: str = ""
    """Of the tensors that it gives."""


class Manifest(msgspec.Struct, frozen=True):
    """One published policy version."""

    policy: str
    version: int
    kind: Literal["full", "adapter"]
    path: str
    """The safetensors file on the publisher's host."""
    host_id: str
    checksum: str
    """sha256 over names, dtypes, shapes and bytes in name order, hex."""
    size_bytes: int
    tensors: tuple[TensorInfo, ...]
    base_model: str
    """The model folder whose architecture (and, for an adapter, whose weights) this applies to."""
    lineage: int = 0
    """Versions count on in every lineage; a receiver goes back where the lineage is a later one."""
    adapter: AdapterInfo | None = None
    files: tuple[WeightFile, ...] = ()
    """The full set, then deltas: the last one leads here, each other one to the base of the one behind it."""

    @property
    def place(self) -> Place:
        return self.lineage, self.version


class Published(msgspec.Struct, frozen=True, tag="published"):
    """The weights of a step lie in files: they may be served.

    Steps whose weights nobody will be served (all but the last one of a replay) have none.
    """

    policy: str
    step: int
    manifest: Manifest
    seconds: float = 0.0
    """From the copy of the weights until their files were there."""


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights"):
    """Serve this version live: received in the background, swapped in between two steps."""

    manifest: Manifest
    sources: tuple[str, ...] = ()
    """Base URLs of servers that have its files, nearest first; :data:`CONTROL` is the one that the worker dials.

    () on the publisher's host, and where the weights are those of the model folder.
    """


class PinVersion(msgspec.Struct, frozen=True, tag="pin_version"):
    """Keep serving this version beside the live one until unpinned (evaluation)."""

    manifest: Manifest
    sources: tuple[str, ...] = ()
    """As of :class:`UpdateWeights`."""


class UnpinVersion(msgspec.Struct, frozen=True, tag="unpin_version"):
    policy: str
    version: int


class WeightsServed(msgspec.Struct, frozen=True, tag="weights_served"):
    """The engine now serves this: it computed the checksum over the bytes that it loaded, and it fits."""

    policy: str
    version: int
    checksum: str
    pinned: bool = False
    lineage: int = 0
    receive_s: float = 0.0
    """How long it took to pull; 0 where the file was here."""


class ReleaseVersion(msgspec.Struct, frozen=True, tag="release_version"):
    """No receiver needs this version any more: its file may be deleted, unless the trainer stands at it."""

    policy: str
    version: int
    checksum: str = ""
    """Of the file that is meant, where lineages share a number; "": all of them."""


class KeepVersions(msgspec.Struct, frozen=True, tag="keep_versions"):
    """Only the files of these weights, and of those that the trainer holds, may be needed: predecessors left others."""

    policy: str
    checksums: tuple[str, ...]
