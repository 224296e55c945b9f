"""Loading models (first version: local folders)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    folder: Path


def resolve_model(source: str) -> Path:
    return Path(source)


def load_model(source: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    folder = resolve_model(str(source))
    return LoadedModel(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device), folder)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"path": str(resolve_model(sys.argv[1]))}) + "\n")
