"""Our encoding of 16-bit floats of which few changed: who moved, told by exponent, and by how many ULPs.

An optimiser's step is of nearly one size for all weights of a tensor, but one unit in the last place (ULP) of
a bfloat16 is 2⁻⁷ of the weight's own power of two.  So small weights move often and large ones seldom, and
nearly all by one ULP.  Both sides know the old exponents: positions are counted among the elements of one
exponent, whose gaps Rice codes fit well, and steps are a direction, and a length for the few that moved further.

All of it is exact for every bit pattern: without the sign, 16-bit patterns are consecutive integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from torch import Tensor

from wingbeat.weights.codecs import rice
from wingbeat.weights.codecs.bits import Chunk, collect, pack_bits, stable_order, true_positions, unpack_bits
from wingbeat.weights.codecs.container import Reader, damaged, unpack_zstd, varint
from wingbeat.weights.codecs.dense import ZSTD_LEVEL

MAX_PIECE = 2**24
"""Elements that are coded together at most, which bounds the memory that this needs to half a gigabyte."""
_CPU_PIECE = 2**20
"""What the order of a piece needs (8 bytes per element) stays in the cache."""
_EXPONENT_SHIFT = {torch.bfloat16: 7, torch.float16: 10}
_EXPONENT_MASK = {torch.bfloat16: 0xFF, torch.float16: 0x1F}
DTYPES = frozenset(_EXPONENT_SHIFT)
_SIGN, _MAX_SIZE = -(2**15), 2**15 - 1
_UNCHANGED, _CHANGED = 0, 1
_RICE, _ZSTD = 0, 1


@dataclass(frozen=True, slots=True)
class _Order:
    """The elements of a piece by exponent."""

    positions: Tensor
    """Where the i-th element of this order is in the piece, [N] int64."""
    starts: Tensor
    """Where each exponent begins in this order, [257] int64 on the CPU."""


def best_piece(device: torch.device) -> int:
    """Elements to code together: what fits a CPU's cache, or what keeps a GPU busy."""
    return _CPU_PIECE if device.type == "cpu" else MAX_PIECE


def encode_sparse(base: Tensor, target: Tensor, *, piece: int) -> list[bytes]:
    """Code what differs between two tensors of one shape and one of ``DTYPES``, ``piece`` elements at a time."""
    return collect(
        chunk
        for old, new in zip(_patterns_of(base).split(piece), _patterns_of(target).split(piece), strict=True)
        for chunk in _encode_piece(old, new, dtype=base.dtype)
    )


def decode_sparse(data: memoryview, *, base: Tensor, piece: int) -> Tensor:
    """The target, in memory of its own.  Raises UnavailableError for damaged data."""
    if base.dtype not in DTYPES:
        raise damaged(f"a tensor of {base.dtype} cannot be sparse")
    if not 0 < piece <= MAX_PIECE:
        raise damaged(f"expected pieces of 1 to {MAX_PIECE} elements, got {piece}")
    reader = Reader(data)
    target = base.detach().clone(memory_format=torch.contiguous_format)
    for patterns in _patterns_of(target).split(piece):
        _decode_piece(reader, patterns, dtype=base.dtype)
    if reader.left:
        raise damaged(f"{reader.left} bytes follow the last element of a tensor")
    return target


def _patterns_of(tensor: Tensor) -> Tensor:
    """The bit patterns [N] int16 of a tensor; it shares the memory of a contiguous one."""
    return tensor.detach().contiguous().reshape(-1).view(torch.int16)


def _encode_piece(old: Tensor, new: Tensor, *, dtype: torch.dtype) -> Iterator[Chunk]:
    if torch.equal(old, new):
        yield bytes([_UNCHANGED])
        return
    order = _by_exponent(old, dtype=dtype)
    moved = (old != new).index_select(0, order.positions)
    places = true_positions(moved)
    yield bytes([_CHANGED])
    yield from _encode_places(moved, places, starts=order.starts)
    positions = order.positions.index_select(0, places)
    yield from _encode_steps(old.index_select(0, positions), new.index_select(0, positions))


def _decode_piece(reader: Reader, piece: Tensor, *, dtype: torch.dtype) -> None:
    """Turn the base's patterns into the target's."""
    kind = reader.byte()
    if kind == _UNCHANGED:
        return
    if kind != _CHANGED:
        raise damaged(f"expected 0 or 1 at the begin of a piece, got {kind}")
    order = _by_exponent(piece, dtype=dtype)
    places = _decode_places(reader, starts=order.starts, device=piece.device)
    positions = order.positions.index_select(0, places)
    piece[positions] = _decode_steps(reader, piece.index_select(0, positions))


