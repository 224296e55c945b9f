"""Policies of a LoRA group on one engine worker: one base model, and each policy's own weights, versions and ends."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import EngineConfig, PolicyConfig
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import AdapterInfo, Manifest, PinVersion, UnpinVersion, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import Abort, Failed, Generate, PolicySpec, Shutdown, Tokens, Welcome, WorkerMessage
from wingbeat.environments.calculator.tokenizer import write_tokenizer
from wingbeat.trainer.shared_base import SharedBases
from wingbeat.trainer.single import PolicyTrainer
from wingbeat.weights.publish import WeightPublisher
from wingbeat.workers import hosting
from wingbeat.workers.engine import EngineWorker
from wingbeat.workers.link import Connected, Inbound

RANKS = {"planner": 4, "coder": 8}
PROMPT = [3, 5, 7, 11, 2]


class Group:
    """Two trained policies and a frozen one over one base, an engine worker that hosts them, and the truth."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self.folder = folder
        write_tokenizer(folder)
        torch.manual_seed(0)
        shape = Qwen3Config(
            vocab_size=384, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.base = Qwen3ForCausalLM(shape).eval()
        self.base.save_pretrained(folder)
        configs = {name: self.config(rank) for name, rank in RANKS.items()} | {"judge": self.config(1, trainable=False)}
        self.specs = tuple(
            PolicySpec(name, str(folder), config.context_tokens, config.model_dump(mode="json"))
            for name, config in configs.items()
        )
        bases = SharedBases()
        self.trainers = {
            name: PolicyTrainer(
                folder, config=configs[name], total_steps=1, seed=1, device="cpu", dtype=torch.float32, bases=bases
            )
            for name in RANKS
        }
        self._publishers = {name: WeightPublisher(weights, host_id="here", policy=name) for name in RANKS}
        self.sent: list[WorkerMessage] = []
        self._own: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        """What the worker tells itself."""
        self.worker = EngineWorker("here", lambda *messages: self.sent.extend(messages), self._own.put)

    def config(self, rank: int, **more: Any) -> PolicyConfig:
        lora = {"rank": rank, "alpha": 8.0, "group": "team"}
        context = 64 if rank == 4 else 48
        return PolicyConfig.model_validate({"model": str(self.folder), "context_tokens": context, "lora": lora} | more)

    def publish(self, policy: str, version: int, *, scale: float = 0.2) -> Manifest:
        """Other weights than before, unless ``scale`` is 0."""
        torch.manual_seed(version)
        trainer = self.trainers[policy]
        for tensor in trainer.published_tensors().values():
            tensor.data.copy_(torch.randn_like(tensor) * scale if scale else tensor)
        return self._publishers[policy].publish(
            trainer.published_tensors(),
            version=version,
            kind="adapter",
            base_model=str(self.folder),
            adapter=AdapterInfo(RANKS[policy], 8.0),
        )

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()

    def play(self, *script: Callable[[], Sequence[Inbound]]) -> None:
        """Each entry makes messages; the next one's turn comes when the worker has nothing left to do."""
        settings = EngineConfig(max_running=8, kv_tokens=1024, prefill_tokens=64).model_dump(mode="json")
        welcome = Welcome("engine-0", 1.0, self.specs, "run", seed=1, engine=settings)
        turns = iter([lambda: [Connected(welcome)], *script])

        def receive(*, block: bool) -> list[Inbound]:
            if self.worker.receiving.is_busy:  # weights come between two entries of the script
                return [self._own.get(timeout=20)]
            return list(next(turns, lambda: [Shutdown()])()) if block else []

        self.worker.run(receive)

    def reply(self, request_id: str) -> tuple[list[int], list[float], list[int], FinishReason | None]:
        """Tokens, logprobs and versions of a request, and how it ended."""
        chunks = [c for m in self.sent if isinstance(m, Tokens) for c in m.chunks if c.request_id == request_id]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        versions = [chunk.version for chunk in chunks for _ in chunk.token_ids]
        return tokens, logprobs, versions, chunks[-1].finish if chunks else None

    @torch.no_grad()
    def truth(self, model: Any, tokens: Sequence[int]) -> list[float]:
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0].float()
        picked = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        return picked[:, 0].tolist()

    def agrees(self, request_id: str, model: Any, *, version: int) -> None:
        tokens, logprobs, versions, finish = self.reply(request_id)
        assert finish is FinishReason.LENGTH and versions == [version] * len(tokens) and tokens
        assert np.allclose(logprobs, self.truth(model, tokens), atol=1e-5)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "model", tmp_path / "weights")
    yield made
    made.close()


