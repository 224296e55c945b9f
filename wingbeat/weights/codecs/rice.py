"""Rice coding of small integers whose size drifts: every block of 64 has the parameter that makes it shortest.

A value ``v`` of a block with parameter ``k`` is ``v >> k`` in unary (zeros, then a one) and its lowest ``k``
bits.  The unary codes of all values are one stream of bits, and each bit place of the remainders is another,
so that all values are coded and read at once.

Source: Rice, "Some Practical Universal Noiseless Coding Techniques", JPL 79-22, 1979.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.weights.codecs.bits import Chunk, pack_bits, true_positions, unpack_bits
from wingbeat.weights.codecs.container import Reader, damaged, varint

BLOCK = 64
_PARAMETER_BITS = 5
_FEW = 2**13
"""So many values are coded by the CPU before a GPU has been told what to do."""


def pack(values: Tensor) -> list[Chunk]:
    """Code [N] int64 of 0 to 2³⁰; N is for the reader to know.

    Layout: the parameters in 5 bit planes, the length of the unary stream in bytes (varint), that stream, then
    the remainders' bit planes, the lowest first, each of those blocks whose parameter has that place.
    """
    count = values.numel()
    if not count:
        return []
    if count <= _FEW:
        values = values.cpu()
    padding = -count % BLOCK
    blocks = torch.nn.functional.pad(values, (0, padding)).reshape(-1, BLOCK)
    parameters_there = _shortest(blocks, padding=padding)
    parameters = parameters_there.cpu()
    chunks = [pack_bits((parameters >> place & 1).bool()) for place in range(_PARAMETER_BITS)]
    quotients = (blocks >> parameters_there.unsqueeze(1)).reshape(-1)[:count]
    ends = torch.cumsum(quotients + 1, dim=0) - 1
    bits = int(ends[-1]) + 1
    unary = torch.zeros(bits, dtype=torch.bool, device=values.device)
    unary[ends] = True
    chunks += [varint(-(-bits // 8)), pack_bits(unary)]
    lowest, highest = int(parameters.min()), int(parameters.max())
    for place in range(highest):
        rows = blocks
        if place >= lowest:
            rows = blocks.index_select(0, torch.nonzero(parameters > place).reshape(-1).to(blocks.device))
        is_last_in = int(parameters[-1]) > place
        plane = (rows >> place & 1).bool().reshape(-1)
        chunks.append(pack_bits(plane[: plane.numel() - padding] if is_last_in else plane))
    return chunks


def unpack(reader: Reader, *, count: int, limit: int, device: torch.device) -> Tensor:
    """Read ``count`` values, [count] int64, none over ``limit``.  Raises UnavailableError for damaged data."""
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=device)
    num_blocks = -(-count // BLOCK)
    parameters = torch.zeros(num_blocks, dtype=torch.int64, device=device)
    for place in range(_PARAMETER_BITS):
        parameters |= _plane(reader, num_blocks, device=device).long() << place
    size = reader.varint(limit=reader.left)
    ends = true_positions(unpack_bits(reader.take(size), device=device))
    if ends.numel() != count or int(ends[-1]) // 8 != size - 1:
        raise damaged(f"expected {count} values, got {ends.numel()}")
    quotients = torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1
    by_value = parameters.repeat_interleave(BLOCK)[:count]
    if bool((quotients > limit >> by_value).any()):
        raise damaged(f"expected values of at most {limit}")
    values = torch.nn.functional.pad(quotients << by_value, (0, -count % BLOCK)).reshape(-1, BLOCK)
    in_last = count - (num_blocks - 1) * BLOCK
    for place in range(int(parameters.max())):
        chosen = torch.nonzero(parameters > place).reshape(-1)
        is_last_in = int(chosen[-1]) == num_blocks - 1
        bits = chosen.numel() * BLOCK - (BLOCK - in_last if is_last_in else 0)
        plane = torch.nn.functional.pad(_plane(reader, bits, device=device), (0, -bits % BLOCK))
        remainders = plane.long().reshape(-1, BLOCK) << place
        if chosen.numel() == num_blocks:
            values |= remainders
        else:
            values[chosen] |= remainders
    values = values.reshape(-1)[:count]
    if bool((values > limit).any()):
        raise damaged(f"expected values of at most {limit}")
    return values


def _plane(reader: Reader, count: int, *, device: torch.device) -> Tensor:
    """One bit of each of ``count`` things, bool [count]."""
    bits = unpack_bits(reader.take(-(-count // 8)), device=device)
    if bool(bits[count:].any()):
        raise damaged("bits are set after the last value")
    return bits[:count]


def _shortest(blocks: Tensor, *, padding: int) -> Tensor:
    """The parameter of each block [B, 64] that makes it shortest among four near its mean, [B] int64.

    For values that fall off geometrically the best is near ``log2(0.69 · mean)``, for clustered ones below it.
    """
    lengths = torch.full((blocks.shape[0],), BLOCK, device=blocks.device)
    lengths[-1] -= padding
    scaled = torch.div(blocks.sum(dim=1) * 11, lengths * 16, rounding_mode="floor")
    near = torch.frexp(scaled.float()).exponent.long() - 1  # floor(log2), -1 for 0
    candidates = (near + torch.arange(-2, 2, device=blocks.device).unsqueeze(1)).clamp(min=0)
    unary = torch.stack([(blocks >> candidate.unsqueeze(1)).sum(dim=1) for candidate in candidates])
    costs = unary + candidates * lengths
    return candidates.gather(0, costs.argmin(dim=0, keepdim=True)).squeeze(0)
