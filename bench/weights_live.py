"""What a swap of weights costs running requests: part of ``python -m bench.weights --live``.

Eight requests decode while new weights are served, as an engine worker does it.  The *pause* of a request is what the
reader of its stream sees: the longest silence from its last token before the swap began to its first under the new
weights, beyond the median time between two arrivals.  Tokens of the old weights that were on their way when the swap
began end a silence like all others.  KV is recomputed, so the pause contains a prefill.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import EngineConfig, PolicyConfig
from wingbeat.core.errors import UnavailableError, WingbeatError
from wingbeat.core.ports import GenerateRequest
from wingbeat.core.types import SamplingParams
from wingbeat.core.worker_protocol import PolicySpec, Welcome
from wingbeat.environments.calculator.tokenizer import build_tokenizer, write_tokenizer
from wingbeat.weights.publish import WeightPublisher
from wingbeat.weights.receive import receive
from wingbeat.workers.backends import build_backend
from wingbeat.workers.hosting import ModelHost
from wingbeat.workers.receiving import Prepares

HOST = "bench"
STREAMS = 8
TOKENS_BEFORE = 40
TOKENS_AFTER = 20
PROMPT_TOKENS = 64
CONTEXT_TOKENS = 3072
BARS_MS = {"embedded": 50.0, "vllm": 100.0}

Arrivals = dict[str, list[tuple[float, int]]]
"""By request: when each token came (seconds), and under which version."""


def measure_pauses(*, quick: bool) -> dict[str, Any]:
    """``pause_ms`` and its bars; a reason in place of a figure where vLLM is not installed."""
    updates = 3 if quick else 12
    with tempfile.TemporaryDirectory() as folder:
        model = _write_model(Path(folder) / "model")
        pauses: dict[str, Any] = {"embedded": _measure(Path(folder), model, updates, {"backend": "embedded"})}
        try:
            from bench.engine_versus_vllm import find_python

            settings = {"backend": "vllm", "vllm": {"python": find_python()}}
            pauses["vllm"] = _measure(Path(folder), model, updates, settings)
        except (SystemExit, WingbeatError) as error:
            pauses["vllm"] = f"not measured: {error}"
    measured = {name: pause for name, pause in pauses.items() if isinstance(pause, float)}
    return {
        "pause_ms": pauses,
        "pause_description": f"{__doc__}".partition("\n\n")[2].replace("\n", " ").strip()
        + f" The median over {updates} updates of the tiny model of the worst of {STREAMS} requests.",
        "bars": {f"pause_ms.{name} <= {BARS_MS[name]:g}": pause <= BARS_MS[name] for name, pause in measured.items()},
    }


def _measure(folder: Path, model: PreTrainedModel, updates: int, engine: Mapping[str, Any]) -> float:
    """Milliseconds."""
    source = str(folder / "model")
    config = EngineConfig.model_validate({"kv_tokens": 32768, "max_running": 16, "threads": 1, **engine})
    policy = PolicyConfig(model=source, context_tokens=CONTEXT_TOKENS)
    spec = PolicySpec("policy", source, CONTEXT_TOKENS, policy.model_dump(mode="json"))
    welcome = Welcome("engine-0", 1.0, (spec,), str(folder), seed=0, engine=config.model_dump(mode="json"))
    backend = build_backend(welcome, send=lambda message: None)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        host = backend.load(spec)
        name = str(engine["backend"])
        with WeightPublisher(folder / f"weights-{name}", host_id=HOST, policy="policy") as publisher:
            found: list[float] = []
            for version in range(1, 3 * updates + 1):
                for tensor in tensors.values():
                    tensor.add_(torch.randn_like(tensor), alpha=1e-3)
                manifest = publisher.publish(tensors, version=version, kind="full", base_model=source)
                pause = _pause_of_update(host, version, manifest)
                if pause is not None and version > 1:  # the first update of a process warms it up
                    found.append(pause)
                if len(found) == updates:
                    break
        host.close()
    finally:
        backend.close()
    if not found:
        raise UnavailableError("the requests always ended before the update: the machine is too busy to measure")
    return round(statistics.median(found) * 1e3, 2)


def _pause_of_update(host: ModelHost, version: int, manifest: Any) -> float | None:
    """Seconds: that of the worst request.  None where the requests ended first, as on a machine where vLLM's own server
    gets no turn while its engine goes on."""
    arrivals: Arrivals = defaultdict(list)
    names = [f"v{version}-{i}" for i in range(STREAMS)]
    budget = CONTEXT_TOKENS - PROMPT_TOKENS
    for i, request_id in enumerate(names):
        prompt = [(7 * i + position) % 100 + 1 for position in range(PROMPT_TOKENS)]
        host.submit(GenerateRequest(request_id, prompt, SamplingParams(max_tokens=budget)))
    while min(len(arrivals[name]) for name in names) < TOKENS_BEFORE:
        _step(host, arrivals)
    with ThreadPoolExecutor(1) as thread:  # as an engine worker does it
        mapped = thread.submit(receive, manifest, host_id=HOST)
        while not mapped.done():
            _step(host, arrivals)
    received = mapped.result()
    while isinstance(host, Prepares) and not host.prepare(manifest, received):
        _step(host, arrivals)
    began = time.perf_counter()
    host.serve(manifest, received)
    while host.has_work() and min(sum(of == version for _, of in arrivals[name]) for name in names) < TOKENS_AFTER:
        _step(host, arrivals)
    for name in names:
        host.abort(name)
    while host.has_work():
        host.step()
    if any(all(of != version for _, of in arrivals[name]) for name in names):
        return None
    return max(_pause(arrivals[name], version, began) for name in names)


def _step(host: ModelHost, arrivals: Arrivals) -> None:
    for event in host.step():
        now = time.perf_counter()
        arrivals[event.request_id] += [(now, event.policy_version)] * len(event.token_ids)


def _pause(tokens: list[tuple[float, int]], version: int, began: float) -> float:
    """Seconds.  Tokens that arrive together, as on a busy machine, are one arrival."""
    times = sorted({at for at, _ in tokens})
    before = [at for at in times if at <= began]
    first = next(at for at, of in tokens if of == version)
    silences = [
        later - earlier for earlier, later in itertools.pairwise(at for at in times if before[-1] <= at <= first)
    ]
    usual = [later - earlier for earlier, later in itertools.pairwise(before)]
    return max(0.0, max(silences) - (statistics.median(usual) if usual else 0.0))


def _write_model(folder: Path) -> PreTrainedModel:
    """Two layers, heads of a size that vLLM serves on a CPU."""
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=build_tokenizer().get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model