def ask(policy: str, name: str, *, version: int | None = None, tokens: int = 6) -> Generate:
    prompt = np.array(PROMPT, "<i4").tobytes()
    return Generate(name, policy, prompt, max_tokens=tokens, version=version)


def base(group: Group) -> Manifest:
    return Manifest("judge", 0, "full", "", "", "base", 0, (), str(group.folder))


def test_all_policies_of_a_group_and_their_pinned_versions_share_one_model(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = hosting.load_model
    monkeypatch.setattr(hosting, "load_model", lambda source, **how: loads.append(source) or load(source, **how))
    versions: dict[str, Manifest] = {}
    old: list[Any] = []
    held: list[int] = []

    def adapters() -> int:
        """How many the engine holds."""
        return len(shared()["team"].engine._adapters._columns)

    def shared() -> dict[str, Any]:
        return group.worker._backend._shared  # type: ignore[union-attr]

    def first() -> list[Inbound]:
        versions.update({name: group.publish(name, 0) for name in RANKS})
        return [*(UpdateWeights(manifest) for manifest in versions.values()), UpdateWeights(base(group))]

    def pinned() -> list[Inbound]:
        return [
            *(ask(name, f"{name}-0") for name in (*RANKS, "judge")),
            PinVersion(versions["planner"]),
        ]

    def swapped() -> list[Inbound]:
        group.agrees("planner-0", group.trainers["planner"].model, version=0)
        group.agrees("coder-0", group.trainers["coder"].model, version=0)
        group.agrees("judge-0", group.base, version=0)
        return [ask("planner", "old-before", version=0)]

    def after() -> list[Inbound]:
        group.agrees("old-before", group.trainers["planner"].model, version=0)
        old.append(copy.deepcopy(group.trainers["planner"].model))
        return [UpdateWeights(group.publish("planner", 7))]

    def asked_again() -> list[Inbound]:
        held.append(adapters())
        again = [ask(name, f"{name}-1") for name in (*RANKS, "judge")]
        return [*again, ask("planner", "old-after", version=0, tokens=1)]

    def unpinned() -> list[Inbound]:
        held.append(adapters())
        return []

    group.play(first, pinned, swapped, after, asked_again, lambda: [UnpinVersion("planner", 0)], unpinned)
    assert held == [4, 3], "a version that is no longer pinned takes nothing"
    assert shared() == {}, "nor does an engine without policies"
    assert [message for message in group.sent if isinstance(message, Failed)] == []
    assert loads == [str(group.folder)], "one base model for two policies, a frozen one and a pinned version"
    group.agrees("planner-1", group.trainers["planner"].model, version=7)
    group.agrees("coder-1", group.trainers["coder"].model, version=0)
    group.agrees("judge-1", group.base, version=0)
    group.agrees("old-after", old[0], version=0)
    served = [(m.policy, m.version, m.pinned) for m in group.sent if isinstance(m, WeightsServed)]
    assert set(served) == {
        *(("planner", 0, False), ("coder", 0, False), ("judge", 0, False)),
        *(("planner", 0, True), ("planner", 7, False)),
    }


def test_a_policy_that_cannot_go_on_leaves_the_others_alone(group: Group) -> None:
    """Weights that are not finite, an abort, a version that is released: nobody else notices."""

    def first() -> list[Inbound]:
        manifests = [group.publish(name, 0) for name in RANKS]
        return [*map(UpdateWeights, manifests), PinVersion(manifests[0])]

    def broken() -> list[Inbound]:
        kept = {name: tensor.clone() for name, tensor in group.trainers["planner"].published_tensors().items()}
        bad = group.publish("planner", 1, scale=float("nan"))
        for name, tensor in group.trainers["planner"].published_tensors().items():
            tensor.data.copy_(kept[name])
        return [
            ask("planner", "released", version=0, tokens=30),
            ask("planner", "aborted", tokens=30),
            ask("planner", "goes-on"),
            ask("coder", "other"),
            UpdateWeights(bad),
            UnpinVersion("planner", 0),
            Abort("aborted"),
        ]

    group.play(first, broken)
    (failed,) = [message for message in group.sent if isinstance(message, Failed)]
    assert (failed.policy, failed.command) == ("planner", "update_weights") and "not finite" in failed.error
    group.agrees("goes-on", group.trainers["planner"].model, version=0)
    group.agrees("other", group.trainers["coder"].model, version=0)
    assert group.reply("aborted")[3] is FinishReason.ABORT
    assert group.reply("released")[3] is FinishReason.ERROR


def test_a_snapshot_goes_from_the_base_model_to_an_adapter_while_it_answers(group: Group) -> None:
    """And what it computed before is computed again, as with any new weights."""

    def first() -> list[Inbound]:
        return [UpdateWeights(group.publish("planner", 0)), UpdateWeights(base(group))]

    def snapshot() -> list[Inbound]:
        taken = msgspec.structs.replace(group.publish("planner", 4), policy="judge")
        return [ask("judge", "long", tokens=40), UpdateWeights(taken)]

    def back() -> list[Inbound]:
        group.agrees("after", group.trainers["planner"].model, version=4)
        return [UpdateWeights(base(group))]

    group.play(first, snapshot, lambda: [ask("judge", "after")], back, lambda: [ask("judge", "again")])
    tokens, logprobs, versions, _ = group.reply("long")
    cut = versions.index(4)
    assert 0 < cut < 40 and versions == [0] * cut + [4] * (40 - cut)
    expected = [*group.truth(group.base, tokens)[:cut], *group.truth(group.trainers["planner"].model, tokens)[cut:]]
    assert np.allclose(logprobs, expected, atol=1e-5)
    group.agrees("again", group.base, version=0)


def test_each_policy_reports_its_own_work(group: Group) -> None:
    def first() -> list[Inbound]:
        return [*(UpdateWeights(group.publish(name, 3)) for name in RANKS), UpdateWeights(base(group))]

    stats: dict[str, dict[str, float]] = {}

    def look() -> list[Inbound]:
        stats.update(group.worker.heartbeat().stats)
        return [Shutdown()]

    group.play(first, lambda: [ask("planner", "a"), ask("coder", "b", tokens=4), ask("coder", "c", tokens=4)], look)
    assert {name: (s["sampled_tokens"], s["running"], s["policy_version"]) for name, s in stats.items()} == {
        "planner": (6.0, 0.0, 3.0),
        "coder": (8.0, 0.0, 3.0),
        "judge": (0.0, 0.0, 0.0),
    }
    assert sum(s["prefilled_tokens"] for s in stats.values()) == 3 * len(PROMPT)


def test_a_group_takes_adapters_only_and_contexts_that_fit(group: Group) -> None:
    full = group.publish("coder", 0)

    def first() -> list[Inbound]:
        return [UpdateWeights(msgspec.structs.replace(full, kind="full", adapter=None))]

    long = PolicySpec("planner", str(group.folder), 2048, group.specs[0].config)
    group.specs = (long, *group.specs[1:])
    group.play(first, lambda: [UpdateWeights(group.publish("planner", 0))])
    errors = {message.policy: message.error for message in group.sent if isinstance(message, Failed)}
    assert "can only serve adapters" in errors["coder"]
    assert "policies.planner.context_tokens must be at most" in errors["planner"]
