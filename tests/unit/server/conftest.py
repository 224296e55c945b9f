"""Control's parts without a network: real book, ledger and graphs, engines and trainers that are plain callables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from wingbeat.core.config import Config, PolicyConfig
from wingbeat.core.events import EventLog
from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.core.signals import Changed
from wingbeat.core.types import FinishReason, Outcome, SamplingParams, Split, Task
from wingbeat.core.weight_protocol import Manifest, Published, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import (
    BeginLineage,
    ControlMessage,
    Failed,
    Generate,
    PolicySpec,
    StepDone,
    TokenChunk,
    TrainerReady,
    TrainStep,
)
from wingbeat.dataflow.barrier import Barrier
from wingbeat.dataflow.buffer import PolicyBuffer
from wingbeat.dataflow.dealer import TaskDealer
from wingbeat.dataflow.groups import GroupBook
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.operators import build_chain
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec
from wingbeat.dataflow.step_rule import StepRule
from wingbeat.server.assembly import make_finishing, make_teams, make_variants
from wingbeat.server.calls.flights import EngineLink
from wingbeat.server.calls.gateway import Gateway
from wingbeat.server.collect.conversations import CollectedEpisode
from wingbeat.server.collect.setup import make_collecting
from wingbeat.server.episodes.endings import Endings
from wingbeat.server.episodes.evaluations import EvaluationParts, Evaluations
from wingbeat.server.episodes.recovery import dump_noted_turn
from wingbeat.server.episodes.registry import EpisodeRegistry, OpenEpisode
from wingbeat.server.episodes.rollout_parts import RolloutParts
from wingbeat.server.episodes.rollouts import Rollouts
from wingbeat.server.keys.ring import KeyRing
from wingbeat.server.limits import Limits
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.overlap import OverlapMeter
from wingbeat.server.policies.host import HostContext, PolicyHost
from wingbeat.server.restore import restore_run
from wingbeat.server.teams.transactions import TransactionState
from wingbeat.server.workers.engines import EnginePool
from wingbeat.tracking.formats import DEEPSEEK_CALL, DEEPSEEK_CALLS, DEEPSEEK_SEPARATOR, THINK
from wingbeat.tracking.messages import Message
from wingbeat.tracking.template import ChatTemplate
from wingbeat.tracking.turns import Turn

sys.path.insert(0, str(Path(__file__).parent))  # `episode_reference`: test folders are no packages

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
    checksum = checksum or f"sum-{version}"
    return Manifest(
        policy, version, "full", f"/weights/{version}-{checksum}", "host", checksum, 1, (), base_model="base"
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

    def serve(self, version: int = 0, *, policy: str = "solver", pinned: bool = False, lineage: int = 0) -> None:
        """Acknowledge a version, with the checksum that it was told, if it was."""
        told = [m.manifest for m in self.of(UpdateWeights) if m.manifest.policy == policy]
        checksums = {(m.lineage, m.version): m.checksum for m in told}
        checksum = checksums.get((lineage, version), f"sum-{version}")
        self.pool.served(self.link, WeightsServed(policy, version, checksum, pinned, lineage))

    def catch_up(self, policy: str = "solver") -> None:
        """Serve whatever it is told, until that is the newest."""
        while (loading := self.link.loading.get(policy)) is not None:
            self.serve(loading.version, policy=policy, lineage=loading.lineage)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def generated(self) -> list[str]:
        """Ids of the requests that it was given."""
        return [message.request_id for message in self.of(Generate)]

    def say(
        self,
        request_id: str,
        *tokens: int,
        version: int = 0,
        finish: Any = None,
        error: str = "",
        lineage: int = 0,
    ) -> None:
        """Sample; weights that it has not acknowledged yet it acknowledges first, as engines do."""
        flight, logprobs = self.link.flights.get(request_id), tuple(-0.5 for _ in tokens)
        if flight is not None and flight.version is None:
            known = self.link.acknowledged.get(flight.policy)
            if tokens and known is not None and (lineage, version) > known[:2]:
                self.serve(version, policy=flight.policy, lineage=lineage)
        chunk = TokenChunk(request_id, tokens, logprobs, version, finish, error, lineage=lineage)
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
    barrier: Barrier
    writes: list[Future[Any]] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    """The turns that were made durable, in order."""
    asked: list[tuple[str, bool]] = field(default_factory=list)
    """Which servers were asked for a decision, and whether to presume an abort."""
    decider_says: TransactionState | None = None
    complete: bool = False
    stopping: bool = False
    folder: Path = Path("/nonexistent")
    """Where weights of agent versions are kept."""

    def __post_init__(self) -> None:
        control: Any = self
        self.deciders = SimpleNamespace(ask=self.ask_decider)
        self.events.subscribe(self.log.append)
        shared = (self.policies, self.dealer, self.ledger, self.events, self.changed, self.writes.append)
        self.evaluations = Evaluations(EvaluationParts(*shared))
        self.endings = Endings(self.metrics)
        self.limits = Limits(self.config.limits, metrics=self.metrics, clock=self.clock)
        self.registry.on_add = self.limits.began
        self.variants = make_variants(control)
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
                limits=self.limits,
                variants=self.variants,
                endings=self.endings,
            )
        )
        self.finishing = make_finishing(control)
        self.gateway = Gateway(self.policies, self.engines, self.metrics, capture=self.capture)
        self.teams = make_teams(control)
        self.collecting = make_collecting(control, KeyRing.of(None, "worker-key"), wall=self.clock)

    async def ask_decider(self, decider: str, transaction_id: str, presume: bool) -> TransactionState | None:
        """Another server, as the test says."""
        self.asked.append((decider, presume))
        return self.decider_says

    def capture(self, episode: OpenEpisode, turn: Turn) -> None:
        """As control does it."""
        self.captured.append(turn.turn_id)
        if isinstance(episode, CollectedEpisode):
            self.collecting.store.capture(episode, turn)
            return
        lineage = self.policies[turn.policy].ancestry.current
        self.ledger.capture_turn(episode.episode_id, episode.attempt, dump_noted_turn(episode, turn, lineage=lineage))

    def watch(self, write: Future[Any]) -> None:
        self.writes.append(write)

    @property
    def run_dir(self) -> Path:
        return self.folder

    @property
    def solver(self) -> PolicyHost:
        return self.policies["solver"]

    def take_turn(
        self,
        episode: OpenEpisode,
        agent: str = "",
        *,
        policy: str = "solver",
        version: int = 0,
        logprobs: tuple[float, float] = (-1.0, -2.0),
    ) -> str:
        """One of two sampled tokens, as the gateway commits it; its id."""
        plan = episode.graph.resolve(
            policy=policy,
            agent=agent,
            messages=[Message("user", f"hi {agent}")],
            tools=None,
            template=self.policies[policy].template,
        )
        turn = episode.graph.commit(
            plan,
            turn_id=episode.new_turn_id(),
            token_ids=np.array([5, 6], np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=((version, 2),),
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            reply=Message("assistant", "yes"),
        )
        return turn.turn_id

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
        limits: dict[str, Any] | None = None,
        collect: dict[str, Any] | None = None,
        **dataflow: Any,
    ) -> Desk:
        settings = {"group_size": 2, "groups_per_step": 1, "max_staleness": 1, "straggler_wait_s": 5.0, **dataflow}
        alone: dict[str, Any] = {"trainer": {"algorithm": "reinforce"}} if settings["group_size"] == 1 else {}
        models = {
            name: {"model": "m", **(alone if more.get("trainable", True) else {}), **more}
            for name, more in (policies or {"solver": {}}).items()
        }
        config = Config.model_validate(
            {
                "run": {"steps": steps},
                "policies": models,
                "dataflow": settings,
                "server": {"begin_wait_s": 0, "heartbeat_s": 1, "idle_timeout_s": 100, **(server or {})},
                "limits": limits or {},
                "collect": collect or {},
            }
        )
        desk = _desk(config, tmp_path / f"desk-{len(desks)}", template, clock)
        desks.append(desk)
        return desk

    yield build
    for desk in desks:
        desk.ledger.close()
        desk.events.close()


@pytest.fixture
def make_desk(template: ChatTemplate) -> Callable[[Config, Path, ManualClock | None], Desk]:
    """Of a folder, also of one with a ledger; its test closes it."""
    metrics = ControlMetrics()  # takes as long to make as all the rest
    return lambda config, folder, clock: _desk(config, folder, template, clock or ManualClock(), metrics)


@pytest.fixture
def restore() -> Callable[[Desk], None]:
    """What control does when it starts."""
    return lambda desk: restore_run(desk)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def restart_desk(template: ChatTemplate) -> Iterator[Callable[[Desk], Desk]]:
    """What a new process makes of the ledger that the one before left, however it ended."""
    desks: list[Desk] = []

    def restart(desk: Desk) -> Desk:
        desk.ledger.close()
        desk.events.close()
        successor = _desk(desk.config, desk.folder, template, desk.clock)
        restore_run(successor)  # pyright: ignore[reportArgumentType]
        desk.clock.now += 1e-3  # what comes next comes later than the restart
        desks.append(successor)
        return successor

    yield restart
    for desk in desks:
        desk.ledger.close()
        desk.events.close()


def _context_tokens(policy: PolicyConfig) -> int:
    """Few, where the test does not say how many."""
    return policy.context_tokens if "context_tokens" in policy.model_fields_set else 64


def _desk(
    config: Config, folder: Path, template: ChatTemplate, clock: ManualClock, metrics: ControlMetrics | None = None
) -> Desk:
    folder.mkdir(exist_ok=True)
    ledger = Ledger.open(folder / "ledger.sqlite", run=RunMeta("run", seed=0))
    dataflow = config.dataflow
    book = GroupBook(
        max_attempts=dataflow.max_attempts,
        group_floor=dataflow.group_floor,
        group_deadline_s=dataflow.group_deadline_s,
        clock=clock,
        mixes_variants=dataflow.mix_agent_versions,
    )
    changed, overlap = Changed(), OverlapMeter(clock)
    events = EventLog(None, clock=clock)
    engines = EnginePool(wait_s=5.0, on_activity=overlap.generating)
    writes: list[Future[Any]] = []
    registry = EpisodeRegistry(KeyRing.of(None, "worker-key"), clock=clock)

    def rebase(policy: str, highest: int) -> None:
        book.rebase(policy, highest=highest)
        registry.rebase(policy, highest=highest)

    context = HostContext(
        ledger,
        engines,
        events,
        overlap,
        changed,
        writes.append,
        seed=3,
        total_steps=config.run.steps,
        clock=clock,
        may_pass=lambda policy, version: barrier.may_pass(policy, version),
        starves=lambda policy, version: barrier.starves(policy, version),
        rebase=rebase,
    )
    policies = {
        name: PolicyHost(
            PolicySpec(name, "base", _context_tokens(policy), policy.model_dump(mode="json")),
            template=template,
            buffer=PolicyBuffer(
                name,
                groups_per_step=dataflow.groups_per_step,
                max_staleness=dataflow.max_staleness,
                straggler=dataflow.straggler,
                dynamic_sampling=dataflow.dynamic_sampling,
            ),
            rule=StepRule.of(dataflow),
            context=context,
            running_floors=book.floors,
            chain=build_chain(config, name),
        )
        for name, policy in config.policies.items()
    }
    barrier = Barrier(lambda: policies.values(), is_set=dataflow.barrier)
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
        registry=registry,
        policies=policies,
        changed=changed,
        overlap=overlap,
        metrics=metrics or ControlMetrics(),
        barrier=barrier,
        writes=writes,
        folder=folder,
    )


Make = Callable[..., Manifest]


class FakeTrainer:
    """A trainer that is a list of what it was told."""

    def __init__(self, host: PolicyHost, make_manifest: Make, on_told: Callable[[], None]) -> None:
        self.host = host
        self.sent: list[ControlMessage] = []
        self._make = make_manifest
        self._on_told = on_told

    def _receive(self, message: ControlMessage) -> None:
        self.sent.append(message)
        self._on_told()

    def join(self, step: int = 0, *, lineage: int = 0) -> None:
        self.connect(self.host)
        self.ready(step, lineage=lineage)

    def connect(self, host: PolicyHost) -> None:
        """Before it says where it stands."""
        self.host = host
        host.trainer.joined(self._receive)

    def ready(self, step: int = 0, *, lineage: int = 0) -> None:
        manifest = msgspec.structs.replace(self._make(step), lineage=lineage)
        self.host.trainer.ready(TrainerReady("solver", step, manifest))

    def done(self, step: int, *, checksum: str | None = None, lineage: int = 0, **metrics: float) -> None:
        """It takes a step, and publishes."""
        self.stepped(step, lineage=lineage, **metrics)
        self.publish(step, checksum=checksum, lineage=lineage)

    def stepped(self, step: int, *, lineage: int = 0, **metrics: float) -> None:
        """It takes a step whose weights it has yet to publish."""
        batch_id = f"solver-{lineage}.{step}" if lineage else f"solver-{step}"
        self.host.trainer.step_done(StepDone("solver", batch_id, step, metrics, {}, 0.0, 1.0))

    def publish(self, step: int, *, checksum: str | None = None, lineage: int = 0) -> None:
        manifest = msgspec.structs.replace(self._make(step, checksum=checksum), lineage=lineage)
        self.host.trainer.published(Published("solver", step, manifest))

    def begin(self, step: int, *, checksum: str | None = None, base_lineage: int = 0) -> None:
        """Answer the last ``BeginLineage``: it begins at this step."""
        lineage = self.of(BeginLineage)[-1].lineage
        manifest = msgspec.structs.replace(self._make(step, checksum=checksum), lineage=lineage)
        self.host.trainer.ready(TrainerReady("solver", step, manifest, base_lineage))

    def fail(self, command: str = "train_step", error: str = "out of memory") -> None:
        self.host.trainer.failed(Failed("solver", command, error))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def steps(self) -> list[tuple[int, bool]]:
        return [(message.batch.step, message.replay) for message in self.of(TrainStep)]


class Course:
    """A desk whose solver is fed with groups and trained by a fake."""

    def __init__(self, desk: Any, make_manifest: Make) -> None:
        self.desk = desk
        self.host: PolicyHost = desk.solver
        self.make = make_manifest
        self.finished: list[tuple[int, dict[str, float]]] = []
        self.moved = Changed()

    def trainer(self) -> FakeTrainer:
        return FakeTrainer(self.host, self.make, self.moved.notify)

    def successor(self) -> PolicyHost:
        """The policy of a control that starts after the first one was killed: it knows what the ledger holds."""
        old = self.host
        name, gate = old.name, old.rule.gate
        self.desk.ledger.save_dealer_state({}).result(10)  # what was written before is on disk, too
        self.host = PolicyHost(
            old.spec,
            template=old.template,
            buffer=PolicyBuffer(name, groups_per_step=gate.groups_per_step, max_staleness=gate.max_staleness),
            rule=old.rule,
            context=replace(old.context, engines=EnginePool(wait_s=1.0, on_activity=lambda number: None)),
            running_floors=self.desk.book.floors,
        )
        self.host.restore(version=self.desk.ledger.summary().trained_step.get(name, 0))
        self.desk.policies[name] = self.host
        return self.host

    async def after_step(self, host: PolicyHost, metrics: dict[str, float]) -> None:
        self.finished.append((host.version, metrics))
        self.moved.notify()

    def group(self, name: str, rewards: tuple[float, ...] = (0.0, 1.0), *, floor: int = 0) -> None:
        """A training group that has closed: in the ledger and in the buffer."""
        spec = GroupSpec(name, Task("src", "t"), Split.TRAIN, len(rewards), ("solver",), {"solver": floor})
        ids = self.desk.book.open_group(spec)
        self.desk.ledger.record_group(spec, episode_ids=ids)
        for episode_id, reward in zip(ids, rewards, strict=True):
            self.desk.book.take(name)
            self.desk.book.begin(episode_id, 1)
            self.desk.ledger.record_begin(BeginRecord(episode_id, 1, group_id=name))
            record = self._record(episode_id, name, reward, floor)
            self.desk.book.finish(episode_id, 1, record)
            self.desk.writes.append(self.desk.ledger.record_finish(record))
        self.desk.finishing.settle()

    def _record(self, episode_id: str, group_id: str, reward: float, version: int) -> EpisodeRecord:
        sample = TrainingSample.build(
            episode_id,
            token_ids=np.array([1, 2], np.int32),
            sampled=np.array([0, 1], np.uint8),
            sampling_logprobs=np.array([0.0, -0.5], np.float32),
            versions=np.array([-1, version], np.int32),
        )
        samples = EpisodeSamples(episode_id, 1, group_id, "solver", "", reward, (sample,))
        return EpisodeRecord(
            episode_id, 1, group_id, Outcome.AGENT, "digest", rewards={"solver": reward}, samples=(samples,)
        )

    def prompt(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([1, 2], np.int32)

    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=8)

    async def until_changed(self, condition: Callable[[], Any]) -> None:
        """Wait for control's own state to change until something holds."""
        while not condition():
            assert await self.desk.changed.wait(20.0)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for the trainer to be told or a step to be counted until something holds."""
        while not condition():
            assert await self.moved.wait(20.0)


@pytest.fixture
def open_course(open_desk: Any, make_manifest: Make) -> Callable[..., Course]:
    return lambda **options: Course(open_desk(**options), make_manifest)
