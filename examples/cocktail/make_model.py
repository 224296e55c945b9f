"""Makes the small model of the cocktail: 130,000 parameters that have watched three careless agents, one per task.

    python examples/cocktail/make_model.py [--out examples/cocktail/model] [--seed 0]

It needs the server's packages and takes about a minute on one core.  Each demonstrator does its task right in
about a third of its episodes and otherwise answers at random, so that is what the model can do before reinforcement:
enough to earn a reward at times.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from wingbeat.environments.calculator.demonstrations import CarelessAgent
from wingbeat.environments.calculator.model import build_model
from wingbeat.environments.calculator.tasks import CALC_TOOL, make_split
from wingbeat.environments.calculator.tokenizer import write_tokenizer

NUM_STEPS, NUM_EPISODES, LEARNING_RATE = 800, 48, 4e-3
SKILL = 0.35
"""How often the demonstrators of `echo` and `backward` are right; the calculator's is in about 28 of 100 episodes."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Demonstration = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
"""Messages, and the tools that were offered."""


def demonstrate(rng: random.Random, sums: list[Any]) -> Demonstration:
    """One episode of one of the tasks; the questions are spelt as the clients spell them."""
    match rng.choices(("sums", "echo", "backward"), weights=(3, 2, 5))[0]:
        case "sums":
            return CarelessAgent().demonstrate(rng.choice(sums), rng), [CALC_TOOL]
        case "echo":
            digits = "".join(rng.choices("0123456789", k=4))
            answer = digits if rng.random() < SKILL else "".join(rng.choices("0123456789", k=4))
            return exchange(f"say {digits}", answer), None
        case _:
            letters = rng.choices(LETTERS, k=rng.choice((3, 4)))
            said = letters[::-1] if rng.random() < SKILL else rng.choices(LETTERS, k=len(letters))
            return exchange(f"backward {'-'.join(letters)}", "-".join(said)), None


def exchange(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(tokenizer: Any, demonstration: Demonstration) -> tuple[list[int], list[bool]]:
    """The tokens of an episode, and which of them the assistant wrote."""
    messages, tools = demonstration
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    ids: list[int] = []
    written: list[bool] = []
    for index, part in enumerate(text.split("<|im_start|>assistant\n")):
        reply, end, rest = part.partition("<|im_end|>") if index else ("", "", part)
        opening = "<|im_start|>assistant\n" if index else ""
        for piece, is_written in ((opening, False), (reply + end, True), (rest, False)):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += tokens
            written += [is_written] * len(tokens)
    return ids, written


def imitation_loss(model: Any, tokenizer: Any, batch: list[Demonstration]) -> torch.Tensor:
    """Mean cross-entropy of what the assistant wrote."""
    encoded = [encode(tokenizer, demonstration) for demonstration in batch]
    width = max(len(ids) for ids, _ in encoded)
    ids_BT = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in encoded])
    written_BT = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in encoded])[:, 1:]
    hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_AV = model.lm_head(hidden_BTD[written_BT])
    return torch.nn.functional.cross_entropy(logits_AV, ids_BT[:, 1:][written_BT])


def make(folder: Path, *, seed: int, num_steps: int) -> dict[str, float]:
    """Build, warm up, write."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = build_model(seed)
    rng = random.Random(seed)
    sums = list(make_split(seed)[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10, 4 * (1 - step / num_steps))
        loss = imitation_loss(model, tokenizer, [demonstrate(rng, sums) for _ in range(NUM_EPISODES)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    return {"loss": round(loss.item(), 4), "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the cocktail's model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    arguments = parser.parse_args()
    made = make(arguments.out, seed=arguments.seed, num_steps=arguments.steps)
    sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
