"""LoRA policies that share a base model against copies of it: ``python -m bench.lora_groups [--quick]``.

Throughput: one engine that holds all adapters and decodes all policies together, against an engine with merged weights
for each policy, stepped by turns; in one process, taking turns, the best of the repeats.  Memory: what a fresh process
holds more once it has loaded all policies, in a group or not.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.machine import describe_machine, status_kib

DESCRIPTION = (
    "Qwen3 of 4 layers, hidden size 256, vocabulary 2048, float32, random weights; adapters of ranks 4, 8 and 16 on "
    "all linear layers; 32 prompt + 64 sampled tokens per request. shared, separate: sampled tokens per second of one "
    "thread; base: the same batch with the base model alone. memory: MiB of a process beyond what it had before "
    "loading all policies, whose base model has 12 layers and hidden size 512 (quick: 4 and 256)."
)
SMALL, LARGE = (256, 4), (512, 12)
RANKS = (4, 8, 16)
THROUGHPUT = ((1, 8), (2, 8), (4, 8), (10, 4))
"""Policies, and requests in flight of each."""
MEMORY_POLICIES = 8


def build_model(size: tuple[int, int]) -> Any:
    """A Qwen3 of (hidden size, layers)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers = size
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=1024,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(shape).eval()


def make_adapter(model: Any, index: int) -> Any:
    """As it would be published."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from wingbeat.core.weight_protocol import AdapterInfo
    from wingbeat.engines.embedded import AdapterWeights

    rank = RANKS[index % len(RANKS)]
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    torch.manual_seed(index)
    tensors = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return AdapterWeights(
        {name: torch.randn_like(tensor) * 0.02 for name, tensor in tensors.items()}, AdapterInfo(rank, float(rank))
    )


def measure_throughput(policies: int, requests: int, *, repeats: int) -> dict[str, float]:
    """Tokens per second: shared, separate, and of the base model in one batch."""
    import torch

    from wingbeat.core.ports import GenerateRequest
    from wingbeat.core.types import SamplingParams
    from wingbeat.engines.embedded import AdapterMerger, EmbeddedEngine, EngineOptions

    torch.set_num_threads(1)
    model = build_model(SMALL)
    options = EngineOptions(max_running=64, kv_tokens=65536, prefill_tokens=512)
    adapters = [make_adapter(model, index) for index in range(policies)]
    shared = EmbeddedEngine(copy.deepcopy(model), config=options, device="cpu")
    separate: list[EmbeddedEngine] = []
    for index, adapter in enumerate(adapters):
        shared.put_adapter(f"p{index}", adapter)
        own = copy.deepcopy(model)
        separate.append(EmbeddedEngine(own, config=options, device="cpu"))
        merged = AdapterMerger(own, adapter=adapter.info).merge(adapter.tensors)
        separate[-1].update_weights(merged, policy_version=1, partial=True)

    def serve(name: str, engine_of: Callable[[int], EmbeddedEngine], *, with_adapters: bool) -> float:
        started, tokens = time.perf_counter(), 0
        generator = torch.Generator().manual_seed(len(name))
        for policy in range(policies):
            for number in range(requests):
                prompt = torch.randint(0, 2048, (32,), generator=generator).tolist()
                request = GenerateRequest(f"{name}-{policy}-{number}", prompt, SamplingParams(max_tokens=64))
                engine_of(policy).submit(replace(request, adapter=f"p{policy}" if with_adapters else ""))
        engines = list(dict.fromkeys(engine_of(policy) for policy in range(policies)))
        while any(engine.has_work() for engine in engines):
            for engine in engines:
                if engine.has_work():
                    tokens += sum(len(event.token_ids) for event in engine.step())
        return tokens / (time.perf_counter() - started)

    best = {"shared": 0.0, "separate": 0.0, "base": 0.0}
    for _ in range(repeats):
        best["shared"] = max(best["shared"], serve("shared", lambda _: shared, with_adapters=True))
        best["separate"] = max(best["separate"], serve("separate", separate.__getitem__, with_adapters=False))
        best["base"] = max(best["base"], serve("base", lambda _: shared, with_adapters=False))
    return {
        **{key: round(value, 1) for key, value in best.items()},
        "ratio": round(best["shared"] / best["separate"], 3),
    }


def measure_memory(side: str, *, grouped: bool, folder: Path, policies: int) -> float:
    """MiB that a process of its own holds after loading."""
    command = [sys.executable, "-m", "bench.lora_groups", "--child", side, "--model", str(folder)]
    command += ["--policies", str(policies), *(["--grouped"] if grouped else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return float(json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)["mib"])


def child(side: str, *, grouped: bool, folder: Path, policies: int) -> float:
    """MiB beyond what was there before loading."""
    import torch

    from wingbeat.core.config import EngineConfig, PolicyConfig
    from wingbeat.core.worker_protocol import PolicySpec
    from wingbeat.trainer.shared_base import SharedBases
    from wingbeat.trainer.single import PolicyTrainer
    from wingbeat.workers.hosting import EmbeddedBackend

    torch.set_num_threads(1)
    configs = [
        PolicyConfig.model_validate(
            {
                "model": str(folder),
                "context_tokens": 512,
                "lora": {"rank": RANKS[index % len(RANKS)], "group": "team" if grouped else None},
            }
        )
        for index in range(policies)
    ]
    before, bases = status_kib("VmRSS"), SharedBases()
    backend = EmbeddedBackend(EngineConfig(device="cpu", kv_tokens=4096), seed=0)
    held: list[Any] = []
    for index, config in enumerate(configs):
        if side == "engine":
            held.append(backend.load(PolicySpec(f"p{index}", str(folder), 512, config.model_dump(mode="json"))))
        else:
            where = bases if grouped else None
            held.append(
                PolicyTrainer(
                    folder, config=config, total_steps=1, seed=0, device="cpu", dtype=torch.float32, bases=where
                )
            )
    return (status_kib("VmRSS") - before) / 1024


def report(*, quick: bool) -> dict[str, Any]:
    """Everything that is printed."""
    from wingbeat.environments.calculator.tokenizer import write_tokenizer

    started = time.monotonic()
    throughput = {
        f"{policies}x{requests}": measure_throughput(policies, requests, repeats=1 if quick else 3)
        for policies, requests in (THROUGHPUT[1:2] if quick else THROUGHPUT)
    }
    policies = 3 if quick else MEMORY_POLICIES
    memory: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        build_model(SMALL if quick else LARGE).save_pretrained(name)
        write_tokenizer(Path(name))
        for side in ("engine", "trainer"):
            shared, separate = (
                measure_memory(side, grouped=grouped, folder=Path(name), policies=policies) for grouped in (True, False)
            )
            memory[side] = {
                "shared_mib": round(shared, 1),
                "separate_mib": round(separate, 1),
                "ratio": round(shared / separate, 3),
            }
    return {
        "description": DESCRIPTION,
        "quick": quick,
        "machine": describe_machine(),
        "throughput": throughput,
        "memory": {"policies": policies, **memory},
        "elapsed_s": round(time.monotonic() - started, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one figure of each kind, small")
    parser.add_argument("--child", choices=("engine", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--policies", type=int, default=MEMORY_POLICIES, help=argparse.SUPPRESS)
    parser.add_argument("--grouped", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        mib = child(given.child, grouped=given.grouped, folder=given.model, policies=given.policies)
        found: dict[str, Any] = {"mib": mib}
    else:
        found = report(quick=given.quick)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
