"""Model folders whose parts do not belong together are refused at the start, each by its fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wingbeat.core.errors import ModelSourceError
from wingbeat.trainer.architectures import TRAINED, check_architecture
from wingbeat.trainer.folders import checked_folder
from wingbeat.trainer.models import load_model

VOCAB = 48


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("qwen3"), tmp_path / "model"))


def _edit(path: Path, **facts: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def _add_token(folder: Path, content: str, *, special: bool) -> None:
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    path = folder / "tokenizer.json"
    tokens = json.loads(path.read_text())["added_tokens"]
    _edit(path, added_tokens=[*tokens, {"id": VOCAB, "content": content, **added}])


def test_a_whole_folder_is_fine(folder: Path) -> None:
    assert checked_folder(folder) == folder


@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB // 2])
def test_more_tokens_than_embeddings(folder: Path, size: int) -> None:
    _edit(folder / "config.json", vocab_size=size, eos_token_id=1)
    with pytest.raises(
        ModelSourceError, match=rf"no token beyond the {size} embeddings .* got {VOCAB - size}: 'w{size}'"
    ):
        checked_folder(folder)


def test_added_tokens_without_embeddings(folder: Path) -> None:
    """A tokenizer that was extended, and a model that was not; but not a token that nothing ever writes."""
    _add_token(folder, "<image>", special=True)
    checked_folder(folder)
    _edit(folder / "tokenizer_config.json", eos_token="<image>")
    with pytest.raises(ModelSourceError, match=r"got 1: '<image>'\. .*resize_token_embeddings"):
        checked_folder(folder)
    _edit(folder / "tokenizer_config.json", eos_token="w1")
    (folder / "chat_template.jinja").write_text("<image>{{ messages[0].content }}")
    with pytest.raises(ModelSourceError, match="got 1: '<image>'"):
        checked_folder(folder)


def test_an_ordinary_token_without_embedding(folder: Path) -> None:
    _add_token(folder, "tool", special=False)
    with pytest.raises(ModelSourceError, match="got 1: 'tool'"):
        checked_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_that_no_logit_has(folder: Path, name: str) -> None:
    _edit(folder / name, eos_token_id=[1, VOCAB])
    with pytest.raises(ModelSourceError, match=rf"eos_token_id below {VOCAB}, .* got {VOCAB} in .*{name}"):
        checked_folder(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"metadata": {}, "weight_map": dict(zip("abc", shards, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=r"the 3 files of weights .* got 2 too few: 'model-00002.*'model-00003"):
        checked_folder(folder)


def test_an_unsupported_architecture_is_named_with_the_list(folder: Path) -> None:
    _edit(folder / "config.json", model_type="t5")
    with pytest.raises(ModelSourceError, match=r"'t5' in .* is no causal language model.* supported: apertus, .*qwen3"):
        load_model(folder, dtype=torch.float32, device="cpu")
    with pytest.raises(ModelSourceError, match="'warp_drive' in x is unknown to this release of transformers"):
        check_architecture("warp_drive", folder="x")
    for name in TRAINED:
        check_architecture(name, folder="x")


def test_tokens_of_a_unigram_tokenizer_are_numbered_by_place(folder: Path) -> None:
    pieces = [[f"w{place}", -float(place)] for place in range(VOCAB + 1)]
    _edit(folder / "tokenizer.json", model={"type": "Unigram", "unk_id": 0, "vocab": pieces})
    with pytest.raises(ModelSourceError, match=rf"no token beyond the {VOCAB} embeddings .* got 1: 'w{VOCAB}'"):
        checked_folder(folder)


def test_the_text_part_of_a_model_says_how_many_embeddings_there_are(folder: Path) -> None:
    _edit(folder / "config.json", vocab_size=7, text_config={"vocab_size": VOCAB})
    assert checked_folder(folder) == folder


@pytest.mark.parametrize("added", [{"x": 1}, ["x"], [[]], 3])
def test_a_tokenizer_of_another_form_is_left_to_its_reader(folder: Path, added: Any) -> None:
    _edit(folder / "tokenizer.json", added_tokens=added, model={"vocab": [*[["w", 0.0]] * VOCAB, 3, []]})
    assert checked_folder(folder) == folder


def test_a_model_type_that_is_no_text_is_refused(folder: Path) -> None:
    _edit(folder / "config.json", model_type=["qwen3"])
    with pytest.raises(ModelSourceError, match="a JSON object with model_type"):
        checked_folder(folder)
