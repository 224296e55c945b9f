"""Receiving a published policy version: map the file, then prove that it is what was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wingbeat.core.errors import SetupError, UnavailableError, VersionGone
from wingbeat.core.weight_protocol import Manifest
from wingbeat.weights.checksum import describe, differing, tensors_checksum


@dataclass(frozen=True, slots=True)
class Received:
    """A version's weights on this host, verified."""

    path: Path
    """The whole set, as safetensors."""
    tensors: Mapping[str, Tensor]
    """``path``, memory-mapped."""
    receive_s: float = 0.0
    """How long it took to pull; 0 where it was here."""


def receive(manifest: Manifest, *, host_id: str) -> Received:
    """The weights of a manifest, memory-mapped: pages are shared with every receiver on the host.

    They stay valid after the publisher releases the file.  Size, names, dtypes, shapes and the checksum
    of the mapped bytes are verified before anything is returned.

    Raises SetupError for a manifest of another host, VersionGone where the file was released, and
    UnavailableError where its content is not what the manifest promises.
    """
    if manifest.host_id != host_id:
        raise SetupError(
            f"tensors of another host cannot be mapped: policy {manifest.policy!r} version {manifest.version} was "
            f"published on host {manifest.host_id}, this is host {host_id}; no source was named that has its files"
        )
    return map_file(manifest, Path(manifest.path))


def map_file(manifest: Manifest, path: Path) -> Received:
    """As :func:`receive`, of the whole set at ``path``."""
    where = f"policy {manifest.policy!r} version {manifest.version} ({path})"
    try:
        size = path.stat().st_size
        if size != manifest.size_bytes:
            raise UnavailableError(
                f"{where}: expected {manifest.size_bytes} bytes, got {size}; the file is damaged, publish it again"
            )
        tensors = load_file(path)
    except FileNotFoundError:
        raise VersionGone(f"{where}: no such file, the version was released; load the live version") from None
    except SafetensorError as error:
        raise UnavailableError(f"{where}: not a safetensors file ({error}); publish it again") from error
    _verify(manifest, tensors, where=where)
    return Received(path, tensors)


def _verify(manifest: Manifest, tensors: dict[str, Tensor], *, where: str) -> None:
    found = describe(tensors)
    if names := differing(manifest.tensors, found):
        promised, got = ({info.name: info for info in infos}.get(names[0]) for infos in (manifest.tensors, found))
        raise UnavailableError(
            f"{where}: {len(names)} tensors differ from the manifest; {names[0]!r}: expected {promised}, got {got};"
            " publish it again"
        )
    checksum = tensors_checksum(tensors)
    if checksum != manifest.checksum:
        raise UnavailableError(
            f"{where}: expected checksum {manifest.checksum}, got {checksum}; the file is damaged, publish it again"
        )
