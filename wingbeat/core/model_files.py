"""The files of a model folder, and whether two folders hold the same model.

Engines on other hosts need the model that the server has: the architecture and the tokenizer always, and for LoRA and
frozen policies the very base weights.  A path says nothing there, so folders are compared by what is in them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES = 64
SAMPLE_BYTES = 4096
WHOLE_BYTES = SAMPLES * SAMPLE_BYTES * 4
"""Files up to this size are read whole; of larger ones, weights, samples tell any fine-tune from another."""
SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
"""Of the files that make a model; others in its folder (readme, pictures, other formats) are not looked at."""


def model_files(folder: Path) -> list[Path]:
    """The files of a model, in name order."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def fingerprint(folder: Path) -> str:
    """sha256 (hex) over names, sizes and contents, of large files over evenly spread samples.

    It finds out that a folder holds another model.  It is no proof against somebody who means harm: workers trust
    their server, and the server its workers.  Raises OSError.
    """
    whole = hashlib.sha256()
    for path in model_files(folder):
        size = path.stat().st_size
        whole.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                whole.update(file.read())
                continue
            for index in range(SAMPLES):
                file.seek(index * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                whole.update(file.read(SAMPLE_BYTES))
    return whole.hexdigest()
