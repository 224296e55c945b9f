"""Control's parts without a network: real book, ledger and graphs, engines and trainers that are plain callables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from wingbeat.core.config import Config, PolicyConfig
from wingbeat.core.events import EventLog
from wingbeat.core.types import Split, Task
from wingbeat.core.worker_protocol import ControlMessage, Manifest, PolicySpec, TokenChunk, WeightsServed
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.staleness import StalenessGate
from wingbeat.server.engines import EngineLink, EnginePool
from wingbeat.server.episodes import EpisodeRegistry, OpenEpisode
from wingbeat.server.evaluations import EvaluationParts, Evaluations
from wingbeat.server.finishing import Finishing, FinishingParts
from wingbeat.server.gateway import Gateway
from wingbeat.server.keys import RoleKeys
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies import HostContext, PolicyHost
from wingbeat.server.rollouts import RolloutParts, Rollouts
from wingbeat.server.signals import Changed, OverlapMeter
from wingbeat.tracking.formats import DEEPSEEK_CALL, DEEPSEEK_CALLS, DEEPSEEK_SEPARATOR, THINK
from wingbeat.tracking.template import ChatTemplate

CHATML = (
    "{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
FAMILIES = {
    "hermes": (CHATML, MARKED),
    "opened": (CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), MARKED),
    "llama3": (CHATML, ("<|python_tag|>",)),
    "mistral": (CHATML + "{# [TOOL_CALLS] #}", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")),
    "deepseek": (
        CHATML + f"{{# {DEEPSEEK_CALLS[0]} #}}",
        (*THINK, *DEEPSEEK_CALLS, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR),
    ),
    "harmony": (
        CHATML + "{# <|channel|> #}",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
}


@dataclass
class ManualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def write_folder(folder: Path, source: str, plain: tuple[str, ...]) -> Path:
    """A byte-level tokenizer without merges: every byte is a token, so that any split of a text can be sampled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    root = tmp_path_factory.mktemp("families")
    return {name: ChatTemplate.load(write_folder(root / name, *parts)) for name, parts in FAMILIES.items()}


@pytest.fixture(scope="session")
def template(templates: dict[str, ChatTemplate]) -> ChatTemplate:
    return templates["hermes"]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def manifest(version: int, *, policy: str = "solver", checksum: str | None = None) -> Manifest:
    return Manifest(
        policy, version, "full", f"/weights/{version}", "host", checksum or f"sum-{version}", 1, (), base_model="base"
    )


@pytest.fixture(scope="session")
def make_manifest() -> Callable[..., Manifest]:
    return manifest


class FakeEngine:
    """An engine link that records what it is sent and answers as the test says."""

    def __init__(self, pool: EnginePool, name: str = "engine-0") -> None:
        self.pool = pool
        self.sent: list[ControlMessage] = []
        self.link = EngineLink(name, "host", self.sent.append)
        pool.join(self.link)

    def serve(self, version: int = 0, *, policy: str = "solver", pinned: bool = False) -> None:
        self.pool.served(self.link, WeightsServed(policy, version, f"sum-{version}", pinned))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def say(self, request_id: str, *tokens: int, version: int = 0, finish: Any = None, error: str = "") -> None:
        chunk = TokenChunk(request_id, tokens, tuple(-0.5 for _ in tokens), version, finish, error)
        self.pool.receive(self.link, [chunk])

    def leave(self) -> None:
        self.pool.leave(self.link)


@pytest.fixture
def join_engine() -> type[FakeEngine]:
    return FakeEngine


