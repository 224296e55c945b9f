"""Random lives of an engine: whatever happens, each request ends once and no two write one row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.core.types import FinishReason
from wingbeat.engines.embedded.batching import Batcher
from wingbeat.engines.embedded.options import EngineOptions
from wingbeat.engines.embedded.pool import ExtentPool
from wingbeat.engines.embedded.requests import ActiveRequest
from wingbeat.engines.embedded.rows import RowTable
from wingbeat.engines.embedded.sampler import Draw

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.just(0), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 12), st.just(0), st.just(0)),
    st.tuples(st.just("update"), st.just(0), st.just(0), st.just(0)),
)


class TokenMemory:
    """Stands in for the KV tensors: remembers which token (and weights) every address was computed from."""

    def __init__(self, capacity: int) -> None:
        self.cells: list[tuple[int, int] | None] = [None] * capacity

    def ensure(self, end: int) -> None:
        assert end <= len(self.cells)

    def copy(self, source: int, target: int, *, tokens: int) -> None:
        assert abs(source - target) >= tokens
        self.cells[target : target + tokens] = self.cells[source : source + tokens]

    def clear(self, start: int, *, tokens: int) -> None:
        self.cells[start : start + tokens] = [None] * tokens


class World:
    """The batcher over token memory, with a checker of its invariants."""

    def __init__(self, options: EngineOptions) -> None:
        pool = ExtentPool(options.kv_tokens)
        self.memory = TokenMemory(options.kv_tokens)
        self.rows = RowTable(pool, self.memory)
        self.batcher = Batcher(options, self.rows)
        self.options = options
        self.live: dict[int, ActiveRequest] = {}
        self.ends: dict[int, FinishReason] = {}

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        number = len(self.live) + len(self.ends)
        request = ActiveRequest(str(number), list(prompt), len(prompt), max_tokens, "", frozenset(), Draw())
        self.live[number] = request
        self.batcher.add(request)

    def end(self, number: int, reason: FinishReason) -> None:
        assert number not in self.ends
        self.batcher.finish(self.live.pop(number))
        self.ends[number] = reason

    def step(self) -> None:
        feeds = self.batcher.schedule()
        assert feeds or not self.live
        assert len({f.request.id for f in feeds}) == len(feeds)
        for feed in feeds:
            row = feed.request.attached
            assert feed.begin == row.computed
            assert feed.begin + feed.count <= row.extent.size
            self._check_past(feed.request)
            for position in range(feed.begin, feed.begin + feed.count):
                self.memory.cells[row.extent.start + position] = (feed.request.tokens[position], self.rows.epoch)
        self.batcher.commit(feeds)
        for feed in feeds:
            assert feed.samples == (feed.request.attached.computed == len(feed.request.tokens))
            if feed.request.attached.computed == len(feed.request.tokens):
                self._sampled(feed.request)
        self.check()

    def _sampled(self, request: ActiveRequest) -> None:
        request.tokens.append((7 * len(request.tokens) + int(request.id)) % 50)
        if request.sampled >= request.max_tokens:
            self.end(int(request.id), FinishReason.LENGTH)

    def _check_past(self, request: ActiveRequest) -> None:
        row = request.attached
        for position in range(row.computed):
            cell = self.memory.cells[row.extent.start + position]
            assert cell is not None
            assert cell[0] == request.tokens[position]
            assert self.options.kv_on_update == "keep" or cell[1] == self.rows.epoch

    def check(self) -> None:
        rows = [*self.rows.owned, *self.rows.idle]
        spans = sorted((r.extent.start, r.extent.start + r.extent.size) for r in rows)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert len({id(r) for r in rows}) == len(rows)
        assert {id(r.attached) for r in self.batcher.running} == {id(r) for r in self.rows.owned}
        assert len(self.batcher.running) <= self.options.max_running
        for row in self.rows.idle:
            cells = self.memory.cells[row.extent.start : row.extent.start + row.computed]
            assert cells == [(token, self.rows.epoch) for token in row.tokens[: row.computed]]


@settings(max_examples=150)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    keep=st.booleans(),
    kv_tokens=st.sampled_from([128, 200, 512]),
    prefill_tokens=st.sampled_from([7, 30, 200]),
    headroom=st.sampled_from([1, 64]),
)
def test_random_lives_of_the_batcher(
    actions: list[tuple[str, int, int, int]], keep: bool, kv_tokens: int, prefill_tokens: int, headroom: int
) -> None:
    options = EngineOptions(
        max_running=5,
        kv_tokens=kv_tokens,
        prefill_tokens=prefill_tokens,
        row_headroom_tokens=headroom,
        kv_on_update="keep" if keep else "recompute",
    )
    world = World(options)
    submitted = 0
    for kind, number, length, max_tokens in actions:
        if kind == "submit":
            # Six families of prompts that share their beginnings.
            world.submit([*range(length // 2), *([number] * (length - length // 2))], max_tokens)
            submitted += 1
        elif kind == "abort" and number in world.live:
            world.end(number, FinishReason.ABORT)
        elif kind == "step":
            for _ in range(number):
                world.step()
        elif kind == "update":
            world.rows.new_epoch(recompute=not keep)
        world.check()
    for _ in range(20_000):
        if not world.live:
            break
        world.step()
    assert not world.live
    assert len(world.ends) == submitted
    assert world.rows.free_tokens == kv_tokens // 16 * 16


@settings(max_examples=12)
@given(actions=st.lists(ACTIONS, max_size=25))
def test_random_lives_of_the_engine_give_reference_logprobs(
    harness_factory: Any, actions: list[tuple[str, int, int, int]]
) -> None:
    harness, models = harness_factory()
    engine = harness.engine(models[0], kv_tokens=256, max_running=4, prefill_tokens=24, row_headroom_tokens=4)
    prompts: dict[str, list[int]] = {}
    version = 0
    for kind, number, length, max_tokens in actions:
        if kind == "submit":
            name = str(len(prompts))
            prompts[name] = [*range(length // 2), *([number] * (length - length // 2))] or [number]
            engine.submit(harness.request(name, prompts[name], max_tokens))
        elif kind == "abort":
            engine.abort(str(number))
        elif kind == "step":
            for _ in range(number):
                harness.record(engine.step())
        else:
            version += 1
            engine.update_weights(models[version % 2].state_dict(), policy_version=version)
    replies = harness.drain(engine)
    assert set(replies) == set(prompts)
    for name, prompt in prompts.items():
        reply = replies[name]
        assert len(reply.ends) == 1
        assert reply.versions == sorted(reply.versions)
        if not reply.token_ids:
            continue
        by_model = [harness.reference(m, prompt, reply.token_ids) for m in models]
        harness.assert_close(reply.logprobs, [by_model[v % 2][i] for i, v in enumerate(reply.versions)])
    assert engine.stats().kv_tokens_free == 256
