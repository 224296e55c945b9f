"""A tiny model that workers load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.environments.calculator.tokenizer import build_tokenizer, write_tokenizer

sys.path.insert(0, str(Path(__file__).parent))  # `trainer_play`: test folders are no packages


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=build_tokenizer().get_vocab_size(),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
