"""The embedded engine: submit requests, call ``step`` until there is no work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.core.errors import ConflictError
from wingbeat.core.ports import EngineStats, GenerateRequest, TokenEvent
from wingbeat.core.support import WHOLE_VOCABULARY
from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded.admission import RequestLimits, resolve_limits
from wingbeat.engines.embedded.batching import Batcher, Feed
from wingbeat.engines.embedded.constrained import ConstrainedRequests
from wingbeat.engines.embedded.grammar import GrammarCompiler
from wingbeat.engines.embedded.kv import KVStore
from wingbeat.engines.embedded.options import EngineOptions
from wingbeat.engines.embedded.pool import ExtentPool
from wingbeat.engines.embedded.probe import probe_layers
from wingbeat.engines.embedded.requests import ActiveRequest, Move, Phase, activate, apply
from wingbeat.engines.embedded.rows import RowTable
from wingbeat.engines.embedded.sampler import Draw, Drawn, sample
from wingbeat.engines.embedded.step import ForwardStep, Segment, plan_calls
from wingbeat.engines.embedded.supports import SupportEncoder
from wingbeat.engines.embedded.weights import apply_weights

COMPILE_WAIT_S = 0.02
"""How long a step without other work waits for a grammar: whoever drives the engine has other engines to drive, and
requests to abort."""


def resolve_device(device: str | torch.device) -> torch.device:
    """``auto`` is the machine's accelerator if it has one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None else torch.device("cpu")


