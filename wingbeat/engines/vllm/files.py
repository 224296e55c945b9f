"""Weights as vLLM takes them: files that stay readable, adapters as PEFT lays them out, names that fit the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from wingbeat.core.errors import ModelSourceError
from wingbeat.engines.embedded.lora import PREFIX, SUFFIX_A

SHOWN = 4


class KeptFile:
    """A file that can be read for as long as this is open, even if it is deleted: a server may have to load it anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)

    @property
    def path(self) -> Path:
        """Where it can be read now, by any process of the same user."""
        return self._path if self._path.exists() else Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    @property
    def lasting(self) -> Path:
        """A path that stays right."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def write_adapter(folder: Path, file: KeptFile, *, names: Sequence[str], rank: int, alpha: float, base: str) -> None:
    """Lay a published adapter out as a PEFT folder, in place of another one.

    Raises ModelSourceError where it is no plain LoRA.
    """
    targets = sorted({name.removeprefix(PREFIX).removesuffix(SUFFIX_A) for name in names if name.endswith(SUFFIX_A)})
    if not targets:
        raise ModelSourceError(f"expected LoRA tensors named {PREFIX}MODULE{SUFFIX_A}, got {list(names)[:SHOWN]}")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / ".new"
    new.write_text(json.dumps(config), encoding="utf-8")
    new.replace(folder / "adapter_config.json")
    new.symlink_to(file.lasting)
    new.replace(folder / "adapter_model.safetensors")


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a model folder.  Raises ModelSourceError where they cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names: list[str] = file.keys()
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in names})
        except (OSError, SafetensorError) as error:
            raise ModelSourceError(f"expected a safetensors file, got {path}: {error}") from error
    if not found:
        raise ModelSourceError(f"expected safetensors files in {folder}, got none: vLLM takes no other weights here")
    return found


def check_fits(given: Mapping[str, Sequence[int]], model: Mapping[str, tuple[int, ...]], *, is_tied: bool) -> None:
    """vLLM loads by the names of the model's own files, and what it does not know it leaves out.

    Raises ModelSourceError where names or shapes differ; nothing was loaded then.
    """
    head = {"lm_head.weight"} if is_tied else set[str]()
    lacking = sorted(model.keys() - given.keys() - head)
    beyond = sorted(given.keys() - model.keys() - head)
    if lacking or beyond:
        raise ModelSourceError(
            f"vLLM needs the tensors by the names that the model folder has: lacking {_listing(lacking)}, unexpected"
            f" {_listing(beyond)}; a model that transformers holds in another form needs the embedded engine"
        )
    for name, shape in given.items():
        if name in model and tuple(shape) != model[name]:
            raise ModelSourceError(f"{name}: expected shape {model[name]} as in the model folder, got {tuple(shape)}")


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}" if names else "none"
