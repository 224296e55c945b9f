"""The engine of one vLLM server: its models, their weights, and what happens when the server is lost.

A server offers its model itself (``flags.BASE``) and LoRA adapters by name.  Each change of weights gets a *label*, a
number that counts up; vLLM says of every token under which label it was sampled, and each model knows which of its
versions that was.  Prefix caches are salted with the label, so that no request finds KV of other weights.

    SERVING ──(server lost)──▶ RECOVERING: start again, load what was served, submit what was left ──▶ SERVING

One thread drives it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wingbeat.core.errors import ConflictError, SetupError, UnavailableError
from wingbeat.core.ports import EngineStats, GenerateRequest, TokenEvent
from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded.admission import RequestLimits
from wingbeat.engines.embedded.grammar import GrammarCompiler
from wingbeat.engines.vllm.client import CallFailed, VllmClient
from wingbeat.engines.vllm.commands import ServerCommands
from wingbeat.engines.vllm.flags import BASE, MAX_LOGPROBS
from wingbeat.engines.vllm.requests import ActiveRequest, GrammarWalk
from wingbeat.engines.vllm.served import ServedModel, Weights
from wingbeat.engines.vllm.server import Server
from wingbeat.engines.vllm.supports import candidates_for
from wingbeat.engines.vllm.wire import Piece, Submission

logger = logging.getLogger(__name__)

MAX_TRIES = 4
"""Times that one request is submitted to servers that are lost with it."""
RESTARTS, WITHIN_S = 4, 600.0
"""A server that is lost so often within so long is not started again."""
HEALTH_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Of one server's engine."""

    context_tokens: int
    vocabulary: int
    max_running: int
    kv_tokens: int
    keep_kv: bool = False
    """After new weights, running requests go on with the KV that they have; else it is computed anew."""
    start_timeout_s: float = 900.0
    stall_s: float = 300.0
    """A server that has requests and says nothing for so long hangs, and is started again."""
    parallelism: int = 1


