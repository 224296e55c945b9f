"""What a Hugging Face model folder must hold.  Loads no torch, so that starting a run can check it cheaply."""

from __future__ import annotations

import json
from pathlib import Path

from wingbeat.core.errors import ModelSourceError


def checked_folder(folder: Path) -> Path:
    """``folder``, if it has what every reader needs.  Raises ModelSourceError."""
    present = {file.name for file in folder.iterdir()}
    missing = [name for name in ("config.json", "tokenizer.json") if name not in present]
    if not present & {"model.safetensors", "model.safetensors.index.json"}:
        missing.append("model.safetensors")
    if missing:
        found = ", ".join(sorted(present)[:8]) or "nothing"
        fix = "export it with save_pretrained of a model and a fast tokenizer"
        if any(name.endswith(".gguf") for name in present):
            fix = "give the path of the .gguf file itself"
        raise ModelSourceError(f"expected {', '.join(missing)} in the model folder {folder}, got {found}: {fix}")
    _check_shards(folder)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        described = isinstance(config, dict) and "model_type" in config
    except ValueError:
        described = False
    if not described:
        raise ModelSourceError(
            f"expected a JSON object with model_type in {folder / 'config.json'}, got something else: "
            "copy the model's own config.json there"
        )
    return folder


def _check_shards(folder: Path) -> None:
    """An index may name files of any kind anywhere: only safetensors beside it are read.  Raises ModelSourceError."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelSourceError(
            f"expected a table `weight_map` in {index}, got none: copy the model's own there"
        ) from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelSourceError(
                f"{index} names {shard!r:.100}; expected .safetensors files beside it: nothing else is loaded, since"
                " other formats of weights can hold programs"
            )
