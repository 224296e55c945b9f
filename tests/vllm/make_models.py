"""Writes the models of these tests; run as a process, so that the end-to-end test loads no torch itself.

    python make_models.py FOLDER

FOLDER/tied, FOLDER/untied    random weights; the head is the embedding, or not
FOLDER/solver                 the calculator model with heads of 32, which vLLM serves on a CPU; half-trained
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from wingbeat.environments.calculator.demonstrations import CarelessAgent
from wingbeat.environments.calculator.model import WarmUpConfig, build_model, warm_up
from wingbeat.environments.calculator.tokenizer import build_tokenizer, write_tokenizer


def random_model(*, tied: bool, seed: int = 0) -> Qwen3ForCausalLM:
    """Two layers; weights large enough that distributions are far from even."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=build_tokenizer().get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def write_solver(folder: Path) -> None:
    write_tokenizer(folder)
    config = build_model(0).config
    config.head_dim = 32
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    imitate = WarmUpConfig(
        agent=CarelessAgent(call_rate=0.97, expression_rate=0.9, report_rate=0.8),
        round_steps=70,
        max_extra_rounds=0,
        num_episodes=24,
        check_episodes=4,
    )
    warm_up(model, AutoTokenizer.from_pretrained(folder), 0, config=imitate)
    model.save_pretrained(folder)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name, tied in (("tied", True), ("untied", False)):
        write_tokenizer(folder / name)
        random_model(tied=tied).save_pretrained(folder / name)
    write_solver(folder / "solver")


if __name__ == "__main__":
    main()
