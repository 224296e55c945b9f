"""A delta between two versions of a set of tensors: the cheapest encoding of each, in one verified file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wingbeat.core.errors import UnavailableError
from wingbeat.weights.checksum import describe, differing, tensors_checksum
from wingbeat.weights.codecs import sparse
from wingbeat.weights.codecs.container import Container, Encoding, damaged, read_container, write_container
from wingbeat.weights.codecs.dense import decode_raw, decode_xor, encode_raw, encode_xor

_CLEARLY_SPARSE = 0.25
"""Of a tensor's bytes: an encoding that needs no more is taken without trying denser ones."""


def encode_delta(
    base: Mapping[str, Tensor], target: Mapping[str, Tensor], *, base_checksum: str, target_checksum: str
) -> bytearray:
    """What turns ``base`` into ``target``, bit for bit.

    A tensor is encoded where its target is, on the GPU if that is there; its base is brought there.

    Raises ValueError where names, dtypes or shapes differ: such versions have no delta.
    """
    infos = describe(target)
    _require_alike(base, target)
    piece = min((sparse.best_piece(tensor.device) for tensor in target.values()), default=1)
    parts = [_encode(base[info.name], target[info.name], piece=piece) for info in infos]
    return write_container(infos, parts, base_checksum=base_checksum, target_checksum=target_checksum, piece=piece)


def decode_delta(data: memoryview | bytes | bytearray, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The target's tensors, on the base's devices; those that did not change are the base's own.

    Their checksum is computed anew and is the one that the delta promises.

    Raises UnavailableError where the delta is torn, damaged, or belongs to another base.
    """
    container = read_container(memoryview(data))
    header = container.header
    names = differing(describe(base), (entry.info for entry in header.entries))
    if names or len(header.entries) != len(base):
        raise damaged(f"it belongs to another base: {len(names)} tensors differ, {names[:3]} among them")
    try:
        target = _decode_all(container, base)
        checksum = tensors_checksum(target)
        if checksum != header.target_checksum:
            raise damaged(f"it promises checksum {header.target_checksum} and makes {checksum}")
    except UnavailableError as error:
        ours = tensors_checksum(base)
        if ours != header.base_checksum:
            raise damaged(f"it belongs to another base: expected {header.base_checksum}, got {ours}") from error
        raise
    return target


def _decode_all(container: Container, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    piece = container.header.piece
    return {
        entry.name: _decode(entry.encoding, part, base[entry.name], piece=piece) for entry, part in container.parts()
    }


def _require_alike(base: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    if names := differing(describe(base), describe(target)):
        raise ValueError(
            f"a delta needs tensors of the same names, dtypes and shapes: {len(names)} differ, "
            f"{names[:3]} among them; publish the full version"
        )


def _encode(base: Tensor, target: Tensor, *, piece: int) -> tuple[Encoding, Sequence[bytes]]:
    base = base.to(target.device)
    if _is_same(base, target):
        return "same", ()
    if base.dtype in sparse.DTYPES:
        chunks = sparse.encode_sparse(base, target, piece=piece)
        if sum(map(len, chunks)) <= _CLEARLY_SPARSE * base.nbytes:
            return "sparse", chunks
        candidates: list[tuple[Encoding, Sequence[bytes]]] = [("sparse", chunks)]
    else:
        candidates = []
    candidates.append(("xor", (encode_xor(base, target),)))
    best = min(candidates, key=lambda candidate: sum(map(len, candidate[1])))
    return best if sum(map(len, best[1])) < target.nbytes else ("raw", (encode_raw(target),))


def _is_same(base: Tensor, target: Tensor) -> bool:
    """Bit for bit: NaN equals NaN, and -0 differs from 0."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[base.element_size()]
    ours, theirs = (tensor.detach().contiguous().reshape(-1).view(whole) for tensor in (base, target))
    return torch.equal(ours, theirs)


def _decode(encoding: Encoding, data: memoryview, base: Tensor, *, piece: int) -> Tensor:
    if encoding == "same":
        if len(data):
            raise damaged(f"an unchanged tensor has {len(data)} bytes")
        return base
    if encoding == "raw":
        return decode_raw(data, base=base)
    if encoding == "xor":
        return decode_xor(data, base=base)
    return sparse.decode_sparse(data, base=base, piece=piece)
