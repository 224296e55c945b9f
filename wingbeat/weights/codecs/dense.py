"""Encodings for any dtype: the bytes as they are, and XOR with the base's, compressed."""

from __future__ import annotations

import numpy as np
import torch
import zstandard
from torch import Tensor

from wingbeat.weights.checksum import raw_bytes
from wingbeat.weights.codecs.container import damaged, unpack_zstd

ZSTD_LEVEL = 1


def to_bytes(tensor: Tensor) -> np.ndarray:
    """Row-major bytes [B] uint8 on the CPU; no copy is made where they are there already."""
    return np.frombuffer(raw_bytes(tensor), dtype=np.uint8)


def from_bytes(data: np.ndarray, *, like: Tensor) -> Tensor:
    """A tensor of the dtype, shape and device of ``like`` over writable bytes."""
    if not data.size:
        return torch.empty_like(like)
    return torch.from_numpy(data).view(like.dtype).reshape(like.shape).to(like.device)


def encode_raw(target: Tensor) -> bytes:
    return raw_bytes(target).tobytes()


def decode_raw(data: memoryview, *, base: Tensor) -> Tensor:
    if len(data) != base.nbytes:
        raise damaged(f"expected {base.nbytes} bytes of a tensor, got {len(data)}")
    return from_bytes(np.frombuffer(data, dtype=np.uint8).copy(), like=base)


def encode_xor(base: Tensor, target: Tensor) -> bytes:
    """XOR of the bytes, the least significant bytes of all elements first, by zstd.

    Small changes leave the upper bytes of a float as they are, and zstd finds runs of zeros better than
    zeros in every second place.
    """
    differing = to_bytes(base) ^ to_bytes(target)
    planes = np.ascontiguousarray(differing.reshape(-1, base.element_size()).T)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes.reshape(-1).data)


def decode_xor(data: memoryview, *, base: Tensor) -> Tensor:
    planes = np.frombuffer(unpack_zstd(data, max_bytes=base.nbytes), dtype=np.uint8)
    if planes.nbytes != base.nbytes:
        raise damaged(f"expected {base.nbytes} bytes of a tensor, got {planes.nbytes}")
    differing = planes.reshape(base.element_size(), -1).T.reshape(-1)
    return from_bytes(differing ^ to_bytes(base), like=base)
