"""The parts of the accelerator benchmark, one a process: ``python -m bench.gpu_parts PART --shape X --folder DIR``.

The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.gpu_models import (
    CONTEXT_TOKENS,
    ROW_TOKENS,
    SHAPES,
    Load,
    Row,
    Shape,
    accelerator,
    build,
    device_name,
    fitting_requests,
    make_batch,
    memory_info,
    mfu,
    random_ids,
)
from bench.machine import describe_machine
from wingbeat.core.config import PolicyConfig
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.samples import TrainingBatch
from wingbeat.core.types import SamplingParams
from wingbeat.engines.embedded import EmbeddedEngine, EngineOptions
from wingbeat.trainer.memory import free_garbage
from wingbeat.trainer.single import PolicyTrainer, StepResult
from wingbeat.weights.checksum import tensors_checksum
from wingbeat.weights.codecs import decode_delta, encode_delta
from wingbeat.weights.overlap import Staging

Result = TypeVar("Result")
GIB = 2**30
LEARNING_RATE = 1e-6


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Wall seconds, until the device is idle."""
    synchronize()
    started = time.perf_counter()
    result = work()
    synchronize()
    return time.perf_counter() - started, result


def synchronize() -> None:
    if accelerator().type != "cpu":
        torch.accelerator.synchronize()


def reset_peak() -> int:
    """Bytes that the device holds now; its peak counts from here."""
    if accelerator().type == "cpu":
        return 0
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def peak_gib(*, above: int = 0) -> float | None:
    """The most that the device held since; None on a CPU, which does not count."""
    if accelerator().type == "cpu":
        return None
    return round((torch.accelerator.max_memory_allocated() - above) / GIB, 3)


def memory_gib() -> float | None:
    if accelerator().type == "cpu":
        return None
    return round(memory_info()[1] / GIB, 1)


def make_trainer(folder: Path, **settings: Any) -> PolicyTrainer:
    chosen: Any = {"learning_rate": LEARNING_RATE, "algorithm": "rloo", **settings}
    config = PolicyConfig(model=str(folder), context_tokens=CONTEXT_TOKENS, trainer=chosen)
    return PolicyTrainer(folder, config=config, total_steps=1000, seed=0, device=accelerator(), dtype=torch.bfloat16)


def make_engine(model: Any, *, requests: int) -> EmbeddedEngine:
    capacity = 2 ** (requests * ROW_TOKENS - 1).bit_length()
    options = EngineOptions(max_running=requests, kv_tokens=capacity, prefill_tokens=8192)
    return EmbeddedEngine(model, config=options, device=accelerator(), seed=0)


def generate(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Row]:
    """All at once; groups are for the caller to set."""
    params = SamplingParams(max_tokens=max_tokens)
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(str(index), tuple(prompt), params))
    left, version = len(prompts), 0
    while left:
        for event in engine.step():
            if event.error:
                raise RuntimeError(event.error)
            tokens, logprobs = found[int(event.request_id)]
            tokens += event.token_ids
            logprobs += event.logprobs
            version = event.policy_version
            left -= event.finish_reason is not None
    return [
        Row([*prompt, *tokens], len(prompt), float(tokens[0] % 2), group=0, logprobs=logprobs, version=version)
        for prompt, (tokens, logprobs) in zip(prompts, found, strict=True)
    ]


def build_part(shape: Shape, load: Load, folder: Path) -> dict[str, Any]:
    seconds, weights = timed(lambda: build(shape, folder))
    return {
        "weights": weights,
        "build_s": round(seconds, 2),
        "device": device_name(),
        "memory_gib": memory_gib(),
        "machine": {**describe_machine(), "torch": torch.__version__},
    }


