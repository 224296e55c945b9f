"""``python -m wingbeat.workers.engine``: one process that generates for every policy it is told to host.

The compute thread loops: take what came, then one decode step per model that has work.  New weights
are applied between steps, so no decode step ever sees two versions.  A *pinned* version (evaluation)
is a second model beside the live one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from wingbeat.core.config import EngineConfig
from wingbeat.core.errors import WingbeatError
from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.support import WHOLE_VOCABULARY
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.worker_protocol import (
    Abort,
    Failed,
    Generate,
    Heartbeat,
    Manifest,
    PinVersion,
    PolicySpec,
    Shutdown,
    TokenChunk,
    Tokens,
    UnpinVersion,
    UpdateWeights,
    WeightsServed,
)
from wingbeat.weights.receive import Received, receive
from wingbeat.workers.hosting import Backend, EmbeddedBackend, ModelHost
from wingbeat.workers.link import Connected, Disconnected, Inbound
from wingbeat.workers.main import WorkerArguments, run_worker

logger = logging.getLogger(__name__)


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

    model: ModelHost
    stream: bool
    spans: list[Span] = field(default_factory=list)

    def add(self, event: TokenEvent) -> None:
        sampled_by = (event.policy_version, self.model.lineage)
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

    def __init__(self, host_id: str, send: Callable[..., None]) -> None:
        self._host_id = host_id
        self._send = send
        self._specs: dict[str, PolicySpec] = {}
        self._backend: Backend | None = None
        self._live: dict[str, ModelHost] = {}
        self._pinned: dict[tuple[str, int], ModelHost] = {}
        self._flights: dict[str, Flight] = {}
        self._busy_s = 0.0
        self._stopped = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            Connected: self._on_connected,
            Disconnected: self._on_disconnected,
            UpdateWeights: self._on_update,
            PinVersion: self._on_pin,
            UnpinVersion: self._on_unpin,
            Generate: self._on_generate,
            Abort: self._on_abort,
            Shutdown: self._on_shutdown,
        }

    def run(self, receive: Callable[..., list[Inbound]]) -> None:
        """Serve until told to shut down."""
        try:
            while not self._stopped:
                for message in receive(block=not self._has_work()):
                    self._handlers[type(message)](message)
                started = time.perf_counter()
                self._step()
                self._busy_s += time.perf_counter() - started
        finally:
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
            }
        return Heartbeat(busy_s=busy, stats=stats)

    def _models(self) -> Iterable[ModelHost]:
        return (*self._live.values(), *self._pinned.values())

    def _has_work(self) -> bool:
        return any(hosted.has_work() for hosted in self._models())

    def _step(self) -> None:
        chunks: list[TokenChunk] = []
        for hosted in self._models():
            if hosted.has_work():
                for event in hosted.step():
                    chunks += self._absorb(event)
        if chunks:
            self._send(Tokens(chunks=tuple(chunks)))

    def _absorb(self, event: TokenEvent) -> list[TokenChunk]:
        """What must be sent now because of one event."""
        flight = self._flights.get(event.request_id)
        if flight is None:
            return []
        flight.add(event)
        if event.finish_reason is not None:
            del self._flights[event.request_id]
        elif not flight.stream:
            return []
        return flight.drain(event.request_id, event.finish_reason, event.error)

    # --- messages --------------------------------------------------------------------------

    def _on_connected(self, message: Connected) -> None:
        welcome = message.welcome
        if self._backend is None:
            self._backend = EmbeddedBackend(EngineConfig.model_validate(welcome.engine), seed=welcome.seed)
        self._specs = {spec.name: spec for spec in welcome.policies}
        for name in [n for n in self._live if n not in self._specs]:
            self._live.pop(name).close()

    def _on_disconnected(self, message: Disconnected) -> None:
        for request_id, flight in self._flights.items():
            flight.model.abort(request_id)
        self._flights.clear()
        for hosted in self._pinned.values():
            hosted.close()
        self._pinned.clear()

    def _on_update(self, message: UpdateWeights) -> None:
        manifest = message.manifest
        self._guard(manifest.policy, "update_weights", lambda: self._update(manifest))

    def _update(self, manifest: Manifest) -> None:
        hosted = self._live.get(manifest.policy)
        if hosted is None:
            hosted = self._live[manifest.policy] = self._load(manifest.policy)
        hosted.serve(manifest, self._received(manifest))
        self._send_served(manifest)

    def _on_pin(self, message: PinVersion) -> None:
        manifest = message.manifest
        self._guard(manifest.policy, "pin_version", lambda: self._pin(manifest))

    def _pin(self, manifest: Manifest) -> None:
        key = (manifest.policy, manifest.version)
        if key not in self._pinned:
            hosted = self._load(manifest.policy)
            try:
                hosted.serve(manifest, self._received(manifest))
            except BaseException:
                hosted.close()
                raise
            self._pinned[key] = hosted
        self._send_served(manifest, pinned=True)

    def _send_served(self, manifest: Manifest, *, pinned: bool = False) -> None:
        self._send(
            WeightsServed(
                policy=manifest.policy,
                version=manifest.version,
                checksum=manifest.checksum,
                pinned=pinned,
                lineage=manifest.lineage,
            )
        )

    def _on_unpin(self, message: UnpinVersion) -> None:
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
        self._flights[message.request_id] = Flight(hosted, message.stream)
        hosted.submit(request)

    def _on_abort(self, message: Abort) -> None:
        flight = self._flights.pop(message.request_id, None)
        if flight is not None:
            flight.model.abort(message.request_id)
            self._send(Tokens(chunks=tuple(flight.drain(message.request_id, FinishReason.ABORT))))

    def _on_shutdown(self, message: Shutdown) -> None:
        self._stopped = True

    # --- models ----------------------------------------------------------------------------

    def _load(self, policy: str) -> ModelHost:
        assert self._backend is not None, "control sends commands only after the welcome"
        return self._backend.load(self._specs[policy])

    def _received(self, manifest: Manifest) -> Received | None:
        """The weights; None for a frozen policy, which has the folder's own."""
        return receive(manifest, host_id=self._host_id) if manifest.path else None

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
    run_worker("engine", WorkerArguments.parse(), EngineWorker)


if __name__ == "__main__":
    main()
