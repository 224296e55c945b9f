"""Engine workers of one and of two processes: the same tokens, weights that arrive, turns that move between them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import EngineConfig, PolicyConfig
from wingbeat.core.keys import WORKER_KEY_VARIABLE
from wingbeat.core.lifeline import ORPHANED_EXIT
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import AdapterInfo, Manifest, PinVersion, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import (
    Failed,
    Generate,
    MovedOut,
    MoveOut,
    PolicySpec,
    Shutdown,
    TokenChunk,
    Tokens,
    Welcome,
    WorkerMessage,
)
from wingbeat.environments.calculator.tokenizer import build_tokenizer, write_tokenizer
from wingbeat.weights.publish import WeightPublisher
from wingbeat.workers import tensor_parallel
from wingbeat.workers.engine import EngineWorker
from wingbeat.workers.link import Connected, Inbound
from wingbeat.workers.tensor_parallel import RankGroup, end_worker

pytestmark = pytest.mark.slow
HOST = "this-host"
PROMPT = list(range(1, 40))
TOTAL = 36
VOCABULARY = build_tokenizer().get_vocab_size() // 2 * 2 + 1
"""Odd: the two processes have different parts of the head."""


def build_model(seed: int, *, tied: bool = False, kv_heads: int = 2) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=46, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=8, max_position_embeddings=256, tie_word_embeddings=tied,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


class Worker:
    """An engine worker on a thread, as its link would drive it."""

    def __init__(self, specs: list[PolicySpec], *, size: int) -> None:
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[WorkerMessage] = queue.SimpleQueue()
        own = {"tensor_parallel": size}
        self.worker = EngineWorker(HOST, self._send, self._inbox.put, of_its_own=own)
        settings = EngineConfig(max_running=4, kv_tokens=1024, prefill_tokens=64, device="cpu")
        welcome = Welcome("engine", 1.0, tuple(specs), "run", seed=1, engine=settings.model_dump(mode="json"))
        self.tell(Connected(welcome))
        self._thread = threading.Thread(target=self.worker.run, args=(self._receive,))
        self._thread.start()

    def _send(self, *messages: WorkerMessage) -> None:
        for message in messages:
            self.sent.put(message)

    def _receive(self, *, block: bool) -> list[Inbound]:
        messages = [self._inbox.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def tell(self, *messages: Inbound) -> None:
        for message in messages:
            self._inbox.put(message)

    def until(self, wanted: Callable[[WorkerMessage], Any]) -> Any:
        """What ``wanted`` makes of the first message of which it makes anything."""
        while True:
            message = self.sent.get(timeout=60)
            assert not isinstance(message, Failed), message
            if (found := wanted(message)) not in (None, False):
                return found

    def serve(self, manifest: Manifest, *, pinned: bool = False) -> None:
        self.tell(PinVersion(manifest) if pinned else UpdateWeights(manifest))
        served = self.until(lambda m: m if isinstance(m, WeightsServed) else None)
        assert (served.checksum, served.pinned) == (manifest.checksum, pinned)

    def close(self) -> None:
        self.tell(Shutdown())
        self._thread.join(60)


def publish(folder: Path, policy: str, model: PreTrainedModel, *, base: str, version: int) -> Manifest:
    publisher = WeightPublisher(folder, host_id=HOST, policy=policy)
    tensors = dict(model.named_parameters())  # tied ones once
    return publisher.publish(tensors, version=version, kind="full", base_model=base)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[PolicySpec]:
    """``solver`` with a head of its own, ``tied`` with the embeddings as its head and one KV head for both."""
    found: list[PolicySpec] = []
    for name, model in (("solver", build_model(0)), ("tied", build_model(0, tied=True, kv_heads=1))):
        folder = tmp_path_factory.mktemp(name)
        write_tokenizer(folder)
        model.save_pretrained(folder)
        config = PolicyConfig(model=str(folder), context_tokens=128)
        found.append(PolicySpec(name, str(folder), 128, config.model_dump(mode="json")))
    return found


Deaths = queue.SimpleQueue[tuple[int, int]]
"""Rank and exit code."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[list[RankGroup], Deaths]]:
    """The process groups that workers start, and whose ends they noticed instead of ending themselves."""
    groups: list[RankGroup] = []
    deaths: Deaths = queue.SimpleQueue()

    class Watched(RankGroup):
        def __init__(self, size: int, *, device: torch.device) -> None:
            super().__init__(size, device=device, on_death=lambda rank, code: deaths.put((rank, code)))
            groups.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "RankGroup", Watched)
        patch.setenv(WORKER_KEY_VARIABLE, "secret")
        yield groups, deaths