def _by_exponent(patterns: Tensor, *, dtype: torch.dtype) -> _Order:
    exponents = (patterns >> _EXPONENT_SHIFT[dtype]).to(torch.uint8)  # the sign falls off above, or is masked
    if _EXPONENT_MASK[dtype] != 0xFF:
        exponents &= _EXPONENT_MASK[dtype]
    positions, starts = stable_order(exponents)
    return _Order(positions, starts.cpu())


def _encode_places(moved: Tensor, places: Tensor, *, starts: Tensor) -> Iterator[Chunk]:
    """Who moved: ``moved`` [N] bool, used up here, is in the order of exponents, ``places`` [K] where it holds.

    Layout: the first and the last exponent of which anything moved (a byte each); for each from the first to
    the last, how many are listed, doubled, plus 1 where those that did *not* move are listed (Rice); the gaps
    before each that is listed, counted within its exponent (Rice).
    """
    counts = torch.searchsorted(places, starts.to(places.device)).diff().cpu()
    present = torch.nonzero(counts).reshape(-1)
    first, last = int(present[0]), int(present[-1])
    sizes = starts.diff()
    inverted = counts * 2 > sizes
    if bool(inverted.any()):
        for exponent in torch.nonzero(inverted).reshape(-1).tolist():
            moved[starts[exponent] : starts[exponent + 1]].logical_not_()
        places = true_positions(moved)
        counts = torch.where(inverted, sizes - counts, counts)
    yield bytes([first, last])
    yield from rice.pack((counts * 2 + inverted)[first : last + 1])
    gaps = _gaps(places)
    begins = (torch.cumsum(counts, dim=0) - counts)[counts > 0].to(places.device)
    gaps[begins] = places[begins] - starts[:-1][counts > 0].to(places.device)
    yield from rice.pack(gaps)


def _decode_places(reader: Reader, *, starts: Tensor, device: torch.device) -> Tensor:
    """The inverse of :func:`_encode_places`, [K] int64 ascending."""
    first, last = reader.byte(), reader.byte()
    if first > last:
        raise damaged(f"expected exponents in order, got {first} before {last}")
    sizes = starts.diff()
    coded = rice.unpack(reader, count=last - first + 1, limit=2 * int(sizes.max()) + 1, device=torch.device("cpu"))
    counts, inverted = torch.zeros_like(sizes), torch.zeros_like(sizes)
    counts[first : last + 1], inverted[first : last + 1] = coded >> 1, coded & 1
    if bool((counts > sizes).any()):
        raise damaged("more elements of an exponent are listed than the base has; it may be another base")
    total = int(counts.sum())
    gaps = rice.unpack(reader, count=total, limit=int(sizes.max()), device=device)
    ends = torch.cumsum(gaps + 1, dim=0)
    is_used = counts > 0
    used, begins = counts[is_used], (torch.cumsum(counts, dim=0) - counts)[is_used]
    before = torch.nn.functional.pad(ends, (1, 0))[begins.to(device)].cpu()
    shifts = (starts[:-1][is_used] - before).to(device)
    places = ends - 1 + shifts.repeat_interleave(used.to(device))
    lasts = places[(begins + used - 1).to(device)].cpu()
    if bool((lasts >= starts[1:][is_used]).any()):
        raise damaged("an element is listed beyond the last of its exponent; it may be another base")
    if not bool(inverted.any()):
        return places
    moved = torch.zeros(int(starts[-1]), dtype=torch.bool, device=device)
    moved[places] = True
    for exponent in torch.nonzero(inverted).reshape(-1).tolist():
        moved[starts[exponent] : starts[exponent + 1]].logical_not_()
    return true_positions(moved)


def _encode_steps(old: Tensor, new: Tensor) -> Iterator[Chunk]:
    """How each pattern [K] moved: the size in ULPs, and whether the sign changed too.

    A weight that is smaller than a step goes through zero; its sign apart, it still moves little.

    Layout: a bit for each that became smaller; the places of those that changed sign; the places, among these, of
    those that kept their size; the places of those whose size changed by more than 1 ULP; by how much more than 2.
    """
    steps = _sizes(new) - _sizes(old)
    lengths = steps.abs()
    yield pack_bits(steps < 0)
    flips = (old ^ new) < 0
    yield from _encode_list(flips)
    yield from _encode_list(lengths.index_select(0, true_positions(flips)) == 0)
    longer = lengths > 1
    yield from _encode_list(longer)
    yield from _encode_lengths(lengths.index_select(0, true_positions(longer)) - 2)


