"""The few operations whose fastest form differs by device: numpy on the CPU, torch elsewhere, with equal results.

What is packed on a device stays there until :func:`collect` fetches everything at once: a device works ahead of the
CPU as long as nobody asks it for a result.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor

_NUM_KEYS = 256
Chunk = bytes | Tensor
"""Bytes, or uint8 [B] on a device."""


def stable_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sort [N] uint8 keys, equal ones in the order in which they stand.

    Returns the order [N] int64, and where in it each key begins, [257] int64 (the last is N).
    """
    if keys.device.type != "cpu":
        return stable_order_on_device(keys)
    array = keys.numpy()
    order = np.argsort(array, kind="stable")  # a radix sort
    starts = np.searchsorted(array, np.arange(_NUM_KEYS, dtype=np.uint8), sorter=order)
    return torch.from_numpy(order), torch.from_numpy(np.append(starts, array.size))


def stable_order_on_device(keys: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`stable_order` in torch."""
    sorted_keys, order = torch.sort(keys, stable=True)
    bounds = torch.arange(_NUM_KEYS, dtype=torch.uint8, device=keys.device)
    starts = torch.searchsorted(sorted_keys, bounds)
    return order, torch.nn.functional.pad(starts, (0, 1), value=keys.numel())


def true_positions(mask: Tensor) -> Tensor:
    """Where a bool tensor [N] holds, ascending, int64."""
    if mask.device.type != "cpu":
        return torch.nonzero(mask).reshape(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def pack_bits(bits: Tensor) -> Chunk:
    """Eight of bool [N] to a byte, the first in the lowest bit; the last byte is filled with zeros."""
    if bits.device.type != "cpu":
        return pack_bits_on_device(bits)
    return np.packbits(bits.numpy(), bitorder="little").tobytes()


def pack_bits_on_device(bits: Tensor) -> Tensor:
    """:func:`pack_bits` in torch."""
    padded = torch.nn.functional.pad(bits.view(torch.uint8), (0, -bits.numel() % 8)).reshape(-1, 8)
    return (padded << _places(bits.device)).sum(dim=1, dtype=torch.uint8)


def collect(chunks: Iterable[Chunk]) -> list[bytes]:
    """The bytes of all, fetched from their device in one copy."""
    all_chunks = list(chunks)
    there = [chunk for chunk in all_chunks if isinstance(chunk, Tensor)]
    if not there:
        return [chunk for chunk in all_chunks if isinstance(chunk, bytes)]
    fetched = torch.cat(there).cpu().numpy().tobytes()
    found: list[bytes] = []
    start = 0
    for chunk in all_chunks:
        if isinstance(chunk, bytes):
            found.append(chunk)
        else:
            found.append(fetched[start : start + chunk.numel()])
            start += chunk.numel()
    return found


def unpack_bits(data: memoryview, *, device: torch.device) -> Tensor:
    """Bool [8 · bytes], the inverse of :func:`pack_bits`."""
    if device.type != "cpu":
        return unpack_bits_on_device(data, device=device)
    return torch.from_numpy(np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").view(np.bool_))


def unpack_bits_on_device(data: memoryview, *, device: torch.device) -> Tensor:
    """:func:`unpack_bits` in torch."""
    packed = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(device)
    return ((packed.unsqueeze(1) >> _places(device)) & 1).bool().reshape(-1)


@cache
def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
