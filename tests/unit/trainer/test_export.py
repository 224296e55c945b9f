"""Exports load in transformers and PEFT and give the trainer's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from wingbeat.core.config.trainer import LoraConfig
from wingbeat.core.errors import SetupError
from wingbeat.core.samples import TrainingBatch
from wingbeat.trainer.single import PolicyTrainer

IDS = torch.arange(3, 15)[None]
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@torch.no_grad()
def _trained_logits(trainer: PolicyTrainer) -> Tensor:
    return trainer.model(input_ids=IDS).logits


def _names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2"])
def test_full_export(
    kind: str,
    tmp_path: Path,
    make_trainer: Callable[..., PolicyTrainer],
    make_batch: Callable[..., TrainingBatch],
) -> None:
    trainer = make_trainer(kind=kind)
    trainer.train_step(make_batch())
    trainer.export(tmp_path / "deep" / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out").eval()
    assert torch.equal(model(input_ids=IDS).logits, _trained_logits(trainer))
    assert _names(tmp_path / "deep" / "out") >= {"config.json", "model.safetensors"} | TOKENIZER_FILES
    assert AutoTokenizer.from_pretrained(tmp_path / "deep" / "out")("w3 w5")["input_ids"] == [3, 5]
    assert _names(tmp_path / "deep") == {"out"}, "nothing temporary is left"


def test_adapter_export(
    tmp_path: Path,
    make_trainer: Callable[..., PolicyTrainer],
    make_batch: Callable[..., TrainingBatch],
    model_folder: Callable[[str], Path],
) -> None:
    trainer = make_trainer(lora=LoraConfig(rank=2, alpha=4))
    for step in (1, 2):
        trainer.train_step(make_batch(step=step))
    wanted = _trained_logits(trainer)
    trainer.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"))
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(model(input_ids=IDS).logits, wanted)
    assert _names(tmp_path / "adapter") >= {"adapter_config.json", "adapter_model.safetensors"} | TOKENIZER_FILES

    trainer.export(tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(_trained_logits(trainer), wanted), "merging for export leaves the live model alone"


def test_an_earlier_export_is_replaced(tmp_path: Path, make_trainer: Callable[..., PolicyTrainer]) -> None:
    trainer = make_trainer()
    trainer.export(tmp_path / "out")
    (tmp_path / "out" / "stale").write_text("")
    trainer.export(tmp_path / "out")
    assert "stale" not in _names(tmp_path / "out")


def test_something_else_is_never_overwritten(tmp_path: Path, make_trainer: Callable[..., PolicyTrainer]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SetupError, match="choose another path"):
        make_trainer().export(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_merging_without_an_adapter_is_refused(tmp_path: Path, make_trainer: Callable[..., PolicyTrainer]) -> None:
    with pytest.raises(SetupError, match="no adapter"):
        make_trainer().export(tmp_path / "out", merged=True)
