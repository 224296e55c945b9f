"""Which tokens could have been drawn: the support of a truncated or grammar-masked distribution, as bytes.

A token sampled under top-p, top-k or a grammar has the logprob of a distribution over some of the
vocabulary.  Whoever recomputes that logprob must renormalise over the same tokens, so the set travels
with the token, from the engine through the ledger to the trainer.  An empty blob means all of the
vocabulary.

    b"\\x01" + int32 ids, ascending        few tokens
    b"\\x00" + zlib(bitset)                 many
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

ROOM = 2**16
"""Bytes beyond those of the vocabulary that a bitset may have: engines may count padding tokens."""
WHOLE_VOCABULARY = b""
_BITSET = 0
_IDS = 1
_ID_DTYPE = np.dtype("<i4")


def encode_support(allowed_V: NDArray[np.bool_]) -> bytes:
    """The shorter of both forms; ``WHOLE_VOCABULARY`` where every token is allowed.

    Raises ValueError where no token is.
    """
    ids = np.flatnonzero(allowed_V)
    if not ids.size:
        raise ValueError("a support needs at least one token")
    if ids.size == allowed_V.size:
        return WHOLE_VOCABULARY
    if ids.size <= 32:
        return bytes((_IDS,)) + ids.astype(_ID_DTYPE).tobytes()
    bitset = bytes((_BITSET,)) + zlib.compress(np.packbits(allowed_V).tobytes(), 1)
    listed = 1 + ids.size * _ID_DTYPE.itemsize
    return bitset if len(bitset) <= listed else bytes((_IDS,)) + ids.astype(_ID_DTYPE).tobytes()


def listed_support(blob: bytes, *, vocabulary: int) -> NDArray[np.int32] | None:
    """The allowed tokens, ascending, of a blob that lists them; None for one of another form.

    Raises ValueError where the blob is of a larger vocabulary.
    """
    if not blob or blob[0] != _IDS:
        return None
    ids = np.frombuffer(blob[1:], _ID_DTYPE)
    if ids.size and not 0 <= int(ids[0]) <= int(ids[-1]) < vocabulary:
        raise ValueError(f"a support names token {int(ids[-1])}, but the vocabulary has {vocabulary}")
    return ids


def decode_support(blob: bytes, *, vocabulary: int) -> NDArray[np.bool_]:
    """[V] which tokens were allowed.  Raises ValueError where the blob is damaged or of a larger vocabulary."""
    if not blob:
        return np.ones(vocabulary, np.bool_)
    allowed_V = np.zeros(vocabulary, np.bool_)
    ids = listed_support(blob, vocabulary=vocabulary)
    if ids is not None:
        allowed_V[ids] = True
        return allowed_V
    if blob[0] != _BITSET:
        raise ValueError(f"unknown support encoding {blob[0]}: the data is damaged or from a newer release")
    try:
        bits = np.unpackbits(np.frombuffer(_inflated(blob[1:], vocabulary // 8 + ROOM), np.uint8)).astype(np.bool_)
    except zlib.error as error:
        raise ValueError(f"a support is damaged: {error}") from error
    if bits[vocabulary:].any():
        raise ValueError(f"a support reaches beyond the vocabulary of {vocabulary}")
    allowed_V[: bits.size] = bits[:vocabulary]
    return allowed_V


def _inflated(data: bytes, most: int) -> bytes:
    """Unpacked, up to ``most`` bytes: supports come over the wire, and a few bytes can unpack to anything.

    Raises ValueError where there is more, zlib.error where the data is damaged.
    """
    unpacking = zlib.decompressobj()
    unpacked = unpacking.decompress(data, most)
    if not unpacking.eof:
        raise ValueError(f"a support is damaged: it does not end within {most} bytes")
    return unpacked
