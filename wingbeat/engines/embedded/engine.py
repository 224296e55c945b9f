"""The embedded engine: submit requests, call ``step`` until there is no work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.core.errors import ConflictError, ModelSourceError
from wingbeat.core.ports import EngineStats, GenerateRequest, KvExport, TokenEvent
from wingbeat.core.support import WHOLE_VOCABULARY
from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded.adapters import AdapterBank, AdapterWeights
from wingbeat.engines.embedded.admission import RequestLimits, resolve_limits
from wingbeat.engines.embedded.batching import Batcher, Feed
from wingbeat.engines.embedded.constrained import ConstrainedRequests
from wingbeat.engines.embedded.grammar import GrammarCompiler
from wingbeat.engines.embedded.kv_moves import fits, model_shape, usable_tokens
from wingbeat.engines.embedded.options import EngineOptions
from wingbeat.engines.embedded.pool import ExtentPool
from wingbeat.engines.embedded.requests import ActiveRequest, Move, Phase, activate, apply
from wingbeat.engines.embedded.rows import Row, RowTable
from wingbeat.engines.embedded.runner import ModelRunner, Runner
from wingbeat.engines.embedded.sampler import Draw, Drawn, sample
from wingbeat.engines.embedded.step import Segment, packing_order
from wingbeat.engines.embedded.supports import SupportEncoder

COMPILE_WAIT_S = 0.02
"""How long a step without other work waits for a grammar: whoever drives the engine has other engines to drive, and
requests to abort."""


def resolve_device(device: str | torch.device) -> torch.device:
    """``auto`` is the machine's accelerator if it has one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None else torch.device("cpu")