def _decode_steps(reader: Reader, old: Tensor) -> Tensor:
    """The new patterns [K] int16 of :func:`_encode_steps`."""
    count, device = old.numel(), old.device
    smaller = unpack_bits(reader.take(-(-count // 8)), device=device)[:count]
    flips = _decode_list(reader, among=count, device=device)
    only_flipped = flips.index_select(0, _decode_list(reader, among=flips.numel(), device=device))
    longer = _decode_list(reader, among=count, device=device)
    lengths = torch.ones(count, dtype=torch.int64, device=device)
    lengths[only_flipped] = 0
    lengths[longer] = _decode_lengths(reader, count=longer.numel(), device=device) + 2
    sizes = _sizes(old) + torch.where(smaller, -lengths, lengths)
    if bool(((sizes < 0) | (sizes > _MAX_SIZE)).any()):
        raise damaged("a step leads out of the 16-bit patterns; it may be of another base")
    signs = old & _SIGN
    signs[flips] ^= _SIGN
    return sizes.to(torch.int16) | signs


def _encode_list(chosen: Tensor) -> Iterator[Chunk]:
    """Which of [K] bool hold.

    Layout: how many are listed, doubled, plus 1 where the others are listed (varint); the gap before each (Rice).
    """
    places = true_positions(chosen)
    inverted = places.numel() * 2 > chosen.numel()
    if inverted:
        places = true_positions(~chosen)
    yield varint(places.numel() * 2 + inverted)
    yield from rice.pack(_gaps(places))


def _decode_list(reader: Reader, *, among: int, device: torch.device) -> Tensor:
    """The places of those that hold, ascending, all below ``among``."""
    count, inverted = divmod(reader.varint(limit=2 * among + 1), 2)
    places = torch.cumsum(rice.unpack(reader, count=count, limit=among, device=device) + 1, dim=0) - 1
    if count and int(places[-1]) >= among:
        raise damaged("a place lies beyond the last")
    if not inverted:
        return places
    chosen = torch.ones(among, dtype=torch.bool, device=device)
    chosen[places] = False
    return true_positions(chosen)


def _encode_lengths(lengths: Tensor) -> Iterator[Chunk]:
    """Numbers [L] int64 of less than 2¹⁵, by Rice codes, or by zstd where one length is more usual than its neighbours.

    Layout, unless there are none: 0 and the Rice array; or 1, the size of a zstd frame (varint) and the frame, in it
    the lower bytes of all, then the upper bytes of all.
    """
    if not lengths.numel():
        return
    chunks = rice.pack(lengths)
    rice_size = sum(len(chunk) for chunk in chunks)
    pairs = lengths.to(torch.int16).cpu().numpy().view(np.uint8).reshape(-1, 2)
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(np.ascontiguousarray(pairs.T).reshape(-1).data)
    if len(frame) < rice_size:
        chunks = [varint(len(frame)), frame]
        yield bytes([_ZSTD])
    else:
        yield bytes([_RICE])
    yield from chunks


def _decode_lengths(reader: Reader, *, count: int, device: torch.device) -> Tensor:
    """The inverse of :func:`_encode_lengths`."""
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=device)
    kind = reader.byte()
    if kind == _RICE:
        return rice.unpack(reader, count=count, limit=_MAX_SIZE, device=device)
    if kind != _ZSTD:
        raise damaged(f"expected 0 or 1 before the lengths, got {kind}")
    planes = unpack_zstd(reader.take(reader.varint(limit=reader.left)), max_bytes=2 * count)
    if len(planes) != 2 * count:
        raise damaged(f"expected {count} lengths, got {len(planes) / 2:g}")
    lower, upper = np.frombuffer(planes, dtype=np.uint8).reshape(2, count).astype(np.int64)
    return torch.from_numpy(lower | upper << 8).to(device)


def _gaps(places: Tensor) -> Tensor:
    return torch.diff(places, prepend=places.new_full((1,), -1)) - 1


def _sizes(patterns: Tensor) -> Tensor:
    """The patterns without their sign, int64: integers in the order of the absolute values."""
    return (patterns & _MAX_SIZE).long()