@pytest.fixture(scope="module")
def workers(specs: list[PolicySpec], ranks: tuple[list[RankGroup], Deaths]) -> Iterator[dict[int, Worker]]:
    found = {size: Worker(specs, size=size) for size in (1, 2)}
    yield found
    for worker in found.values():
        worker.close()


@pytest.fixture(scope="module")
def serving(
    workers: dict[int, Worker], specs: list[PolicySpec], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Worker]:
    """Both workers serve the same version of both policies."""
    folder = tmp_path_factory.mktemp("weights")
    models = {"solver": build_model(1), "tied": build_model(1, tied=True, kv_heads=1)}
    for spec in specs:
        manifest = publish(folder, spec.name, models[spec.name], base=spec.model, version=1)
        for worker in workers.values():
            worker.serve(manifest)
    return workers


class Turn:
    """A greedy generation, wherever it is, with what came of it."""

    def __init__(self, name: str, policy: str = "solver", *, first: int = 0) -> None:
        """``first``: of the prompt, so that no other's KV serves it."""
        self.name, self.policy = name, policy
        self.prompt = [first, *PROMPT]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def begin(self, worker: Worker, *, kv: bytes = b"", total: int = TOTAL, version: int | None = None) -> None:
        prompt = np.asarray([*self.prompt, *self.tokens], "<i4").tobytes()
        left, resumed = total - len(self.tokens), len(self.tokens)
        worker.tell(
            Generate(
                self.name, self.policy, prompt, left, temperature=0.0, stream=True, resumed_tokens=resumed, kv=kv,
                version=version,
            )
        )  # fmt: skip

    def take(self, message: WorkerMessage) -> FinishReason | int | None:
        """The finish, or how many tokens there are."""
        chunks: list[TokenChunk] = list(message.chunks) if isinstance(message, Tokens) else []
        for chunk in (chunk for chunk in chunks if chunk.request_id == self.name):
            assert not chunk.error, chunk
            self.tokens.extend(chunk.token_ids)
            self.logprobs.extend(chunk.logprobs)
            if chunk.finish is not None:
                return chunk.finish
        return len(self.tokens) or None

    def finish(self, worker: Worker) -> None:
        worker.until(lambda m: self.take(m) is FinishReason.LENGTH)

    def leave(self, worker: Worker, *, after: int, with_kv: bool) -> bytes:
        worker.until(lambda m: len(self.tokens) >= after if self.take(m) else None)
        worker.tell(MoveOut(self.name, with_kv=with_kv))

        def moved(message: WorkerMessage) -> MovedOut | None:
            self.take(message)
            return message if isinstance(message, MovedOut) else None

        return worker.until(moved).kv

    def agrees(self, other: Turn) -> None:
        assert self.tokens == other.tokens
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@torch.no_grad()
def reference(model: PreTrainedModel, turn: Turn) -> list[float]:
    """What a plain forward pass says of a turn's tokens."""
    logits_TV = model(input_ids=torch.tensor([[*turn.prompt, *turn.tokens]])).logits[0].log_softmax(-1)
    sampled_T1 = torch.tensor(turn.tokens).unsqueeze(1)
    return logits_TV[len(turn.prompt) - 1 : -1].gather(1, sampled_T1).squeeze(1).tolist()


@pytest.mark.parametrize("policy", ["solver", "tied"])
def test_two_processes_say_what_one_says(serving: dict[int, Worker], policy: str) -> None:
    turns = {size: Turn(f"whole-{policy}-{size}", policy) for size in serving}
    for size, worker in serving.items():
        turns[size].begin(worker)
        turns[size].finish(worker)
        assert worker.worker.heartbeat().stats[policy]["parallelism"] == size
    turns[2].agrees(turns[1])
    model = build_model(1, tied=policy == "tied", kv_heads=1 if policy == "tied" else 2)
    assert turns[2].logprobs == pytest.approx(reference(model, turns[2]), abs=1e-5)


