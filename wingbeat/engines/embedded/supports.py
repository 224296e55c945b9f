"""From what each token was drawn, as the blobs that travel with it.

Letters: R restricted requests, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from torch import Tensor

from wingbeat.core.support import encode_support

MAX_REMEMBERED = 512
"""Sets kept with their blobs: inside a JSON string, say, a grammar allows the same tokens at every step."""


class SupportEncoder:
    """``core.support.encode_support`` by the batch, with a memory of the sets met lately."""

    def __init__(self) -> None:
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()

    def encode(self, allowed_RV: Tensor) -> list[bytes]:
        """One blob per row; no row may be empty."""
        rows_RV = allowed_RV.cpu().numpy()
        blobs: list[bytes] = []
        for row_V, bits in zip(rows_RV, np.packbits(rows_RV, axis=1), strict=True):
            key = bits.tobytes()
            blob = self._blobs.get(key)
            if blob is None:
                blob = self._blobs[key] = encode_support(row_V)
                if len(self._blobs) > MAX_REMEMBERED:
                    self._blobs.popitem(last=False)
            else:
                self._blobs.move_to_end(key)
            blobs.append(blob)
        return blobs