class MakeRunner(Protocol):
    """Puts a model to work on a device, in one process or in several."""

    def __call__(self, model: PreTrainedModel, *, capacity_tokens: int, device: torch.device) -> Runner: ...


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
        make_runner: MakeRunner = ModelRunner,
    ) -> None:
        self._options = config or EngineOptions()
        self._device = resolve_device(device)
        model.to(self._device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
        pool = ExtentPool(self._options.kv_tokens)
        self._limits: RequestLimits = resolve_limits(model, self._options, largest_row=pool.largest_extent)
        self._runner = make_runner(model, capacity_tokens=pool.capacity_tokens, device=self._device)
        self._adapters = AdapterBank(model, device=self._device)
        self._shape = model_shape(model, self._runner.layers)
        self._rows = RowTable(pool, self._runner)
        self._batcher = Batcher(self._options, self._rows)
        self._stops = frozenset(stop_token_ids)
        self._constrained = ConstrainedRequests(grammars, vocabulary=self._limits.vocabulary)
        self._supports = SupportEncoder()
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._version, self._lineage = policy_version, 0
        self._requests: dict[str, ActiveRequest] = {}
        self._ended: list[TokenEvent] = []
        self._paused = False
        self._tainted = False
        self._sampled_tokens = 0

    @property
    def parallelism(self) -> int:
        """Devices this engine spans."""
        return self._runner.parallelism

    @property
    def runner(self) -> Runner:
        """What ``make_runner`` made."""
        return self._runner

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def lineage(self) -> int:
        """Of :attr:`policy_version`."""
        return self._lineage

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
        if request.adapter and request.adapter not in self._adapters:
            fault = f"there is no adapter {request.adapter!r} here: put_adapter first, or leave adapter empty"
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

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, policy_version: int, partial: bool = False, lineage: int = 0
    ) -> None:
        """Swap weights between steps; running requests go on under the new version.

        All tensors are checked before any is written; ``partial`` allows a subset (merged adapters).
        Raises ModelSourceError on missing, unexpected or mis-shaped tensors, leaving the engine as it was.
        """
        self._runner.write_weights(tensors, partial=partial)
        self._version, self._lineage = policy_version, lineage
        self._new_epoch()

    def put_adapter(self, name: str, weights: AdapterWeights | None) -> None:
        """Add an adapter, or swap its weights; requests that name it run with it from the next step on.

        None is an adapter that adds nothing to the model.  The model's own weights and other adapters stay, and so does
        their KV.  Raises ModelSourceError where it does not fit, leaving the engine as it was.
        """
        if self._runner.parallelism > 1:
            raise ModelSourceError(
                f"adapter {name!r} cannot be added to a model that is split over {self._runner.parallelism} processes;"
                " merge it (AdapterMerger), or set engine.tensor_parallel to 1"
            )
        self._adapters.put(name, weights)
        self._new_epoch(name)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter, of which no request is left."""
        self._adapters.drop(name)
        self._new_epoch(name)

    def _new_epoch(self, adapter: str | None = None) -> None:
        """Weights changed: those of an adapter, or (None) the model's."""
        recompute = self._tainted or self._options.kv_on_update == "recompute"
        self._rows.new_epoch(recompute=recompute, adapter=None if self._tainted else adapter)
        if self._tainted:
            with torch.inference_mode():
                self._runner.clear_all()
            self._tainted = False

    def kv_bytes(self, request_id: str) -> int:
        """How much KV :meth:`export_kv` would copy; 0 where the request has none to give."""
        row = self._exportable(request_id)
        return 0 if row is None else row.computed * sum(s.bytes_per_token for s in self._runner.layers)

    @torch.inference_mode()
    def export_kv(self, request_id: str) -> KvExport | None:
        """A running request's tokens with the KV computed for them, for an engine that takes it over.

        None where there is no KV of the live weights alone: unknown, queued or just fed anew requests, and those
        that went on with older KV after an update.  The request stays; abort it once it is taken over.
        """
        row = self._exportable(request_id)
        if row is None:
            return None
        return KvExport(
            tokens=tuple(row.tokens[: row.computed]),
            layers=tuple(self._runner.read_kv(row.extent.start, tokens=row.computed)),
            policy_version=self._version,
            lineage=self._lineage,
            model=self._shape,
        )

    @torch.inference_mode()
    def import_kv(self, request: GenerateRequest, export: KvExport) -> int:
        """Submit a request that another engine has begun: how many tokens need not be computed again.

        0 where the KV is of other weights, of another model or of other tokens, or finds no room: the request is
        prefilled then, with the same result.  Raises ConflictError if a live request has the same id.
        """
        usable = 0
        sampled_by = (export.model, export.lineage, export.policy_version)
        if sampled_by == (self._shape, self._lineage, self._version) and fits(export, self._runner.layers):
            usable = usable_tokens(export, request.prompt_ids)
        if usable and (row := self._rows.adopt(export.tokens[:usable], cache_key=request.cache_key)) is not None:
            self._runner.write_kv(row.extent.start, [(k[:, :usable], v[:, :usable]) for k, v in export.layers])
        else:
            usable = 0
        self.submit(request)
        return usable

    def _exportable(self, request_id: str) -> Row | None:
        request = self._requests.get(request_id)
        row = None if request is None else request.row
        if row is None or not row.computed or row.adapter:  # adapters have versions that an export does not name
            return None
        return row if row.epoch == self._rows.current() else None

    def pause(self) -> None:
        """Stop computing; requests and their KV stay."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def running(self) -> list[str]:
        """The requests that are decoding or prefilling."""
        return [request.id for request in self._batcher.running]

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._batcher.running),
            waiting=len(self._batcher.waiting),
            sampled_tokens=self._sampled_tokens,
            prefilled_tokens=self._batcher.prefilled_tokens,
            reused_tokens=self._batcher.reused_tokens,
            policy_version=self._version,
            kv_tokens_free=self._rows.free_tokens,
            parallelism=self._runner.parallelism,
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
        sampling, logits_BV = self._forward(feeds)
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

    def _forward(self, feeds: Sequence[Feed]) -> tuple[list[ActiveRequest], Tensor]:
        """Feed the packed tokens; logits [B, V] of the requests whose next token is due."""
        segments = [Segment(f.request.attached.extent, f.begin, f.count) for f in feeds]
        order = packing_order(segments)
        ids: list[int] = []
        due: list[int] = []
        sampling: list[ActiveRequest] = []
        adapted = False
        for i in order:
            feed = feeds[i]
            request = feed.request
            ids += request.tokens[feed.begin : feed.begin + feed.count]
            if feed.samples:
                sampling.append(request)
                due.append(len(ids) - 1)
            adapted = adapted or bool(request.adapter)
        packed = [segments[i] for i in order]
        if not adapted:
            return sampling, self._runner.forward(packed, ids, due)
        with self._adapters.over([(feeds[i].request.adapter, feeds[i].count) for i in order], kept=due):
            return sampling, self._runner.forward(packed, ids, due)

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
        weights = f"with adapter {request.adapter!r}" if request.adapter else f"at policy version {self._version}"
        error = f"non-finite logits {weights}: the weights or this prompt overflow"
        return TokenEvent(
            request.id, (), (), self._version, finish_reason=FinishReason.ERROR, error=error, overflow=True
        )
