"""Writing a policy as a folder that other programs load: Hugging Face weights or a PEFT adapter."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wingbeat.core.errors import SetupError

_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)
_EXPORT_MARKS = ("config.json", "adapter_config.json")


def export_model(model: Any, *, source: Path, path: Path, merged: bool = False) -> None:
    """Write ``model`` to ``path`` with the tokenizer files of ``source``, all or nothing.

    A full model becomes a folder for ``AutoModelForCausalLM.from_pretrained``.  A PEFT model becomes an
    adapter folder, or with ``merged`` a full one (made from a copy: merging and un-merging in place
    would round the weights that are being trained).  An earlier export at ``path`` is replaced.

    Raises SetupError where ``path`` holds something that is no export.
    """
    _refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        os.chmod(temporary, 0o755)
        written = copy.deepcopy(model).merge_and_unload() if merged else model
        written.save_pretrained(temporary)
        for file in _tokenizer_files(source):
            if not (temporary / file.name).exists():
                shutil.copyfile(file, temporary / file.name)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenizer_files(source: Path) -> Iterable[Path]:
    """The files of ``source`` that say how text becomes tokens."""
    found = {file for pattern in _TOKENIZER_PATTERNS for file in source.glob(pattern) if file.is_file()}
    return sorted(found)


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir() or (any(path.iterdir()) and not any((path / mark).is_file() for mark in _EXPORT_MARKS)):
        raise SetupError(
            f"cannot export to {path}: expected a new path or an earlier export (with {' or '.join(_EXPORT_MARKS)}), "
            "found something else; choose another path"
        )
