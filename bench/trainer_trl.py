"""TRL's side of the trainer benchmark.  Runs with the Python of TRL's own environment, and imports nothing of ours.

    python trainer_trl.py step JOB   the training part of optimiser steps on one batch, given as tokens
    python trainer_trl.py run JOB    whole training: prompts in, generation, reward, steps

JOB is a JSON file, see :mod:`bench.trainer_work`.  The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

VOWELS = frozenset("aeiou")


def peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class TimedTrainer(GRPOTrainer):
    """Knows how long generation and scoring took, which are no part of a training step."""

    prepared_s = 0.0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started = time.process_time()
        found = super()._prepare_inputs(generation_batch)
        self.prepared_s += time.process_time() - started
        return found


class Clock(TrainerCallback):
    """When each step began and ended, what it logged."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.cpu_s: list[float] = []
        """Of each step, without what prepared its inputs."""
        self.ended_s: list[float] = []
        self.rewards: list[float] = []
        self.begun_s = 0.0
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun_s = time.time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.process_time() - self.trainer.prepared_s

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.cpu_s.append(time.process_time() - self.trainer.prepared_s - self._began)
        self.ended_s.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def settings(job: dict[str, Any], folder: str) -> GRPOConfig:
    """What both sides share, and what is fastest for TRL on a CPU."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=job["steps"],
        per_device_train_batch_size=job["micro_rows"],
        gradient_accumulation_steps=job["rows"] // job["micro_rows"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        beta=0.0,
        epsilon=job["clip"][0],
        epsilon_high=job["clip"][1],
        loss_type="grpo",
        scale_rewards="group",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        use_transformers_continuous_batching=job.get("continuous_batching", False),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
    )


def step(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Every step trains the same batch; nothing is generated."""
    groups: list[dict[str, Any]] = job["groups"]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        drawn = [0] * len(groups)
        chosen: list[tuple[int, int]] = []
        for prompt in prompts:
            group = int(prompt)
            chosen.append((group, drawn[group]))
            drawn[group] += 1
        completions = [groups[group]["completions"][member] for group, member in chosen]
        return {
            "prompt_ids": [groups[group]["prompt"] for group, _ in chosen],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
            "given_reward": [groups[group]["rewards"][member] for group, member in chosen],
        }

    def reward(completions: list[str], given_reward: list[float], **_: Any) -> list[float]:
        return given_reward

    data = Dataset.from_list([{"prompt": str(index)} for index in range(len(groups))] * job["steps"])
    return train(job, folder, data=data, reward=reward, rollout_func=rollout)


def run(job: dict[str, Any], folder: str) -> dict[str, Any]:
    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [sum(letter in VOWELS for letter in said[0]["content"]) / job["max_tokens"] for said in completions]

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in job["questions"]])
    return train(job, folder, data=data, reward=reward)


def train(job: dict[str, Any], folder: str, *, data: Dataset, reward: Any, **options: Any) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    clock = Clock()
    trainer = TimedTrainer(
        model=model,
        args=settings(job, folder),
        train_dataset=data,
        processing_class=tokenizer,
        reward_funcs=reward,
        callbacks=[clock],
        **options,
    )
    clock.trainer = trainer
    trainer.train()
    return {
        "cpu_s": clock.cpu_s,
        "begun_s": clock.begun_s,
        "ended_s": clock.ended_s,
        "rewards": clock.rewards,
        "peak_kib": peak_kib(),
    }


def main() -> None:
    kind, path = sys.argv[1:3]
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(job["threads"])
    logging.set_verbosity_error()
    imported_kib = peak_kib()
    with tempfile.TemporaryDirectory() as folder:
        found = {"step": step, "run": run}[kind](job, folder)
    sys.stdout.write("\n" + json.dumps({**found, "imported_kib": imported_kib}) + "\n")


if __name__ == "__main__":
    main()