class VllmEngine:
    """Serves requests on one server, which :meth:`start` makes ready."""

    def __init__(
        self,
        server: Server,
        *,
        settings: EngineSettings,
        grammars: GrammarCompiler,
        end_token: Callable[[], int | None],
        accept: Callable[[str, Mapping[str, Any]], None] = lambda root, about: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``end_token``: the one with which vLLM ends grammars, the tokenizer's own; asked for when one comes.

        ``accept``: asked of the server after each start (:mod:`.running`), raises SetupError where it is none to use.
        """
        self._server = server
        self._settings = settings
        self._limits = RequestLimits(settings.context_tokens, settings.vocabulary)
        self._grammars = grammars
        self._end_token = end_token
        self._client = VllmClient(server.address)
        self._commands = ServerCommands(server, self._client, settings.start_timeout_s, accept=accept)
        self._models = {BASE: ServedModel(BASE)}
        self._active: dict[str, ActiveRequest] = {}
        self._streams: dict[int, str] = {}
        """Request by stream; those of ended and cancelled requests are unknown."""
        self._prompts: dict[int, tuple[str, int]] = {}
        """Model and prompt tokens by stream, until its usage comes."""
        self._numbers = itertools.count()
        self._salt = secrets.token_hex(8)
        """Ours: a running server may still have the KV of weights that somebody before us labelled alike."""
        self._label = 0
        self._lost: list[ActiveRequest] = []
        self._lost_reason = ""
        self._clock = clock
        self._heard_s = clock()
        """When the server last said something, or had nothing to say."""
        self._recoveries: list[float] = []
        self._recovery: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-recovery")
        self.on_change: Callable[[str], None] = lambda error: None
        """Told why the server is lost, and "" once it serves again."""

    def start(self) -> None:
        """Returns once the server answers as it must.  Raises SetupError where it cannot."""
        self._commands.start()
        if self._commands.context_tokens < self._settings.context_tokens:
            raise SetupError(
                f"the server takes {self._commands.context_tokens} tokens, and the policy's context_tokens are"
                f" {self._settings.context_tokens}: start it with a larger --max-model-len"
            )
        self._commands.label(self._label)  # a running server has the label of whoever used it before

    @property
    def is_recovering(self) -> bool:
        return self._recovery is not None

    def model(self, name: str) -> ServedModel:
        """The model of that name, which need not have weights yet."""
        return self._models.setdefault(name, ServedModel(name))

    # --- requests ---------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, *, model: str) -> None:
        """Send a request on its way.  One that cannot be served ends with an ERROR event.

        Raises ConflictError if a live request has the same id.
        """
        if request.request_id in self._active:
            raise ConflictError(f"request {request.request_id!r} is still live; every request needs its own id")
        served = self._models[model]
        served.events = [event for event in served.events if event.request_id != request.request_id]
        sampling = request.sampling
        fault = self._limits.fault(request) or self._grammar_fault(request)
        if fault:
            self._end(served, request.request_id, FinishReason.ERROR, fault)
            return
        vocabulary = self._settings.vocabulary
        listed = candidates_for(sampling, most=MAX_LOGPROBS, vocabulary=vocabulary)
        name = BASE if served.weights is None else model
        submission = Submission(next(self._numbers), name, request.prompt_ids, sampling, self._salt_of(served), listed)
        walk = None
        if sampling.grammar:
            end = self._end_token()
            assert end is not None, "refused as a fault"
            walk = GrammarWalk(self._grammars, sampling.grammar, end=end)
        active = ActiveRequest(request, model, submission, vocabulary, walk)
        self._active[active.id] = active
        if self._recovery is not None:
            self._lost.append(active)
        else:
            self._send(active)

    def abort(self, request_id: str) -> None:
        """Forget a request; its ABORT event comes with the next step.  Unknown ids are ignored."""
        active = self._drop(request_id)
        if active is not None:
            self._end(self._models[active.model], request_id, FinishReason.ABORT)

    def has_work(self, model: str) -> bool:
        """Whether there is something to step for: events, requests, or a server that starts again."""
        if self._recovery is not None or self._models[model].events:
            return True
        return any(active.model == model for active in self._active.values())

    def step(self, model: str, *, wait_s: float) -> list[TokenEvent]:
        """What came for a model; waits so long for anything.

        Raises UnavailableError where the server is lost for good.
        """
        served = self._models[model]
        self._pump(wait_s=0.0 if served.events else wait_s)
        events, served.events = served.events, []
        return events

    def stats(self, model: str) -> EngineStats:
        """Read by other threads, too."""
        served, active = self._models.get(model) or ServedModel(model), tuple(self._active.values())
        own = sum(request.model == model for request in active)
        running = min(own, self._settings.max_running)
        held = sum(len(request.request.prompt_ids) + len(request.sampled) for request in active)
        return EngineStats(
            running=running,
            waiting=own - running,
            sampled_tokens=served.sampled_tokens,
            prefilled_tokens=served.prefilled_tokens,
            reused_tokens=served.reused_tokens,
            policy_version=served.version,
            kv_tokens_free=max(0, self._settings.kv_tokens - held),
            parallelism=self._settings.parallelism,
        )

    # --- weights ----------------------------------------------------------------------------

    def prepare(self, path: Path) -> bool:
        """Have the server read a file ahead of :meth:`swap`; whether it has.  Requests go on."""
        if self._recovery is not None:
            return False
        try:
            return self._commands.prepare(path)
        except CallFailed as error:
            self._recover(error.message)
            raise

    def swap(self, weights: Weights) -> str:
        """Serve other weights as the model itself; the checksum of what was loaded.

        Running requests go on.  Raises UnavailableError where the file is bad, and then serves what it served, or
        where the server failed over it, and then starts it again with what it served.
        """
        return self._change(BASE, weights, lambda: self._commands.swap(weights.path, weights.checksum))

    def put_adapter(self, name: str, weights: Weights) -> None:
        """Serve an adapter under a name, in place of what had the name.  Raises as :meth:`swap`."""

        def load() -> str:
            self._commands.put_adapter(name, weights.path)
            return weights.checksum

        self._change(name, weights, load)

    def drop_adapter(self, name: str) -> None:
        """Forget a name; its requests must have ended."""
        served = self._models.pop(name, None)
        if served is None or served.weights is None or self._recovery is not None:
            return
        try:
            self._commands.drop_adapter(name)
        except CallFailed as error:  # a lost server has forgotten it, too
            logger.warning("%s", error.message)

    def label_as(self, model: str, *, version: int, lineage: int) -> None:
        """What the model serves is that version."""
        self._models[model].since.append((self._label, version, lineage))

    def close(self) -> None:
        self._client.close()
        self._server.close()
        self._thread.shutdown()
        self._server.close()  # one that a recovery has just started

    def _change(self, name: str, weights: Weights, load: Callable[[], str]) -> str:
        self._await_recovery()
        served = self.model(name)
        try:
            with self._commands.paused(keep_kv=self._settings.keep_kv):
                loaded = load()
                label = self._label + 1
                self._commands.label(label)
        except CallFailed as error:
            self._recover(f"new weights failed: {error.message}")
            raise
        self._label = label
        served.since.append((label, weights.version, weights.lineage))
        served.weights = weights
        return loaded

    def _salt_of(self, served: ServedModel) -> str:
        return f"{self._salt}.{served.name}.{served.label}"

    # --- pieces -----------------------------------------------------------------------------

    def _send(self, active: ActiveRequest) -> None:
        submission = active.submission
        if not self._streams:
            self._heard_s = self._clock()
        self._streams[submission.stream] = active.id
        self._prompts[submission.stream] = (active.model, len(submission.prompt_ids))
        self._client.generate(submission)

    def _pump(self, *, wait_s: float) -> None:
        if self._recovery is not None:
            wait([self._recovery], timeout=wait_s)
            if self._recovery.done():
                self._await_recovery()
            return
        pieces = self._client.pieces(wait_s=wait_s)
        if pieces or not self._streams:
            self._heard_s = self._clock()
        for piece in pieces:
            self._take(piece)
        for active in [a for a in self._active.values() if a.held and a.walk is not None and a.walk.is_ready]:
            self._release(active)
        ended = self._server.ended()
        if ended or self._lost:
            self._look_after(ended)
        elif (silent_s := self._clock() - self._heard_s) > self._settings.stall_s:
            self._recover(f"it said nothing for {silent_s:.0f} s, and has {len(self._streams)} requests")

    def _take(self, piece: Piece) -> None:
        if piece.cached_tokens is not None:
            model, prompt = self._prompts.pop(piece.stream, ("", 0))
            served = self._models.get(model)
            if served is not None:
                served.reused_tokens += piece.cached_tokens
                served.prefilled_tokens += prompt - piece.cached_tokens
            return
        active = self._active.get(self._streams.get(piece.stream, ""))
        if active is None:
            return
        if piece.lost:
            self._lost_reason = piece.lost
            self._lost.append(active)
            del self._streams[piece.stream]
            self._prompts.pop(piece.stream, None)
        elif piece.error:
            self._drop(active.id)
            self._end(self._models[active.model], active.id, FinishReason.ERROR, piece.error, overflow=piece.overflow)
        elif active.held or (active.walk is not None and not active.walk.is_ready):
            active.held.append(piece)
        else:
            self._deliver(active, piece)

    def _release(self, active: ActiveRequest) -> None:
        held, active.held = active.held, []
        for piece in held:
            if active.id in self._active:
                self._deliver(active, piece)

    def _deliver(self, active: ActiveRequest, piece: Piece) -> None:
        served = self._models[active.model]
        fault = active.fault(piece)
        if fault:
            self._drop(active.id)
            self._end(served, active.id, FinishReason.ERROR, fault)
            return
        served.events += active.events(piece, served.sampled_by)
        served.sampled_tokens += len(piece.token_ids)
        if piece.finish is not None:
            del self._active[active.id]
            self._streams.pop(piece.stream, None)

    def _drop(self, request_id: str) -> ActiveRequest | None:
        active = self._active.pop(request_id, None)
        if active is not None:
            stream = active.submission.stream
            self._streams.pop(stream, None)
            self._prompts.pop(stream, None)
            self._client.cancel(stream)
            self._lost = [lost for lost in self._lost if lost is not active]
        return active

    def _end(
        self, served: ServedModel, request_id: str, reason: FinishReason, error: str = "", *, overflow: bool = False
    ) -> None:
        served.events.append(
            TokenEvent(
                request_id,
                (),
                (),
                served.version,
                finish_reason=reason,
                error=error,
                overflow=overflow,
                lineage=served.lineage,
            )
        )

    def _grammar_fault(self, request: GenerateRequest) -> str:
        sampling = request.sampling
        if not sampling.grammar:
            return ""
        if sampling.resumed_tokens:
            return (
                "vLLM cannot go on with a reply in the middle of its grammar, and the engine that began it is gone;"
                " send the request again"
            )
        end = self._end_token()
        if end is None or end not in sampling.stop_token_ids:
            return (
                "vLLM ends a grammar with the end-of-text token of the tokenizer only, which must be among"
                f" stop_token_ids; got {end} and {list(sampling.stop_token_ids)}"
            )
        return ""

    # --- recovery ---------------------------------------------------------------------------

    def _look_after(self, ended: str) -> None:
        """Streams broke off: the server is lost, or only they are."""
        if not ended and self._commands.is_healthy(timeout_s=HEALTH_S):
            lost, self._lost = self._lost, []
            for active in lost:
                self._again(active)
            return
        self._recover(ended or self._lost_reason)

    def _recover(self, reason: str) -> None:
        """Start the server again, in another thread; what was left of the requests follows."""
        now = self._clock()
        self._recoveries = [at for at in self._recoveries if at > now - WITHIN_S] + [now]
        if len(self._recoveries) > RESTARTS:
            raise UnavailableError(f"the vLLM server was lost {RESTARTS + 1} times in {WITHIN_S:.0f} s: {reason}")
        logger.error("the vLLM server is lost: %s; starting it again", reason)
        self.on_change(reason)
        self._lost = list(self._active.values())
        for stream in self._streams:  # a server that is not ours may be alive
            self._client.cancel(stream)
        self._streams.clear()
        self._prompts.clear()
        weights = {name: served.weights for name, served in self._models.items() if served.weights is not None}
        self._recovery = self._thread.submit(self._commands.restart, weights, self._label)

    def _await_recovery(self) -> None:
        """Raises what made it impossible."""
        if self._recovery is None:
            return
        recovery, self._recovery = self._recovery, None
        try:
            recovery.result()
        except SetupError as error:  # it did start before: starting the worker anew may help
            raise UnavailableError(f"the vLLM server is lost, and did not come back: {error.message}") from error
        logger.info("the vLLM server serves again")
        self._heard_s = self._clock()
        self.on_change("")
        lost, self._lost = self._lost, []
        for active in lost:
            self._again(active)

    def _again(self, active: ActiveRequest) -> None:
        if active.id not in self._active:
            return
        served = self._models[active.model]
        fault = ""
        if active.walk is not None and active.sampled:
            fault = "vLLM was lost, and cannot go on with a reply in the middle of its grammar; send the request again"
        elif active.tries >= MAX_TRIES:
            fault = f"vLLM was lost {MAX_TRIES + 1} times with this request: {self._lost_reason}"
        if fault:
            del self._active[active.id]
            self._end(served, active.id, FinishReason.ERROR, fault)
            return
        active.held.clear()
        active.again(next(self._numbers), salt=self._salt_of(served))
        self._send(active)