@dataclass
class Desk:
    """All parts of control that need neither a socket nor a process."""

    config: Config
    clock: ManualClock
    ledger: Ledger
    events: EventLog
    engines: EnginePool
    book: GroupBook
    dealer: TaskDealer
    registry: EpisodeRegistry
    policies: dict[str, PolicyHost]
    changed: Changed
    overlap: OverlapMeter
    metrics: ControlMetrics
    writes: list[Future[Any]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    """The turns that were made durable, in order."""
    complete: bool = False
    stopping: bool = False

    def __post_init__(self) -> None:
        self.events.subscribe(self.log.append)
        shared = (self.policies, self.dealer, self.ledger, self.events, self.changed, self.writes.append)
        self.evaluations = Evaluations(EvaluationParts(*shared))
        self.rollouts = Rollouts(
            RolloutParts(
                config=self.config,
                policies=self.policies,
                book=self.book,
                dealer=self.dealer,
                ledger=self.ledger,
                registry=self.registry,
                evaluations=self.evaluations,
                events=self.events,
                metrics=self.metrics,
                changed=self.changed,
                watch=self.writes.append,
                is_complete=lambda: self.complete,
                is_stopping=lambda: self.stopping,
                blockers=lambda: ["a blocker"],
                clock=self.clock,
            )
        )
        self.finishing = Finishing(
            FinishingParts(
                policies=self.policies,
                book=self.book,
                ledger=self.ledger,
                registry=self.registry,
                evaluations=self.evaluations,
                engines=self.engines,
                events=self.events,
                metrics=self.metrics,
                changed=self.changed,
                watch=self.writes.append,
                on_closed=self.rollouts.forget_groups,
            )
        )
        self.gateway = Gateway(
            self.policies, self.engines, self.metrics, capture=lambda episode, turn: self.captured.append(turn.turn_id)
        )

    @property
    def solver(self) -> PolicyHost:
        return self.policies["solver"]

    def check_writes(self) -> None:
        """Every ledger write so far succeeded."""
        for write in self.writes:
            write.result(timeout=10)

    def episode(self, episode_id: str) -> OpenEpisode:
        found = self.registry.current(episode_id)
        assert found is not None
        return found


@pytest.fixture
def open_desk(tmp_path: Path, template: ChatTemplate, clock: ManualClock) -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def build(
        *,
        policies: dict[str, dict[str, Any]] | None = None,
        steps: int = 10,
        server: dict[str, Any] | None = None,
        **dataflow: Any,
    ) -> Desk:
        settings = {"group_size": 2, "groups_per_step": 1, "max_staleness": 1, "straggler_wait_s": 5.0, **dataflow}
        models = {name: {"model": "m", **more} for name, more in (policies or {"solver": {}}).items()}
        config = Config.model_validate(
            {
                "run": {"steps": steps},
                "policies": models,
                "dataflow": settings,
                "server": {"begin_wait_s": 0, "heartbeat_s": 1, "idle_timeout_s": 100, **(server or {})},
            }
        )
        desk = _desk(config, tmp_path / f"desk-{len(desks)}", template, clock)
        desks.append(desk)
        return desk

    yield build
    for desk in desks:
        desk.ledger.close()
        desk.events.close()


def _context_tokens(policy: PolicyConfig) -> int:
    """Few, where the test does not say how many."""
    return policy.context_tokens if "context_tokens" in policy.model_fields_set else 64


def _desk(config: Config, folder: Path, template: ChatTemplate, clock: ManualClock) -> Desk:
    folder.mkdir()
    ledger = Ledger.open(folder / "ledger.sqlite", run=RunMeta("run", seed=0))
    dataflow = config.dataflow
    book = GroupBook(
        max_attempts=dataflow.max_attempts,
        group_floor=dataflow.group_floor,
        group_deadline_s=dataflow.group_deadline_s,
        clock=clock,
    )
    changed, overlap = Changed(), OverlapMeter(clock)
    events = EventLog(None, clock=clock)
    engines = EnginePool(wait_s=5.0, on_activity=overlap.generating)
    writes: list[Future[Any]] = []
    context = HostContext(
        ledger, engines, events, overlap, changed, writes.append, seed=3, total_steps=config.run.steps, clock=clock
    )
    policies = {
        name: PolicyHost(
            PolicySpec(name, "base", _context_tokens(policy), policy.model_dump(mode="json")),
            template=template,
            buffer=PolicyBuffer(name, groups_per_step=dataflow.groups_per_step, max_staleness=dataflow.max_staleness),
            gate=StalenessGate(dataflow.max_staleness, dataflow.groups_per_step),
            context=context,
            running_floors=book.floors,
            straggler_wait_s=dataflow.straggler_wait_s,
        )
        for name, policy in config.policies.items()
    }
    dealer = TaskDealer(0)
    dealer.add_source("src", Split.TRAIN, [Task("src", f"t{i}") for i in range(4)])
    dealer.add_source("src", Split.EVAL, [Task("src", f"e{i}") for i in range(2)])
    return Desk(
        config=config,
        clock=clock,
        ledger=ledger,
        events=events,
        engines=engines,
        book=book,
        dealer=dealer,
        registry=EpisodeRegistry(RoleKeys.of(None, "worker-key"), clock=clock),
        policies=policies,
        changed=changed,
        overlap=overlap,
        metrics=ControlMetrics(),
        writes=writes,
    )
