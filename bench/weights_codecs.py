"""Two versions of a set of tensors through four encoders: bytes, seconds of CPU, and whether ours is exact.

full    all bytes
u32     a 32-bit place and the value for each element that changed, as sparse updates are usually sent
xor     XOR of the bytes and zstd at level 1, each tensor by itself
ours    ``wingbeat.weights.codecs``: the whole file, with its header and checksums
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import zstandard
from torch import Tensor

from wingbeat.weights.checksum import raw_bytes, tensors_checksum
from wingbeat.weights.codecs import decode_delta, encode_delta

Result = TypeVar("Result")
MB = 1e6


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one or several updates; sizes in bytes."""

    full: int = 0
    u32: int = 0
    xor: int = 0
    ours: int = 0
    changed: int = 0
    elements: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    """The checksum of the result included."""
    xor_encode_s: float = 0.0
    exact: bool = True

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            *(getattr(self, name) + getattr(other, name) for name in Measured.__slots__ if name != "exact"),
            exact=self.exact and other.exact,
        )

    def report(self) -> dict[str, Any]:
        return {
            "density": round(self.changed / self.elements, 6),
            "full_bytes": self.full,
            "u32_bytes": self.u32,
            "xor_bytes": self.xor,
            "ours_bytes": self.ours,
            "ratio_vs_full": round(self.full / self.ours, 2),
            "ratio_vs_u32": round(self.u32 / self.ours, 3),
            "ratio_vs_xor": round(self.xor / self.ours, 3),
            "encode_mb_s": round(self.full / self.encode_s / MB, 1),
            "decode_mb_s": round(self.full / self.decode_s / MB, 1),
            "xor_encode_mb_s": round(self.full / self.xor_encode_s / MB, 1),
            "exact": self.exact,
        }


def measure(base: Mapping[str, Tensor], target: Mapping[str, Tensor], *, repeats: int = 1) -> Measured:
    """Both versions lie in memory; of each time the least of ``repeats`` counts."""
    checksums = {"base_checksum": tensors_checksum(base), "target_checksum": tensors_checksum(target)}
    encode_s, data = _least(lambda: encode_delta(base, target, **checksums), repeats=repeats)
    decode_s, decoded = _least(lambda: decode_delta(data, base), repeats=repeats)
    xor_encode_s, xor = _least(lambda: sum(_xor_bytes(base[name], target[name]) for name in base), repeats=repeats)
    changed = {name: _num_changed(base[name], target[name]) for name in base}
    return Measured(
        full=sum(tensor.nbytes for tensor in target.values()),
        u32=sum(count * (4 + target[name].element_size()) for name, count in changed.items()),
        xor=xor,
        ours=len(data),
        changed=sum(changed.values()),
        elements=sum(tensor.numel() for tensor in target.values()),
        encode_s=encode_s,
        decode_s=decode_s,
        xor_encode_s=xor_encode_s,
        exact=all(raw_bytes(decoded[name]) == raw_bytes(target[name]) for name in target),
    )


def _least(work: Callable[[], Result], *, repeats: int) -> tuple[float, Result]:
    """CPU seconds of the fastest call, and what the last one gave."""
    least = float("inf")
    for _ in range(max(1, repeats) - 1):
        least = min(least, _timed(work)[0])
    taken, result = _timed(work)
    return min(least, taken), result


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def _xor_bytes(base: Tensor, target: Tensor) -> int:
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (base, target))
    return len(zstandard.ZstdCompressor(level=1).compress((ours ^ theirs).numpy().data))


def _num_changed(base: Tensor, target: Tensor) -> int:
    size = base.element_size()
    ours, theirs = (tensor.contiguous().reshape(-1).view(torch.uint8).reshape(-1, size) for tensor in (base, target))
    return int((ours != theirs).any(dim=1).sum())
