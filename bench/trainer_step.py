"""Our side of the trainer benchmark's steps, in a process of its own: ``python -m bench.trainer_step JOB``.

The last line of output is one JSON object: CPU seconds of each step, and the peak of the process's memory.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers.utils import logging

from bench.machine import status_kib
from wingbeat.core.config import PolicyConfig, TrainerConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.trainer.single import PolicyTrainer


def batch_of(groups: list[dict[str, Any]]) -> TrainingBatch:
    """An episode of one turn per completion.  Tokens count as sampled by the weights that train."""
    episodes: list[EpisodeSamples] = []
    for number, group in enumerate(groups):
        prompt: list[int] = group["prompt"]
        for member, completion in enumerate(group["completions"]):
            name = f"{number}-{member}"
            sampled = np.array([0] * len(prompt) + [1] * len(completion), np.uint8)
            sample = TrainingSample.build(
                name,
                token_ids=np.array(prompt + completion, np.int32),
                sampled=sampled,
                sampling_logprobs=np.where(sampled, -8.0, 0.0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
            )
            episodes.append(EpisodeSamples(name, 1, str(number), "p", "", group["rewards"][member], (sample,)))
    return TrainingBatch("b", "p", 1, tuple(episodes), seed=0)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    logging.disable_progress_bar()
    imported_kib = status_kib("VmHWM")
    model = Path(job["model"])
    settings = {"learning_rate": job["learning_rate"], "betas": job["betas"], **job["trainer"]}
    config = PolicyConfig(model=str(model), context_tokens=8192, trainer=TrainerConfig(**settings))
    trainer = PolicyTrainer(model, config=config, total_steps=1000, seed=0, device="cpu", dtype=torch.float32)
    batch = batch_of(job["groups"])
    cpu_s: list[float] = []
    metrics: dict[str, float] = {}
    for number in range(1, job["steps"] + 1):
        started = time.process_time()
        metrics = trainer.train_step(msgspec.structs.replace(batch, step=number)).metrics
        cpu_s.append(time.process_time() - started)
    found = {"cpu_s": cpu_s, "peak_kib": status_kib("VmHWM"), "imported_kib": imported_kib}
    found |= {name: metrics[name] for name in ("perf/forward_tokens", "perf/row_tokens", "trained_tokens")}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
