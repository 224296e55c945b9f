"""``python -m wingbeat.workers engine``: one process that generates for every policy it is told to host.

The compute thread loops: take what came, then one decode step per model that has work.  New weights
are applied between steps, so no decode step ever sees two versions.  A *pinned* version (evaluation)
is a second model beside the live one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from wingbeat.core.config import EngineConfig
from wingbeat.core.errors import SetupError, WingbeatError
from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.support import WHOLE_VOCABULARY
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.weight_protocol import Manifest, PinVersion, UnpinVersion, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import (
    Abort,
    Drain,
    Failed,
    Generate,
    Heartbeat,
    Leave,
    MovedOut,
    MoveOut,
    PolicySpec,
    Shutdown,
    TokenChunk,
    Tokens,
)
from wingbeat.weights.receiver import WeightReceiver
from wingbeat.weights.relay import RelayServer
from wingbeat.workers.backends import build_backend
from wingbeat.workers.hosting import Backend, ModelHost
from wingbeat.workers.kv_moves import submit_with_kv, take_kv
from wingbeat.workers.link import Connected, Disconnected, DrainAsked, Inbound
from wingbeat.workers.main import TOLD_TO_END, WorkerArguments, end_with, run_worker
from wingbeat.workers.models import ModelFolders
from wingbeat.workers.pulls import Pulls
from wingbeat.workers.receiving import Prepares, Receiving, WeightsReceived

logger = logging.getLogger(__name__)

DIVERGED = "where all replies fail the policy has diverged: lower `learning_rate`, or resume from an earlier checkpoint"


@dataclass(slots=True)
class Span:
    """Tokens of one request that one policy version sampled."""

    version: int
    lineage: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[bytes] = field(default_factory=list)
    """One per token, or none at all while every token came from the whole vocabulary."""

    def add(self, event: TokenEvent) -> None:
        if event.supports and not self.supports:
            self.supports = [WHOLE_VOCABULARY] * len(self.token_ids)
        if self.supports or event.supports:
            self.supports.extend(event.supports or (WHOLE_VOCABULARY,) * len(event.token_ids))
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)

    def chunk(self, request_id: str) -> TokenChunk:
        return TokenChunk(
            request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.version,
            supports=tuple(self.supports),
            lineage=self.lineage,
        )


@dataclass(slots=True)
class Flight:
    """A request in progress; what was not yet sent is gathered per version span."""

    policy: str
    model: ModelHost
    stream: bool
    spans: list[Span] = field(default_factory=list)

    def add(self, event: TokenEvent) -> None:
        lineage = self.model.lineage if event.lineage is None else event.lineage
        sampled_by = (event.policy_version, lineage)
        if not self.spans or (self.spans[-1].version, self.spans[-1].lineage) != sampled_by:
            self.spans.append(Span(*sampled_by))
        self.spans[-1].add(event)

    def drain(self, request_id: str, finish: FinishReason | None, error: str = "") -> list[TokenChunk]:
        """Everything gathered, the last chunk carrying the end of the request."""
        spans, self.spans = self.spans or [Span(self.model.policy_version, self.model.lineage)], []
        chunks = [span.chunk(request_id) for span in spans]
        chunks[-1] = msgspec.structs.replace(chunks[-1], finish=finish, error=error)
        return chunks


class EngineWorker:
    """The compute side: a plain synchronous object, driven by messages."""

    def __init__(
        self,
        host_id: str,
        send: Callable[..., None],
        deliver: Callable[[Inbound], None],
        *,
        of_its_own: Mapping[str, Any] | None = None,
        models: ModelFolders | None = None,
        pulls: Pulls | None = None,
    ) -> None:
        """``of_its_own``: keys of ``[engine]`` that rule over the server's, as other machines have other devices.

        ``models``: finds those of a server on another host; ``pulls``: how weights of other hosts come here.
        """
        self._host_id = host_id
        self._pulls = pulls
        self._receiver = WeightReceiver(host_id)
        self.receiving = Receiving(self._receiver, deliver)
        self._preparing: list[WeightsReceived] = []
        """Received, and their host is not ready to swap."""
        self._send = send
        self._of_its_own = dict(of_its_own or {})
        self._models_here = models
        self._leave_at_s: float | None = None
        """Monotonic: when what has not ended by then is handed over."""
        self._move_kv_bytes = 0
        self._specs: dict[str, PolicySpec] = {}
        self._backend: Backend | None = None
        self._live: dict[str, ModelHost] = {}
        self._pinned: dict[tuple[str, int], ModelHost] = {}
        self._flights: dict[str, Flight] = {}
        self._overflown: set[tuple[str, int, int]] = set()
        """Policy, version and lineage that gave logits without a number, as this control was told already."""
        self._busy_s = 0.0
        self._stopped = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Connected: self._on_connected,
            Disconnected: self._on_disconnected,
            UpdateWeights: self._on_update,
            PinVersion: self._on_pin,
            UnpinVersion: self._on_unpin,
            WeightsReceived: self._on_received,
            Generate: self._on_generate,
            Abort: self._on_abort,
            MoveOut: self._on_move_out,
            Drain: self._on_drain,
            DrainAsked: self._on_drain,
            Shutdown: self._on_shutdown,
        }

    def run(self, receive: Callable[..., list[Inbound]]) -> None:
        """Serve until told to shut down."""
        try:
            while not self._stopped:
                for message in receive(block=not self._has_work() and self._leave_at_s is None):
                    self._handlers[type(message)](message)
                started = time.perf_counter()
                self._step()
                self._busy_s += time.perf_counter() - started
                if self._leave_at_s is not None and (not self._flights or time.monotonic() >= self._leave_at_s):
                    self._hand_over()
                    self._stopped = True
        finally:
            self.receiving.close()
            if self._pulls is not None:
                self._pulls.close()
            for hosted in self._models():
                hosted.close()
            if self._backend is not None:
                self._backend.close()

    def heartbeat(self) -> Heartbeat:
        """Called on the I/O thread; only reads."""
        busy, self._busy_s = self._busy_s, 0.0
        stats = {}
        for name, hosted in tuple(self._live.items()):
            s = hosted.stats()
            stats[name] = {
                "running": float(s.running),
                "waiting": float(s.waiting),
                "sampled_tokens": float(s.sampled_tokens),
                "prefilled_tokens": float(s.prefilled_tokens),
                "reused_tokens": float(s.reused_tokens),
                "policy_version": float(s.policy_version),
                "kv_tokens_free": float(s.kv_tokens_free),
                "parallelism": float(s.parallelism),
            }
        return Heartbeat(busy_s=busy, stats=stats)

    def _models(self) -> Iterable[ModelHost]:
        return (*self._live.values(), *self._pinned.values())

    def _has_work(self) -> bool:
        return bool(self._preparing) or any(hosted.has_work() for hosted in self._models())

    def _step(self) -> None:
        chunks: list[TokenChunk] = []
        for hosted in self._models():
            if hosted.has_work():
                for event in hosted.step():
                    chunks += self._absorb(event)
        if chunks:
            self._send(Tokens(chunks=tuple(chunks)))
        waiting, self._preparing = self._preparing, []
        for message in waiting:
            self._swap(message)

    def _absorb(self, event: TokenEvent) -> list[TokenChunk]:
        """What must be sent now because of one event."""
        flight = self._flights.get(event.request_id)
        if flight is None:
            return []
        flight.add(event)
        if event.overflow:
            self._tell_overflow(flight, event)
        if event.finish_reason is not None:
            del self._flights[event.request_id]
        elif not flight.stream:
            return []
        return flight.drain(event.request_id, event.finish_reason, event.error)

    def _tell_overflow(self, flight: Flight, event: TokenEvent) -> None:
        """Each call is answered; that the weights may be broken is said besides, once for each version."""
        lineage = flight.model.lineage if event.lineage is None else event.lineage
        sampled_by = (flight.policy, event.policy_version, lineage)
        if sampled_by in self._overflown:
            return
        self._overflown.add(sampled_by)
        logger.warning("a reply of %s failed: %s", flight.policy, event.error)
        self._send(Failed(policy=flight.policy, command="generate", error=f"{event.error}; {DIVERGED}"))

    # --- messages --------------------------------------------------------------------------

    def _on_connected(self, message: Connected) -> None:
        welcome = msgspec.structs.replace(message.welcome, engine={**message.welcome.engine, **self._of_its_own})
        config = EngineConfig.model_validate(welcome.engine)
        self._move_kv_bytes = config.move_kv_bytes
        if self._models_here is not None and welcome.host_id != self._host_id:
            policies = tuple(self._models_here.local(spec) for spec in welcome.policies)
            welcome = msgspec.structs.replace(welcome, policies=policies)
        if self._backend is None:
            self._backend = build_backend(welcome, send=self._send)
        self._specs = {spec.name: spec for spec in welcome.policies}
        self._overflown.clear()
        if self._pulls is not None:
            self._receiver.remote = self._pulls.remote(message.welcome, self._host_id)
        for name in [n for n in self._live if n not in self._specs]:
            self._live.pop(name).close()

    def _on_disconnected(self, message: Disconnected) -> None:
        for request_id, flight in self._flights.items():
            flight.model.abort(request_id)
        self._flights.clear()
        for hosted in self._pinned.values():
            hosted.close()
        self._pinned.clear()
        self.receiving.forget()
        self._preparing.clear()

    def _on_update(self, message: UpdateWeights) -> None:
        self.receiving.start(message)

    def _on_pin(self, message: PinVersion) -> None:
        if (message.manifest.policy, message.manifest.version) in self._pinned:
            self._send_served(message.manifest, pinned=True)
        else:
            self.receiving.start(message)

    def _on_received(self, message: WeightsReceived) -> None:
        """Swap, if it is still wanted; where it could not be had, what was served before stays."""
        if self.receiving.take(message):
            self._swap(message)

    def _swap(self, message: WeightsReceived) -> None:
        command = "pin_version" if message.pinned else "update_weights"
        swap = self._pin if message.pinned else self._update
        self._guard(message.manifest.policy, command, lambda: swap(message))

    def _update(self, message: WeightsReceived) -> None:
        manifest, received = message.manifest, message.outcome.result()
        hosted = self._live.get(manifest.policy)
        if hosted is None:
            hosted = self._live[manifest.policy] = self._load(manifest.policy)
            logger.info("%s is loaded; its first version here is %d", manifest.policy, manifest.version)
        if isinstance(hosted, Prepares) and not hosted.prepare(manifest, received):
            self._preparing.append(message)
            return
        hosted.serve(manifest, received)
        self._send_served(manifest, receive_s=0.0 if received is None else received.receive_s)

    def _pin(self, message: WeightsReceived) -> None:
        manifest, received = message.manifest, message.outcome.result()
        key = (manifest.policy, manifest.version)
        if key not in self._pinned:
            hosted = self._load(manifest.policy, pinned=True)
            try:
                hosted.serve(manifest, received)
            except BaseException:
                hosted.close()
                raise
            self._pinned[key] = hosted
        self._send_served(manifest, pinned=True)

    def _send_served(self, manifest: Manifest, *, pinned: bool = False, receive_s: float = 0.0) -> None:
        self._send(
            WeightsServed(
                policy=manifest.policy,
                version=manifest.version,
                checksum=manifest.checksum,
                pinned=pinned,
                lineage=manifest.lineage,
                receive_s=receive_s,
            )
        )

    def _on_unpin(self, message: UnpinVersion) -> None:
        self.receiving.unpin(message.policy, message.version)
        released = self._pinned.pop((message.policy, message.version), None)
        for request_id in [r for r, f in self._flights.items() if f.model is released]:
            del self._flights[request_id]
            self._fail(request_id, f"policy {message.policy!r} version {message.version} was released meanwhile")
        if released is not None:
            released.close()

    def _on_generate(self, message: Generate) -> None:
        hosted = (
            self._live.get(message.policy)
            if message.version is None
            else self._pinned.get((message.policy, message.version))
        )
        if hosted is None:
            self._fail(message.request_id, f"policy {message.policy!r} version {message.version} is not loaded here")
            return
        request = GenerateRequest(
            request_id=message.request_id,
            prompt_ids=np.frombuffer(message.prompt_ids, "<i4").tolist(),
            sampling=SamplingParams(
                max_tokens=message.max_tokens,
                temperature=message.temperature,
                top_p=message.top_p,
                top_k=message.top_k,
                seed=message.seed,
                stop_token_ids=message.stop_token_ids,
                grammar=message.grammar,
                resumed_tokens=message.resumed_tokens,
            ),
            cache_key=message.cache_key,
        )
        self._flights[message.request_id] = Flight(message.policy, hosted, message.stream)
        submit_with_kv(hosted, request, message.kv)

    def _on_abort(self, message: Abort) -> None:
        flight = self._flights.pop(message.request_id, None)
        if flight is not None:
            flight.model.abort(message.request_id)
            self._send(Tokens(chunks=tuple(flight.drain(message.request_id, FinishReason.ABORT))))

    def _on_move_out(self, message: MoveOut) -> None:
        """One that has ended meanwhile is answered, too: control waits for it."""
        flight, kv = self._flights.pop(message.request_id, None), b""
        if flight is not None:
            if message.with_kv:
                kv = take_kv(flight.model, message.request_id, max_bytes=self._move_kv_bytes)
            flight.model.abort(message.request_id)
            if flight.spans:
                self._send(Tokens(chunks=tuple(flight.drain(message.request_id, None))))
        self._send(MovedOut(message.request_id, kv))

    def _on_drain(self, message: Drain | DrainAsked) -> None:
        """No more from now on; go once what is here has ended, or its time is over."""
        if self._leave_at_s is None:
            logger.info("takes no more; ends what it has within %.0f s", message.drain_s)
            self._send(Leave(drain_s=message.drain_s))
            self._leave_at_s = time.monotonic() + message.drain_s

    def _hand_over(self) -> None:
        """What has not ended goes on elsewhere, from the tokens that it has."""
        chunks: list[TokenChunk] = []
        for request_id, flight in self._flights.items():
            flight.model.abort(request_id)
            chunks += flight.drain(request_id, None) if flight.spans else []
        self._flights.clear()
        if chunks:
            self._send(Tokens(chunks=tuple(chunks)))

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopped = True

    # --- models ----------------------------------------------------------------------------

    def _load(self, policy: str, *, pinned: bool = False) -> ModelHost:
        assert self._backend is not None, "control sends commands only after the welcome"
        return self._backend.load(self._specs[policy], pinned=pinned)

    def _guard(self, policy: str, command: str, action: Callable[[], None]) -> None:
        """Run a command; its failure is reported and leaves what was served before in place."""
        try:
            action()
        except (WingbeatError, OSError, RuntimeError, KeyError, ValueError) as error:
            logger.exception("%s for policy %s failed", command, policy)
            self._send(Failed(policy=policy, command=command, error=f"{type(error).__name__}: {error}"))

    def _fail(self, request_id: str, error: str) -> None:
        self._send(Tokens(chunks=(TokenChunk(request_id, (), (), 0, FinishReason.ERROR, error),)))


def main() -> None:
    """Entry point of the process."""
    arguments = WorkerArguments.parse()
    try:
        relay = RelayServer(arguments.relay, dial=arguments.url) if arguments.relay else None
    except SetupError as error:
        end_with(error)
    of_its_own: dict[str, Any] = {"tensor_parallel": arguments.tensor_parallel}
    if arguments.device is not None:
        of_its_own["device"] = arguments.device
    models = ModelFolders(arguments.url, arguments.key, is_stopped=TOLD_TO_END.is_set)
    if relay is not None:
        relay.start()
    run_worker(
        "engine",
        arguments,
        partial(
            EngineWorker,
            of_its_own=of_its_own,
            models=models,
            pulls=Pulls(arguments.url, arguments.key, relay=relay),
        ),
        relay_url="" if relay is None else relay.url,
    )
