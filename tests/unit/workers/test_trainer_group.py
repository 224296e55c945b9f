"""One trainer process for the policies of a LoRA group: it says and does of each what a process alone would."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import PolicyConfig
from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.worker_protocol import (
    BeginLineage,
    CheckpointSaved,
    Failed,
    PolicySpec,
    Published,
    SaveCheckpoint,
    Shutdown,
    StepDone,
    TrainerReady,
    TrainStep,
    Welcome,
    WorkerMessage,
)
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.trainer import shared_base
from wingbeat.workers import trainer
from wingbeat.workers.link import Connected, Inbound
from wingbeat.workers.trainer import TrainerWorker

RANKS = {"planner": 2, "coder": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=384, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    return folder


def spec(folder: Path, name: str, *, group: str | None) -> PolicySpec:
    lora = {"rank": RANKS[name], "alpha": 4.0, "group": group}
    trainer = {"learning_rate": 1e-2, "device": "cpu"}
    policy = PolicyConfig.model_validate({"model": str(folder), "context_tokens": 64, "trainer": trainer, "lora": lora})
    return PolicySpec(name, str(folder), 64, policy.model_dump(mode="json"))


def batch(policy: str, step: int, *, lineage: int = 0, empty: bool = False) -> TrainStep:
    """Two episodes of a group, of rewards 0 and 1."""
    rng = np.random.default_rng(step)
    episodes: list[EpisodeSamples] = []
    for member in range(0 if empty else 2):
        sample = TrainingSample.build(
            f"{step}-{member}",
            token_ids=rng.integers(0, 96, 6).astype(np.int32),
            sampled=np.array([0, 0, 1, 1, 1, 1], np.uint8),
            sampling_logprobs=np.array([0, 0, -4, -4, -4, -4], np.float32),
            versions=np.array([-1, -1, *[step - 1] * 4], np.int32),
        )
        episodes.append(EpisodeSamples(f"{step}-{member}", 1, f"g{step}", policy, "", float(member), (sample,)))
    return TrainStep(TrainingBatch(f"{policy}-{step}", policy, step, tuple(episodes), seed=step, lineage=lineage))


class Process:
    """A trainer process of a run that is played a script, one entry whenever it has nothing to do."""

    def __init__(self, run_dir: Path, *specs: PolicySpec) -> None:
        self.sent: list[WorkerMessage] = []
        own: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self._own = own
        self._worker = TrainerWorker("host", lambda *messages: self.sent.extend(messages), own.put)
        self._welcome = Connected(Welcome("trainer", 1.0, specs, str(run_dir), seed=1, total_steps=10))

    def play(self, *script: Sequence[Inbound]) -> None:
        turns: Iterator[Sequence[Inbound]] = iter([[self._welcome], *script, [Shutdown()]])

        def receive(*, block: bool) -> list[Inbound]:
            busy = any(hosted.publishing.is_busy for hosted in self._worker._hosted.values())
            if busy or not self._own.empty():
                return [self._own.get(timeout=20)] if block else []
            return list(next(turns)) if block else []

        self._worker.run(receive)

    def of(self, kind: type, policy: str) -> list[Any]:
        return [m for m in self.sent if isinstance(m, kind) and getattr(m, "policy", None) == policy]

    def checksums(self, policy: str) -> list[str]:
        ready = [message.manifest.checksum for message in self.of(TrainerReady, policy)]
        return ready + [message.manifest.checksum for message in self.of(Published, policy)]


@pytest.fixture
def process(folder: Path, tmp_path: Path) -> Callable[..., Process]:
    def make(*names: str, group: str | None = "team", run: str = "run") -> Process:
        return Process(tmp_path / run, *(spec(folder, name, group=group) for name in names))

    return make


def test_each_policy_of_a_group_becomes_what_it_would_alone(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Path] = []
    load = shared_base.load_model
    monkeypatch.setattr(shared_base, "load_model", lambda source, **how: loads.append(source) or load(source, **how))
    together = process(*RANKS)
    together.play(
        [batch("planner", 1), batch("planner", 2), batch("planner", 3), batch("coder", 1), batch("coder", 2)],
        [SaveCheckpoint("coder", 2)],
    )
    assert len(loads) == 1, "one base model"
    order = [(message.policy, message.step) for message in together.sent if isinstance(message, StepDone)]
    assert order == [("planner", 1), ("coder", 1), ("planner", 2), ("coder", 2), ("planner", 3)]
    for name, steps in (("planner", 3), ("coder", 2)):
        alone = process(name, group=None, run=f"alone-{name}")
        alone.play(*([batch(name, step)] for step in range(1, steps + 1)))
        assert set(alone.checksums(name)) >= set(together.checksums(name))
        assert alone.checksums(name)[-1] == together.checksums(name)[-1]
        for one, other in zip(alone.of(StepDone, name), together.of(StepDone, name), strict=True):
            assert one.metrics["grad_norm"] == other.metrics["grad_norm"]
    (saved,) = together.of(CheckpointSaved, "coder")
    again = process(*RANKS)
    again.play()
    assert [m.step for name in RANKS for m in again.of(TrainerReady, name)] == [0, 2]
    assert set(again.checksums("coder")) == {together.checksums("coder")[-1]}
    assert Path(saved.path).parent.name == "coder"


def test_what_fails_or_goes_back_is_one_policy(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a policy that begins again has let go of what it was: two may not fit into memory."""
    built: list[weakref.ref[Any]] = []
    alive: list[int] = []
    build = trainer.build_trainer

    def watched(*arguments: Any, **how: Any) -> Any:
        alive.append(sum(made() is not None for made in built))
        found = build(*arguments, **how)
        built.append(weakref.ref(found))
        return found

    monkeypatch.setattr(trainer, "build_trainer", watched)
    monkeypatch.setattr(trainer.logger, "disabled", True)  # pytest keeps what is logged, tracebacks and all
    group = process(*RANKS)
    group.play(
        [batch("planner", 1), batch("coder", 1)],
        [batch("planner", 2, empty=True), batch("coder", 2), SaveCheckpoint("planner", 1)],
        [BeginLineage("planner", 1)],
        [batch("planner", 1, lineage=1), batch("coder", 3)],
    )
    assert [m.command for m in group.of(Failed, "planner")] == ["train_step", "save_checkpoint"]
    assert alive == [0, 1, 1]
    assert group.of(Failed, "coder") == []
    assert [m.step for m in group.of(StepDone, "coder")] == [1, 2, 3]
    fresh, back = group.of(TrainerReady, "planner")
    assert (back.step, back.manifest.lineage, back.manifest.checksum) == (0, 1, fresh.manifest.checksum)
    assert len(group.of(TrainerReady, "coder")) == 1
    alone = process("coder", group=None, run="alone")
    alone.play(*([batch("coder", step)] for step in (1, 2, 3)))
    assert alone.checksums("coder")[-1] == group.checksums("coder")[-1]