class EmbeddedEngine:
    """Samples from one Hugging Face causal language model (``core.ports.SamplingEngine``).

    The engine owns ``model`` from here on: it moves it to ``device``, switches it to our
    attention function and overwrites its weights in ``update_weights``.  ``grammars`` (of the model's tokenizer)
    is needed for requests with a grammar only.  Not thread-safe: one loop drives it.
    Raises ModelSourceError where the model needs attention features that the engine cannot honour.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: EngineOptions | None = None,
        stop_token_ids: Iterable[int] = (),
        grammars: GrammarCompiler | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        policy_version: int = 0,
    ) -> None:
        self._options = config or EngineOptions()
        self._device = resolve_device(device)
        self._model = cast(Any, model.to(self._device).eval().requires_grad_(False))  # pyright: ignore[reportArgumentType]
        layers = probe_layers(model, device=self._device)
        pool = ExtentPool(self._options.kv_tokens)
        self._limits: RequestLimits = resolve_limits(model, self._options, largest_row=pool.largest_extent)
        with torch.inference_mode():
            self._store = KVStore(layers, capacity_tokens=pool.capacity_tokens, device=self._device)
        self._rows = RowTable(pool, self._store)
        self._batcher = Batcher(self._options, self._rows)
        self._stops = frozenset(stop_token_ids)
        self._constrained = ConstrainedRequests(grammars, vocabulary=self._limits.vocabulary)
        self._supports = SupportEncoder()
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._version = policy_version
        self._requests: dict[str, ActiveRequest] = {}
        self._ended: list[TokenEvent] = []
        self._paused = False
        self._tainted = False
        self._sampled_tokens = 0

    @property
    def parallelism(self) -> int:
        """Devices this engine spans."""
        return 1

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def context_tokens(self) -> int:
        """Prompt plus sampled tokens that one request may have."""
        return self._limits.context_tokens

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.  One that cannot be served ends with an ERROR event at the next step.

        An id may be used again once its request ended; an end that was not fetched yet is then forgotten, so
        that it cannot be taken for the new request's.  Raises ConflictError if a live request has the same id.
        """
        if request.request_id in self._requests:
            raise ConflictError(f"request {request.request_id!r} is still live; every request needs its own id")
        self._ended = [event for event in self._ended if event.request_id != request.request_id]
        grammar = request.sampling.grammar
        stops = self._stops.union(request.sampling.stop_token_ids)
        fault = self._limits.fault(request) or self._constrained.fault(grammar, stops=stops)
        if fault:
            self._end_unserved(request.request_id, FinishReason.ERROR, error=fault)
            return
        active = activate(request, stops=stops, draw=self._draw(request))
        self._requests[active.id] = active
        if active.phase is Phase.COMPILING:
            self._constrained.hold(active, grammar)
        else:
            self._batcher.add(active)

    def abort(self, request_id: str) -> None:
        """End a request; its ABORT event comes with the next step.  Unknown (just finished) ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.phase is Phase.COMPILING:
            self._constrained.drop(request)
            apply(request, Move.FINISH)
        else:
            self._batcher.finish(request)
        self._end_unserved(request_id, FinishReason.ABORT)

    def has_work(self) -> bool:
        """Whether ``step`` would return or compute anything; while paused only undelivered ends count."""
        return bool(self._ended) or (not self._paused and bool(self._requests))

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """One forward pass: an event for every request that got a token or ended."""
        events, self._ended = self._ended, []
        if self._paused:
            return events
        self._start_compiled(events)
        feeds = self._batcher.schedule()
        if feeds:
            events.extend(self._run(feeds))
        return events

    def update_weights(self, tensors: Mapping[str, Tensor], *, policy_version: int, partial: bool = False) -> None:
        """Swap weights between steps; running requests go on under the new version.

        All tensors are checked before any is written; ``partial`` allows a subset (merged adapters).
        Raises ModelSourceError on missing, unexpected or mis-shaped tensors, leaving the engine as it was.
        """
        apply_weights(self._model, tensors, partial=partial)
        self._version = policy_version
        self._rows.new_epoch(recompute=self._tainted or self._options.kv_on_update == "recompute")
        if self._tainted:
            with torch.inference_mode():
                self._store.clear_all()
            self._tainted = False

    def pause(self) -> None:
        """Stop computing; requests and their KV stay."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._batcher.running),
            waiting=len(self._batcher.waiting),
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._batcher.prefilled_tokens,
            reused_tokens=self._batcher.reused_tokens,
            policy_version=self._version,
            kv_tokens_free=self._rows.free_tokens,
        )

    def _draw(self, request: GenerateRequest) -> Draw:
        sampling = request.sampling
        generator = None
        if sampling.seed is not None:
            generator = torch.Generator(self._device).manual_seed(sampling.seed)
        return Draw(sampling.temperature, sampling.top_p, sampling.top_k, generator)

    def _start_compiled(self, events: list[TokenEvent]) -> None:
        """Queue the requests whose grammars are compiled; with nothing else to do, wait a moment for one."""
        idle = not (self._batcher.running or self._batcher.waiting)
        for request, fault in self._constrained.ready(wait_s=COMPILE_WAIT_S if idle else 0.0):
            if fault:
                del self._requests[request.id]
                apply(request, Move.FINISH)
                events.append(
                    TokenEvent(request.id, (), (), self._version, finish_reason=FinishReason.ERROR, error=fault)
                )
            else:
                apply(request, Move.READY)
                self._batcher.add(request)

    def _end_unserved(self, request_id: str, reason: FinishReason, *, error: str = "") -> None:
        self._ended.append(TokenEvent(request_id, (), (), self._version, finish_reason=reason, error=error))

    def _run(self, feeds: Sequence[Feed]) -> list[TokenEvent]:
        segments = [Segment(f.request.attached.extent, f.begin, f.count) for f in feeds]
        order, calls = plan_calls(segments, device=self._device)
        sampling, logits_BV = self._forward([feeds[i] for i in order], calls)
        self._batcher.commit(feeds)
        if not sampling:
            return []
        masks, faults = self._constrained.masks(sampling, logits_BV=logits_BV)
        drawn = sample(logits_BV, [r.draw for r in sampling], generator=self._generator, masks=masks)
        # One transfer for both: the logprobs travel as the bits of integers.
        packed_2B = torch.stack((drawn.tokens_B.int(), drawn.logprobs_B.view(torch.int32))).cpu().numpy()
        tokens, logprobs = packed_2B[0].tolist(), packed_2B[1].view(np.float32).tolist()
        supports = self._blobs(drawn, {i for i, logprob in enumerate(logprobs) if math.isfinite(logprob)})
        events: list[TokenEvent] = []
        for i, (request, token, logprob) in enumerate(zip(sampling, tokens, logprobs, strict=True)):
            if i in faults:
                events.append(self._refuse(request, faults[i]))
            else:
                events.append(self._deliver(request, token, logprob, support=supports.get(i, WHOLE_VOCABULARY)))
        return events

    def _blobs(self, drawn: Drawn, finite: set[int]) -> dict[int, bytes]:
        """By row: from what the tokens of restricted rows were drawn."""
        if drawn.allowed_RV is None:
            return {}
        kept = [r for r, row in enumerate(drawn.restricted) if row in finite]
        allowed_RV = drawn.allowed_RV if len(kept) == len(drawn.restricted) else drawn.allowed_RV[kept]
        return dict(zip((drawn.restricted[r] for r in kept), self._supports.encode(allowed_RV), strict=True))

    def _forward(self, feeds: Sequence[Feed], calls: Sequence[Any]) -> tuple[list[ActiveRequest], Tensor]:
        """Feed the packed tokens; logits [B, V] of the requests whose next token is due."""
        ids: list[int] = []
        positions: list[int] = []
        addresses: list[int] = []
        due: list[int] = []
        sampling: list[ActiveRequest] = []
        for feed in feeds:
            start, end = feed.request.attached.extent.start, feed.begin + feed.count
            ids.extend(feed.request.tokens[feed.begin : end])
            positions.extend(range(feed.begin, end))
            addresses.extend(range(start + feed.begin, start + end))
            if feed.samples:
                sampling.append(feed.request)
                due.append(len(ids) - 1)
        packed_3T = torch.tensor([ids, positions, addresses], device=self._device)
        step = ForwardStep(self._store, calls, positions_T=packed_3T[1], addresses_T=packed_3T[2])
        keep_B = torch.tensor(due, dtype=torch.long, device=self._device)
        output = self._model(
            input_ids=packed_3T[:1],
            position_ids=packed_3T[1:2],
            past_key_values=step,
            kv_step=step,
            use_cache=True,
            logits_to_keep=keep_B,
        )
        return sampling, output.logits[0]

    def _deliver(self, request: ActiveRequest, token: int, logprob: float, *, support: bytes) -> TokenEvent:
        if not math.isfinite(logprob):
            return self._fail(request)
        ends = token in request.stops
        fault = "" if ends or request.constraint is None else request.constraint.advance((token,))
        if fault:
            return self._refuse(request, fault)
        request.tokens.append(token)
        self._sampled_tokens += 1
        reason = None
        if ends:
            reason = FinishReason.STOP
        elif request.sampled >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._requests[request.id]
            self._batcher.finish(request)
        supports = (support,) if support else ()
        return TokenEvent(request.id, (token,), (logprob,), self._version, finish_reason=reason, supports=supports)

    def _refuse(self, request: ActiveRequest, error: str) -> TokenEvent:
        """End a request that its grammar leaves no way on; others and its KV are sound."""
        del self._requests[request.id]
        self._batcher.finish(request)
        return TokenEvent(request.id, (), (), self._version, finish_reason=FinishReason.ERROR, error=error)

    def _fail(self, request: ActiveRequest) -> TokenEvent:
        """The logits are not finite: end the request and let no NaN stay in the pool."""
        self._tainted = True
        del self._requests[request.id]
        self._rows.scrub(request.attached)
        self._batcher.finish(request, reusable=False)
        error = f"non-finite logits at policy version {self._version}: the weights or this prompt overflow"
        return TokenEvent(request.id, (), (), self._version, finish_reason=FinishReason.ERROR, error=error)