def engine_part(shape: Shape, load: Load, folder: Path) -> dict[str, Any]:
    """Sampled tokens per second, all requests at once, and alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    requests = fitting_requests(shape, wanted=load.requests)
    engine = make_engine(model, requests=requests)
    rounds = iter(range(1000))

    def prompts(count: int) -> list[list[int]]:
        return [
            random_ids(load.prompt_tokens, vocabulary=shape.vocabulary, seed=1000 * next(rounds) + index)
            for index in range(count)
        ]

    reset_peak()
    generate(engine, prompts(requests), max_tokens=8)
    together_s, _ = timed(lambda: generate(engine, prompts(requests), max_tokens=load.sampled_tokens))
    alone_s, _ = timed(lambda: generate(engine, prompts(1), max_tokens=min(64, load.sampled_tokens)))
    passed = load.prompt_tokens + load.sampled_tokens
    flops = requests * (
        2.0 * (passed * shape.body_weights + load.sampled_tokens * shape.head_weights)
        + shape.attention_flops(pairs=passed**2 / 2)
    )
    return {
        "concurrency": requests,
        "tokens_per_s": round(requests * load.sampled_tokens / together_s, 1),
        "tokens_per_s_alone": round(min(64, load.sampled_tokens) / alone_s, 1),
        "peak_gib": peak_gib(),
        **mfu(flops, seconds=together_s),
    }


def steps(trainer: PolicyTrainer, rows: Sequence[Row], *, count: int, vocabulary: int) -> tuple[float, int, StepResult]:
    """Seconds of the fastest of ``count`` steps after one that is not measured, what the device held between that one
    and these, whose peak is counted, and the last result."""

    def step() -> StepResult:
        batch: TrainingBatch = make_batch(rows, step=trainer.step + 1, vocabulary=vocabulary)
        return trainer.train_step(batch)

    step()
    held = reset_peak()
    taken, results = zip(*(timed(step) for _ in range(count)), strict=True)
    return min(taken), held, results[-1]


def trainer_part(shape: Shape, load: Load, folder: Path) -> dict[str, Any]:
    prompt = load.row_tokens // 4
    rows = [
        Row(random_ids(load.row_tokens, vocabulary=shape.vocabulary, seed=index), prompt, float(index % 2), index // 8)
        for index in range(load.rows)
    ]
    trainer = make_trainer(folder)
    seconds, _, result = steps(trainer, rows, count=load.rounds, vocabulary=shape.vocabulary)
    tokens, trained = load.rows * load.row_tokens, load.rows * (load.row_tokens - prompt)
    forward = 2.0 * (tokens * shape.body_weights + trained * shape.head_weights)
    forward += load.rows * shape.attention_flops(pairs=load.row_tokens**2 / 2)
    return {
        "tokens_per_step": tokens,
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "trained_tokens_per_s": round(trained / seconds, 1),
        "peak_gib": peak_gib(),
        "oom_retries": result.metrics["perf/oom_retries"],
        "micro_batch_tokens": result.metrics["perf/micro_batch_tokens"],
        **mfu(3 * forward, seconds=seconds),
    }


def tree_part(shape: Shape, load: Load, folder: Path) -> dict[str, Any]:
    """One group: the prompt once, or once for each reply."""
    prompt = random_ids(load.tree_prompt_tokens, vocabulary=shape.vocabulary, seed=0)
    rows = [
        Row(
            [*prompt, *random_ids(load.tree_reply_tokens, vocabulary=shape.vocabulary, seed=1 + index)],
            len(prompt),
            float(index % 2),
            group=0,
        )
        for index in range(load.group_size)
    ]
    found: dict[str, dict[str, Any]] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, mode in (("tree", "on"), ("packed", "off")):
        at_once = load.group_size * len(rows[0].tokens)
        free_garbage()  # the other trainer
        trainer = make_trainer(folder, prefix_tree=mode, micro_batch_tokens=at_once, learning_rate=0.0)
        seconds, held, result = steps(trainer, rows, count=load.rounds, vocabulary=shape.vocabulary)
        found[name] = {
            "step_s": round(seconds, 4),
            "peak_growth_gib": peak_gib(above=held),
            "forward_tokens": round(result.metrics["perf/forward_tokens"]),
            "oom_retries": result.metrics["perf/oom_retries"],
        }
        moments[name] = {
            key: tensor.cpu()
            for key, tensor in trainer.state_tensors().items()
            if key.startswith("exp_avg.") and ".layers.0." in key
        }
        del trainer
    speedup = found["packed"]["step_s"] / found["tree"]["step_s"]
    return {
        **found,
        "speedup": round(speedup, 3),
        "sharing": round(found["packed"]["forward_tokens"] / found["tree"]["forward_tokens"], 3),
        "grad_rel_diff_layer_0": _relative(moments["packed"], moments["tree"]),
    }


def _relative(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """The L2 norm of the difference over that of ``wanted``."""
    difference = sum(float((wanted[name].double() - got[name].double()).square().sum()) for name in wanted)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in wanted.values())) ** 0.5


def step_part(shape: Shape, load: Load, folder: Path) -> dict[str, Any]:
    """Sample, train, copy to the host, encode, decode, swap: once to warm up, once measured."""
    trainer = make_trainer(folder)
    staging, stage_times = Staging(), list[float]()
    engine = make_engine(copy.deepcopy(trainer.model), requests=load.step_groups * load.group_size)
    found: dict[str, Any] = {}
    base_checksum = tensors_checksum(trainer.published_tensors())
    for number in range(2):
        prompts = [
            random_ids(load.step_tokens, vocabulary=shape.vocabulary, seed=100 * number + group)
            for group in range(load.step_groups)
            for _ in range(load.group_size)
        ]
        sample_s, rows = timed(lambda prompts=prompts: generate(engine, prompts, max_tokens=load.step_tokens))
        rows = [
            Row(row.tokens, row.prompt_tokens, row.reward, index // load.group_size, row.logprobs, row.version)
            for index, row in enumerate(rows)
        ]
        base = {name: tensor.clone() for name, tensor in trainer.published_tensors().items()}
        batch = make_batch(rows, step=trainer.step + 1, vocabulary=shape.vocabulary)
        train_s, result = timed(lambda batch=batch: trainer.train_step(batch))
        stage_s, staged = timed(lambda: staging.take(trainer.published_tensors()))
        stage_times.append(round(stage_s, 4))
        found = {
            "stage_s": stage_times,
            "staged_exact": all(
                torch.equal(staged[name], tensor.cpu()) for name, tensor in trainer.published_tensors().items()
            ),
            "sampled_tokens": sum(len(row.logprobs) for row in rows),
            "sample_s": round(sample_s, 4),
            "train_s": round(train_s, 4),
            **{name: result.metrics[name] for name in ("max_abs_logprob_diff", "mismatch_kl")},
            **_sync(base, trainer.published_tensors(), checksum=base_checksum, engine=engine, version=trainer.step),
        }
        base_checksum = found.pop("target_checksum")
    return found


def _sync(
    base: Mapping[str, Tensor], target: Mapping[str, Tensor], *, checksum: str, engine: EmbeddedEngine, version: int
) -> dict[str, Any]:
    """The way of the new weights to an engine elsewhere, without the network; ``checksum`` is that of ``base``."""
    checksum_s, target_checksum = timed(lambda: tensors_checksum(target))
    checksums = {"base_checksum": checksum, "target_checksum": target_checksum}
    encode_s, data = timed(lambda: encode_delta(base, target, **checksums))
    decode_s, decoded = timed(lambda: decode_delta(data, base))
    swap_s, _ = timed(lambda: engine.update_weights(decoded, policy_version=version))
    smallest = sorted(base, key=lambda name: base[name].numel())[: len(base) // 2]
    here = {name: base[name].cpu() for name in smallest}
    part = encode_delta(
        {name: base[name] for name in smallest},
        {name: target[name] for name in smallest},
        base_checksum=tensors_checksum(here),
        target_checksum=tensors_checksum({name: target[name] for name in smallest}),
    )
    decode_delta(part, here)  # raises unless the CPU makes the same of it
    changed = sum(int((base[name] != target[name]).sum()) for name in base)
    return {
        "target_checksum": target_checksum,
        "density": round(changed / sum(tensor.numel() for tensor in base.values()), 6),
        "full_bytes": sum(tensor.nbytes for tensor in base.values()),
        "delta_bytes": len(data),
        "encode_s": round(encode_s, 4),
        "decode_s": round(max(0.0, decode_s - checksum_s), 4),
        "checksum_s": round(checksum_s, 4),
        "swap_s": round(swap_s, 4),
        "exact": all(torch.equal(decoded[name], target[name]) for name in target),
    }


PARTS: dict[str, Callable[[Shape, Load, Path], dict[str, Any]]] = {
    "build": build_part,
    "engine": engine_part,
    "trainer": trainer_part,
    "tree": tree_part,
    "step": step_part,
}


@contextmanager
def warned() -> Iterator[list[str]]:
    """What Wingbeat warned of meanwhile; each thing once."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()) not in said:
                said.append(text)

    logger, listener = logging.getLogger("wingbeat"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_parts", description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the model is, or is built")
    arguments = parser.parse_args()
    disable_progress_bar()
    shape, load = SHAPES[arguments.shape]
    with warned() as warnings:
        found = PARTS[arguments.part](shape, load, arguments.folder / arguments.shape)
    if warnings:
        found["warnings"] = warnings
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
