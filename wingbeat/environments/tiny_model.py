"""Builds the tiny model of an environment: seeded, warmed up on careless demonstrations, written to a folder.

    python -m wingbeat.environments.tiny_model NAME --out DIR --seed N

writes a complete Hugging Face folder and one JSON line of statistics.  A model with random weights never earns a
reward on a task of an agent, so it first imitates one that makes mistakes (:class:`TinyRecipe`); what it does better
than that, it learnt by reinforcement.  The tokenizer makes episodes short: phrases that the environment repeats
are one token each.

Letters: B episodes, T tokens, A imitated tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, Qwen3ForCausalLM

from wingbeat.environments.calculator.tokenizer import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    END_TOKEN,
    PAD_TOKEN,
    START_TOKEN,
    TOOL_TOKENS,
)
from wingbeat.environments.imitation import imitation_loss, tiny_qwen3, written_by_assistant
from wingbeat.environments.tiny_recipes import RECIPES, Message, TinyRecipe, load_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FRAME = ("system\n", "user\n", "assistant\n", "tool\n", "tools:", '{"name": "', '", "arguments": ', '"}}')
"""What the chat template writes between messages and around calls."""

RAMP_STEPS = 10


def build_tokenizer(recipe: TinyRecipe) -> Tokenizer:
    """Bytes, and a token for each phrase; the longest that fits is taken, from left to right."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    phrases = dict.fromkeys([*TOOL_TOKENS, *FRAME, *(f" {tool}" for tool in recipe.tools), *recipe.phrases])
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    return tokenizer


def write_tokenizer(folder: Path, recipe: TinyRecipe) -> None:
    """What ``transformers.AutoTokenizer.from_pretrained(folder)`` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(recipe).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def build_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised model; the caller's random state is left alone."""
    eos, pad = _special_ids(tokenizer)
    return tiny_qwen3(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        layers=recipe.layers,
        max_tokens=recipe.max_tokens,
        eos=eos,
        pad=pad,
        seed=seed,
    )


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: TinyRecipe, *, seed: int
) -> list[float]:
    """Imitate the recipe's demonstrations; the loss of each step."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for step in range(recipe.steps):
        for group in optimizer.param_groups:  # up for some steps, down to nothing in the last quarter
            ramp = min(1.0, (step + 1) / RAMP_STEPS)
            group["lr"] = recipe.learning_rate * ramp * min(1.0, 4 * (1 - step / recipe.steps))
        batch = [encode(tokenizer, recipe, recipe.demonstrate(rng)) for _ in range(recipe.batch)]
        loss = imitation_loss(model, batch, pad=_special_ids(tokenizer)[1])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def encode(
    tokenizer: PreTrainedTokenizerBase, recipe: TinyRecipe, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """An episode's tokens [T], and which of them [T] the assistant wrote.

    Raises ValueError if the model has fewer positions.
    """
    tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in recipe.tools]
    text = str(tokenizer.apply_chat_template(list(messages), tools=tools or None, tokenize=False))
    ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) > recipe.max_tokens:
        raise ValueError(f"a demonstration has {len(ids)} tokens; expected at most max_tokens = {recipe.max_tokens}")
    marks: Any = tokenizer.convert_tokens_to_ids([START_TOKEN, "assistant\n", END_TOKEN])
    start, assistant, end = marks
    return ids, written_by_assistant(ids, start=start, assistant=assistant, end=end)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Of the end of a turn and of padding."""
    ids: Any = tokenizer.convert_tokens_to_ids([END_TOKEN, PAD_TOKEN])
    return ids[0], ids[1]


def write_model(folder: Path, recipe: TinyRecipe, *, seed: int) -> dict[str, Any]:
    """Build, warm up and write everything that a server needs; returns statistics."""
    started = time.perf_counter()
    write_tokenizer(folder, recipe)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build_model(recipe, tokenizer, seed)
    losses = warm_up(model, tokenizer, recipe, seed=seed)
    model.save_pretrained(folder)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_loss": losses[0],
        "last_loss": sum(losses[-20:]) / len(losses[-20:]),
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description="Write the warmed-up tiny model of an environment.")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stats = write_model(arguments.out, load_recipe(arguments.name), seed=arguments.seed)
    sys.stdout.write(json.dumps(stats) + "\n")


if __name__ == "__main__":
    main()