@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("policy", ["solver", "tied"])
def test_a_turn_moves_from_one_process_to_two_and_back(serving: dict[int, Worker], policy: str, with_kv: bool) -> None:
    alone, moving = (Turn(f"{name}-{policy}-{with_kv}", policy, first=50 + with_kv) for name in ("alone", "moving"))
    kv = b""
    for at, (size, after) in enumerate(((1, 7), (2, 18))):
        fed_before = _fed(serving[size], policy)
        moving.begin(serving[size], kv=kv)
        kv = moving.leave(serving[size], after=after, with_kv=with_kv)
        assert bool(kv) == with_kv
        if at:
            assert (_fed(serving[size], policy) - fed_before == 1) == with_kv, "only the last token had no KV"
    moving.begin(serving[1], kv=kv)
    moving.finish(serving[1])
    alone.begin(serving[1])
    alone.finish(serving[1])
    moving.agrees(alone)
    serving[2].tell(MoveOut(moving.name))  # it is gone from there: answered all the same
    assert serving[2].until(lambda m: m if isinstance(m, MovedOut) else None).kv == b""


def _fed(worker: Worker, policy: str) -> float:
    return worker.worker.heartbeat().stats[policy]["prefilled_tokens"]


def test_weights_and_adapters_arrive_at_every_process_while_a_turn_goes_on(
    serving: dict[int, Worker], specs: list[PolicySpec], tmp_path: Path
) -> None:
    worker, spec = serving[2], specs[0]
    turn = Turn("in flight")
    turn.begin(worker, total=80)
    worker.until(lambda m: len(turn.tokens) >= 4 if turn.take(m) else None)
    new = build_model(2)
    worker.tell(UpdateWeights(publish(tmp_path, "solver", new, base=spec.model, version=2)))

    def version(message: WorkerMessage) -> bool:
        turn.take(message)
        return isinstance(message, Tokens) and any(c.version == 2 and c.token_ids for c in message.chunks)

    worker.until(version)
    split = len(turn.tokens) - 1
    turn.finish(worker)
    assert turn.logprobs[split:] == pytest.approx(reference(new, turn)[split:], abs=1e-5)

    adapted, pairs = build_model(0), {}
    for module in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"):
        weight = adapted.get_parameter(f"{module}.weight")
        a, b = torch.randn(2, weight.shape[1]) * 0.2, torch.randn(weight.shape[0], 2) * 0.2
        pairs[f"base_model.model.{module}.lora_A.weight"], pairs[f"base_model.model.{module}.lora_B.weight"] = a, b
        with torch.no_grad():
            weight += 4.0 / 2 * b @ a
    publisher = WeightPublisher(tmp_path / "adapters", host_id=HOST, policy="solver")
    manifest = publisher.publish(
        pairs, version=3, kind="adapter", base_model=spec.model, adapter=AdapterInfo(rank=2, alpha=4.0)
    )
    worker.serve(manifest, pinned=True)  # a second model beside the live one, on the folder's base weights
    pinned = Turn("pinned")
    pinned.begin(worker, version=3)
    pinned.finish(worker)
    assert pinned.logprobs == pytest.approx(reference(adapted, pinned), abs=1e-5)


def test_wrong_weights_are_refused_and_the_old_ones_stay(
    serving: dict[int, Worker], specs: list[PolicySpec], tmp_path: Path
) -> None:
    worker = serving[2]
    before, after = Turn("before"), Turn("after")
    before.begin(worker)
    before.finish(worker)
    wrong = build_model(3)
    wrong.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY - 1, 32))
    worker.tell(UpdateWeights(publish(tmp_path, "solver", wrong, base=specs[0].model, version=9)))
    with pytest.raises(AssertionError, match=r"lm_head\.weight"):
        worker.until(lambda m: isinstance(m, WeightsServed))
    after.begin(worker)
    after.finish(worker)
    after.agrees(before)


def test_a_rank_ends_with_its_worker_and_one_that_ends_is_noticed(
    serving: dict[int, Worker], ranks: tuple[list[RankGroup], Deaths]
) -> None:
    """The system closes the pipes of a worker that dies; here it lives on and sees the rank's end.  The last test."""
    (group,), deaths = ranks
    process = group._processes[0]  # pyright: ignore[reportPrivateUsage] - its stdin is what nobody but the worker holds
    assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes(), "a rank needs no key"
    assert process.stdin is not None and deaths.empty()
    process.stdin.close()
    assert deaths.get(timeout=60) == (1, ORPHANED_EXIT)


def test_the_end_of_a_rank_is_the_workers_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    end_worker(1, -9)
    assert codes == [1]
    assert "tensor parallel rank 1 ended with exit code -9" in caplog.text
