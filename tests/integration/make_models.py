"""Writes the two models of the integration tests; run as a process, so that pytest itself loads no torch.

    python make_models.py FOLDER

FOLDER/solver      the calculator model, made to imitate a careful agent: it calls the tool, then answers
FOLDER/babbler     letters for ever: its end-of-turn token has no weight, so every turn runs to `max_tokens`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from wingbeat.environments.calculator.demonstrations import CarelessAgent
from wingbeat.environments.calculator.model import WarmUpConfig, build_model, warm_up
from wingbeat.environments.calculator.tokenizer import build_tokenizer, write_tokenizer

LETTERS = "abcdefgh"
PEAK = 40.0
"""Logit of a letter; everything else has 0."""


def write_solver(folder: Path) -> None:
    """Half-trained, so that rewards differ within a group."""
    write_tokenizer(folder)
    model = build_model(0)
    imitate = WarmUpConfig(
        agent=CarelessAgent(call_rate=0.97, expression_rate=0.9, report_rate=0.8),
        round_steps=70,
        max_extra_rounds=0,
        num_episodes=24,
        check_episodes=4,
    )
    warm_up(model, AutoTokenizer.from_pretrained(folder), 0, config=imitate)
    model.save_pretrained(folder)


def write_babbler(folder: Path) -> None:
    """Layers that add nothing, a constant first coordinate, and a head that reads only that."""
    write_tokenizer(folder)
    config = build_model(0).config
    config.tie_word_embeddings = False
    config.max_position_embeddings = 8192
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight.zero_()
        scale = config.hidden_size**0.5  # what RMS normalisation makes of a one-hot vector
        for letter in LETTERS:
            (token_id,) = build_tokenizer().encode(letter).ids
            model.lm_head.weight[token_id, 0] = PEAK / scale
    model.save_pretrained(folder)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    write_solver(folder / "solver")
    write_babbler(folder / "babbler")


if __name__ == "__main__":
    main()
