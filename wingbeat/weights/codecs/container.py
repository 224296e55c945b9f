"""The file around an encoded delta: a header that proves itself, then one run of bytes per tensor.

Nothing in it is trusted before its checksum matches, and no length in it is followed beyond the data's end.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import zstandard

from wingbeat.core.errors import UnavailableError
from wingbeat.core.weight_protocol import TensorInfo

MAGIC = b"WBDELTA\0"
FORMAT = 1
_FIXED = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_HEADER_START = _FIXED.size + _DIGEST_BYTES
_MAX_HEADER_BYTES = 2**26
"""Unpacked; a hundred thousand tensors need a tenth of it."""

Encoding = Literal["same", "raw", "xor", "sparse"]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """How one tensor is encoded; its bytes follow those of the entry before."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    size_bytes: int

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(name=self.name, dtype=self.dtype, shape=self.shape)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Packed by msgpack as an array in this order, then by zstd."""

    base_checksum: str
    target_checksum: str
    payload_sha256: bytes
    piece: int
    """Elements that sparse tensors code together."""
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Container:
    """A delta whose checksums matched."""

    header: Header
    payload: memoryview

    def parts(self) -> Iterator[tuple[Entry, memoryview]]:
        """Every tensor's entry with its bytes."""
        start = 0
        for entry in self.header.entries:
            yield entry, self.payload[start : start + entry.size_bytes]
            start += entry.size_bytes


def damaged(what: str) -> UnavailableError:
    """The one error of everything that can be wrong with a delta's bytes."""
    return UnavailableError(f"this delta of weights cannot be used: {what}; fetch it again, or load the full version")


def write_container(
    infos: Sequence[TensorInfo],
    parts: Sequence[tuple[Encoding, Sequence[bytes]]],
    *,
    base_checksum: str,
    target_checksum: str,
    piece: int,
) -> bytearray:
    """One file of the encoded tensors, ``parts[i]`` being those of ``infos[i]``."""
    digest = hashlib.sha256()
    for _, chunks in parts:
        for chunk in chunks:
            digest.update(chunk)
    entries = tuple(
        Entry(info.name, info.dtype, info.shape, encoding, sum(map(len, chunks)))
        for info, (encoding, chunks) in zip(infos, parts, strict=True)
    )
    header = msgspec.msgpack.encode(Header(base_checksum, target_checksum, digest.digest(), piece, entries))
    packed = zstandard.ZstdCompressor(level=19).compress(header)
    fixed = _FIXED.pack(MAGIC, FORMAT, len(packed))
    data = bytearray(fixed)
    data += hashlib.sha256(fixed + packed).digest()
    data += packed
    for _, chunks in parts:
        for chunk in chunks:
            data += chunk
    return data


def read_header(data: memoryview) -> tuple[Header, int]:
    """The header, and where the payload begins; ``data`` may end anywhere after the header.

    Raises UnavailableError for anything else than an intact header of this format.
    """
    if len(data) < _HEADER_START:
        raise damaged(f"expected at least {_HEADER_START} bytes, got {len(data)}")
    magic, number, size = _FIXED.unpack(data[: _FIXED.size])
    if magic != MAGIC:
        raise damaged(f"expected it to begin with {MAGIC!r}, got {magic!r}")
    if number != FORMAT:
        raise damaged(f"expected format {FORMAT}, got {number}")
    packed = data[_HEADER_START : _HEADER_START + size]
    if len(packed) < size:
        raise damaged(f"expected a header of {size} bytes, got {len(packed)}")
    if hashlib.sha256(bytes(data[: _FIXED.size]) + packed).digest() != data[_FIXED.size : _HEADER_START]:
        raise damaged("the header's checksum differs")
    try:
        header = msgspec.msgpack.decode(unpack_zstd(packed, max_bytes=_MAX_HEADER_BYTES), type=Header)
    except msgspec.DecodeError as error:  # also a ValidationError
        raise damaged(f"its header is not one of format {FORMAT}: {error}") from error
    if any(entry.size_bytes < 0 for entry in header.entries):
        raise damaged("it has a tensor of negative size")
    return header, _HEADER_START + size


def read_container(data: memoryview) -> Container:
    """A whole delta.  Raises UnavailableError unless all checksums match."""
    header, start = read_header(data)
    payload = data[start:]
    expected = sum(entry.size_bytes for entry in header.entries)
    if len(payload) != expected:
        raise damaged(f"expected {expected} bytes of tensors, got {len(payload)}")
    if hashlib.sha256(payload).digest() != header.payload_sha256:
        raise damaged("its checksum differs")
    return Container(header, payload)


def delta_base(data: memoryview | bytes) -> str:
    """The checksum of the version that a delta applies to.

    The first part of a delta will do, as long as its header is in it; only the header is verified.
    Raises UnavailableError where it is damaged, too short, or no delta.
    """
    return read_header(memoryview(data))[0].base_checksum


def unpack_zstd(data: memoryview | bytes, *, max_bytes: int) -> bytes:
    """One zstd frame that states its size.  Raises UnavailableError where that exceeds ``max_bytes``."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise damaged(f"expected at most {max_bytes} bytes after decompression, got {size}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise damaged(f"zstd: {error}") from error


class Reader:
    """Reads a tensor's bytes from the front; nothing that it returns reaches beyond them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise damaged(f"a tensor's data ends {size - self.left} bytes early")
        self._at += size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, *, limit: int) -> int:
        """An unsigned LEB128 integer, at most ``limit``."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if value > limit:
                raise damaged(f"expected a count of at most {limit}, got {value}")
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise damaged("a count has more than 64 bits")


def varint(value: int) -> bytes:
    """What :meth:`Reader.varint` reads."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
