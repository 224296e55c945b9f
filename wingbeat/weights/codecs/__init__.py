"""Lossless deltas between two versions of one set of tensors: what changed, in as few bytes as is cheap.

    encode_delta ─ delta ─┬─ dense    raw; XOR + zstd
                          └─ sparse   which elements of which exponent moved, by how many ULPs
                               └─ rice    small integers in few bits ── bits (per device)
    container   the file around it: checksums, one entry per tensor

The format is described to the byte in ``docs/reference/weights-format.md``.  Both directions run on the device
that the tensors are on.
"""

from wingbeat.weights.codecs.container import delta_base
from wingbeat.weights.codecs.delta import decode_delta, encode_delta

__all__ = ["decode_delta", "delta_base", "encode_delta"]
