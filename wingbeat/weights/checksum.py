"""One checksum for a set of named tensors, so that sampler and trainer can prove that they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from wingbeat.core.weight_protocol import TensorInfo

SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that may be published, with the names that the safetensors format gives them."""


def describe(tensors: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """Name, dtype and shape of every tensor, in name order.  Raises ValueError on an unpublishable dtype."""
    infos: list[TensorInfo] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
        if dtype is None:
            known = ", ".join(SAFETENSORS_DTYPES.values())
            raise ValueError(f"tensor {name!r}: expected one of {known}, got {tensor.dtype}; convert it first")
        infos.append(TensorInfo(name=name, dtype=dtype, shape=tuple(tensor.shape)))
    return tuple(infos)


def differing(ours: Iterable[TensorInfo], theirs: Iterable[TensorInfo]) -> list[str]:
    """Names of the tensors that only one side has, or has with this dtype and shape, in order."""
    return sorted({info.name for info in set(ours) ^ set(theirs)})


def tensors_checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes in name order, hex.

    Each tensor contributes the line ``name dtype d0,d1,…`` and then its row-major little-endian bytes.
    """
    digest = hashlib.sha256()
    for info in describe(tensors):
        digest.update(f"{info.name} {info.dtype} {','.join(map(str, info.shape))}\n".encode())
        digest.update(raw_bytes(tensors[info.name]))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The row-major bytes of a tensor; no copy is made if it is contiguous on the CPU already."""
    if not tensor.numel():  # whose strides may be anything
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
