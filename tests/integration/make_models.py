"""Writes the models of the integration tests; run as a process, so that pytest itself loads no torch.

    python make_models.py FOLDER

FOLDER/solver      the calculator model, made to imitate a careful agent: it calls the tool, then answers
FOLDER/babbler     letters for ever: its end-of-turn token has no weight, so every turn runs to `max_tokens`
FOLDER/checker     another architecture (Llama), size, tokenizer and template; random weights
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

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


CHECKER_TEMPLATE = (
    "{% for m in messages %}{{ '[A]' if m.role == 'assistant' else '[Q]' }}{{ m.content }}[E]{% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)


def write_checker(folder: Path) -> None:
    """Bytes and four marks: no token id means what it means to the solver."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["[PAD]", "[Q]", "[A]", "[E]"]
    vocabulary = {token: index for index, token in enumerate([*marks, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(marks)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=marks.index("[E]"),
            pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "[E]",
        "pad_token": "[PAD]",
        "chat_template": CHECKER_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    write_solver(folder / "solver")
    write_babbler(folder / "babbler")
    write_checker(folder / "checker")


if __name__ == "__main__":
    main()
