"""The engine of a vLLM server, against a stand-in for the server; the real one is met in tests/vllm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import Qwen3Config

from wingbeat.core.config import Config
from wingbeat.core.config.vllm import SET_BY_US
from wingbeat.core.errors import ModelSourceError, SetupError, UnavailableError
from wingbeat.core.ports import GenerateRequest, TokenEvent
from wingbeat.core.support import decode_support
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.engines.vllm import client as vllm_client
from wingbeat.engines.vllm.engine import EngineSettings, VllmEngine
from wingbeat.engines.vllm.files import KeptFile, check_fits, write_adapter
from wingbeat.engines.vllm.flags import BASE, ServerSpec, arguments, environment, kv_bytes
from wingbeat.engines.vllm.inside import wingbeat_vllm_worker
from wingbeat.engines.vllm.running import check_running
from wingbeat.engines.vllm.served import Weights
from wingbeat.engines.vllm.server import OwnServer
from wingbeat.engines.vllm.supports import support_of
from wingbeat.engines.vllm.wire import Candidates
from wingbeat.weights.checksum import tensors_checksum

TOKEN = 5
LOGPROB = -1.5


class StandIn:
    """The endpoints that the engine uses, with scripted tokens.

    Listens on a socket in ``folder``; every request gets ``TOKEN`` again and again, ``pace`` seconds apart."""

    def __init__(self, folder: Path, *, pace: float = 0.002) -> None:
        self.address = str(folder / "s.sock")
        self.label = "default"
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.is_lost = False
        self.starts = 0
        self.rpc_error = ""
        self.workers = 1
        """The first of them has ``rpc_error``."""
        self.offered = ["base"]
        self.logprob: float | None = LOGPROB
        self.spans_lag = 0
        self.sent = threading.Event()
        """A whole reply was written."""
        self.rpcs: list[str] = []
        self.tops: list[tuple[int, float]] = []
        """What is listed beside each token; else as many as are asked for, the last of them impossible."""
        self._pace = pace
        self._running = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._listen())

    # --- the face of a server ----------------------------------------------------------------

    def start(self) -> None:
        self.starts += 1
        self.is_lost = False
        self._loop.call_soon_threadsafe(self._running.set)
        self.label = "default"

    def ended(self) -> str:
        return ""

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def calls_of(self, word: str) -> list[str]:
        return [call for call in self.calls if word in call]

    def lose(self) -> None:
        """All streams break off, and nothing is answered until the next start."""
        self.is_lost = True

    def hang(self) -> None:
        """Connections stay, and nothing comes any more, until the next start."""
        self._loop.call_soon_threadsafe(self._running.clear)

    # --- HTTP -------------------------------------------------------------------------------

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        app = web.Application(middlewares=[self._log])
        self._running.set()
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/collective_rpc", self._rpc)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/update_weight_version", self._set_label)
        app.router.add_post("/v1/load_lora_adapter", self._ok)
        app.router.add_post("/v1/unload_lora_adapter", self._ok)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.UnixSite(self._runner, self.address).start()

    @web.middleware
    async def _log(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path_qs)
        if self.is_lost:
            raise web.HTTPServiceUnavailable
        return await handler(request)

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": name, "root": "model", "max_model_len": 64} for name in self.offered]}
        )

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.rpcs.append(body["method"])
        answer = {
            "numbers": list(range(len(self.calls_of("load_lora")))),
            "ready": True,
            "checksum": (body.get("args") or [""])[-1],
            "error": self.rpc_error,
        }
        others = [{**answer, "error": ""}] * (self.workers - 1)
        return web.json_response({"results": [answer, *others]})

    async def _pause(self, request: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({})

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["token_ids"] == [13]:
            return web.json_response({"error": {"message": "an unlucky prompt"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        params, labels = body["sampling_params"], []
        for i in range(params["max_tokens"]):
            await self._running.wait()
            await asyncio.sleep(self._pace)
            if self.is_lost:
                assert request.transport is not None
                request.transport.close()
                return response
            labels.append(self.label)
            await response.write(self._event(params, labels, last=i + 1 == params["max_tokens"]))
        usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        self.sent.set()
        return response

    def _event(self, params: dict[str, Any], labels: list[str], *, last: bool) -> bytes:
        wanted = params["logprobs"]
        listed = self.tops or [(TOKEN + i, LOGPROB if i < wanted - 1 else -9999.0) for i in range(wanted)]
        tops = [{"token_id": token, "logprob": logprob} for token, logprob in listed]
        starts = [i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
        ends = [*starts[1:], len(labels) - self.spans_lag]
        choice = {
            "token_ids": [TOKEN],
            "logprobs": {"content": [{"logprob": self.logprob, "top_logprobs": tops}]},
            "finish_reason": "length" if last else None,
            "weight_versions": [
                {"version": labels[b], "start": b, "end": e} for b, e in zip(starts, ends, strict=True)
            ],
        }
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


class Grammars:
    """A compiler that is never asked."""


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    server = StandIn(tmp_path)
    yield server
    server.close()


def close_but_not(stand_in: StandIn, engine: VllmEngine) -> None:
    """The stand-in has a fixture of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "close", lambda: None)
        engine.close()


@pytest.fixture
def engine(stand_in: StandIn) -> Iterator[VllmEngine]:
    settings = EngineSettings(context_tokens=64, vocabulary=50, max_running=4, kv_tokens=100, start_timeout_s=10)
    made = VllmEngine(stand_in, settings=settings, grammars=cast(Any, Grammars()), end_token=lambda: 7)
    made.start()
    assert [call for call in stand_in.calls if "resume" in call] == ["/resume"], "somebody may have left it paused"
    assert stand_in.label == "0"
    stand_in.bodies.clear()
    stand_in.calls.clear()
    yield made
    close_but_not(stand_in, made)


def test_a_server_with_a_shorter_context_is_refused(stand_in: StandIn) -> None:
    settings = EngineSettings(context_tokens=65, vocabulary=50, max_running=4, kv_tokens=100, start_timeout_s=10)
    engine = VllmEngine(stand_in, settings=settings, grammars=cast(Any, Grammars()), end_token=lambda: 7)
    with pytest.raises(SetupError, match="takes 64 tokens"):
        engine.start()
    close_but_not(stand_in, engine)


def submit(
    engine: VllmEngine, name: str, prompt: Sequence[int] = (1, 2), *, model: str = BASE, **sampling: Any
) -> None:
    params = SamplingParams(**{"max_tokens": 4, **sampling})
    engine.submit(GenerateRequest(name, list(prompt), params), model=model)


def drain(engine: VllmEngine, *, model: str = BASE, until: Callable[[], bool] = lambda: False) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work(model) and not until():
        events += engine.step(model, wait_s=0.01)
    return events


def weights(folder: Path, version: int, *, lineage: int = 0) -> Weights:
    path = folder / f"{version}.safetensors"
    path.touch()
    return Weights(KeptFile(path), f"sum-{version}", version, lineage)


def test_tokens_come_with_logprobs_versions_and_an_end(engine: VllmEngine, stand_in: StandIn) -> None:
    submit(engine, "r", max_tokens=3, temperature=0.5, seed=9, stop_token_ids=(4,))
    events = drain(engine)
    assert [(e.token_ids, e.logprobs, e.policy_version, e.supports) for e in events] == [
        ((TOKEN,), (LOGPROB,), 0, ())
    ] * 3
    assert [e.finish_reason for e in events] == [None, None, FinishReason.LENGTH]
    (body,) = stand_in.bodies
    assert body["token_ids"] == [1, 2]
    assert body["sampling_params"] == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "logprobs": 0,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "detokenize": False,
        "seed": 9,
    }


def test_an_update_cuts_a_running_reply_where_the_server_says(
    engine: VllmEngine, stand_in: StandIn, tmp_path: Path
) -> None:
    submit(engine, "r", max_tokens=40)
    before = drain(engine, until=lambda: engine.stats(BASE).sampled_tokens >= 3)
    assert engine.swap(weights(tmp_path, 7, lineage=2)) == "sum-7"
    events = [*before, *drain(engine)]
    versions = [(e.policy_version, e.lineage) for e in events for _ in e.token_ids]
    cut = versions.index((7, 2))
    assert versions == [(0, 0)] * cut + [(7, 2)] * (40 - cut)
    assert 3 <= cut < 40
    salt = stand_in.bodies[0]["cache_salt"]
    submit(engine, "s")
    drain(engine)
    assert stand_in.bodies[1]["cache_salt"] != salt, "KV of the old weights must not be found"
    assert [call for call in stand_in.calls if "pause" in call or "resume" in call] == [
        "/pause?mode=keep&clear_cache=true",
        "/resume",
    ]


def test_weights_that_the_server_refuses_leave_it_as_it_was(
    engine: VllmEngine, stand_in: StandIn, tmp_path: Path
) -> None:
    stand_in.rpc_error = "torn"
    with pytest.raises(UnavailableError, match="torn"):
        engine.swap(weights(tmp_path, 7))
    submit(engine, "r")
    assert {event.policy_version for event in drain(engine)} == {0}
    assert stand_in.starts == 1


def test_a_lost_server_is_started_again_with_its_weights_and_what_was_left(
    engine: VllmEngine, stand_in: StandIn, tmp_path: Path
) -> None:
    told: list[str] = []
    engine.on_change = told.append
    engine.swap(weights(tmp_path, 3))
    submit(engine, "r", (1, 2), max_tokens=12, seed=100)
    events = drain(engine, until=lambda: engine.stats(BASE).sampled_tokens >= 4)
    sampled = sum(len(event.token_ids) for event in events)
    stand_in.lose()
    events += drain(engine, until=lambda: stand_in.starts == 2)
    submit(engine, "meanwhile", (9,), max_tokens=2)
    events += drain(engine)
    mine = [event for event in events if event.request_id == "r"]
    assert sum(len(event.token_ids) for event in mine) == 12
    assert {event.policy_version for event in events} == {3}
    _, again = (body for body in stand_in.bodies if "seed" in body["sampling_params"])
    done = len(again["token_ids"]) - 2
    assert done >= sampled
    assert again["token_ids"] == [1, 2, *[TOKEN] * done]
    assert (again["sampling_params"]["max_tokens"], again["sampling_params"]["seed"]) == (12 - done, 100 + done)
    assert len(told) == 2
    assert told[1] == ""


def test_a_server_that_hangs_is_started_again_and_an_idle_one_is_not(stand_in: StandIn) -> None:
    now, tick = 0.0, 0.0

    def clock() -> float:
        nonlocal now
        now += tick
        return now

    settings = EngineSettings(context_tokens=64, vocabulary=50, max_running=4, kv_tokens=100, stall_s=60)
    engine = VllmEngine(stand_in, settings=settings, grammars=cast(Any, Grammars()), end_token=lambda: 7, clock=clock)
    engine.start()
    starts, told = stand_in.starts, list[str]()
    engine.on_change = told.append
    now = 1000.0
    submit(engine, "after a pause", max_tokens=2)
    drain(engine)
    assert stand_in.starts == starts
    submit(engine, "r", max_tokens=12)
    events = drain(engine, until=lambda: engine.stats(BASE).sampled_tokens >= 4)
    stand_in.hang()
    tick = 5.0
    events += drain(engine, until=lambda: stand_in.starts > starts)
    tick = 0.0
    events += drain(engine)
    assert (stand_in.starts, told[0]) == (starts + 1, "it said nothing for 65 s, and has 1 requests")
    assert sum(len(event.token_ids) for event in events) == 12
    close_but_not(stand_in, engine)


def test_workers_that_differ_after_an_update_are_started_again(
    engine: VllmEngine, stand_in: StandIn, tmp_path: Path
) -> None:
    engine.swap(weights(tmp_path, 3))
    submit(engine, "r", max_tokens=30)
    events = drain(engine, until=lambda: engine.stats(BASE).sampled_tokens >= 2)
    stand_in.workers, stand_in.rpc_error = 2, "torn"
    with pytest.raises(UnavailableError, match="1 of 2 vLLM workers"):
        engine.swap(weights(tmp_path, 4))
    stand_in.rpc_error = ""
    events += drain(engine)
    assert (stand_in.starts, {event.policy_version for event in events}) == (2, {3})
    assert sum(len(event.token_ids) for event in events) == 30


def test_what_cannot_be_known_of_a_token_is_not_guessed(engine: VllmEngine, stand_in: StandIn) -> None:
    stand_in.logprob = -9999.0
    submit(engine, "impossible")
    assert all(math.isnan(logprob) for event in drain(engine) for logprob in event.logprobs)
    stand_in.logprob = None
    submit(engine, "broken")
    (end,) = drain(engine)
    assert "non-finite logits" in end.error and end.overflow
    stand_in.logprob, stand_in.spans_lag = LOGPROB, 1
    submit(engine, "whose")
    (end,) = drain(engine)
    assert (end.token_ids, end.finish_reason) == ((), FinishReason.ERROR)


def test_replies_wait_in_vllm_while_nobody_takes_them(
    engine: VllmEngine, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_client, "MAX_PIECES", 3)
    submit(engine, "r", max_tokens=50)
    assert stand_in.sent.wait(10)
    assert engine._client._pieces.qsize() <= 3
    assert sum(len(event.token_ids) for event in drain(engine)) == 50


def test_a_running_server_may_have_served_somebody_before(
    engine: VllmEngine, stand_in: StandIn, tmp_path: Path
) -> None:
    submit(engine, "r")
    drain(engine)
    settings = EngineSettings(context_tokens=64, vocabulary=50, max_running=4, kv_tokens=100, start_timeout_s=10)
    later = VllmEngine(stand_in, settings=settings, grammars=cast(Any, Grammars()), end_token=lambda: 7)
    later.start()
    submit(later, "r")
    drain(later)
    before, after = (body["cache_salt"] for body in stand_in.bodies if body["cache_salt"] != "probe")
    assert before != after, "KV of weights that were labelled alike"
    stand_in.offered.append("a")
    later.model("a")
    later.put_adapter("a", weights(tmp_path, 4))
    assert [call.rpartition("/")[2] for call in stand_in.calls_of("lora_adapter")] == [
        "unload_lora_adapter",
        "load_lora_adapter",
    ]
    close_but_not(stand_in, later)


def test_a_server_that_is_lost_too_often_is_given_up(engine: VllmEngine, stand_in: StandIn) -> None:
    with pytest.raises(UnavailableError, match="was lost 5 times"):
        for i in range(6):
            submit(engine, f"r{i}", max_tokens=30)
            stand_in.lose()
            drain(engine)


def test_an_aborted_and_a_refused_request_end_with_the_reason(engine: VllmEngine) -> None:
    submit(engine, "long", max_tokens=50)
    drain(engine, until=lambda: engine.stats(BASE).sampled_tokens >= 2)
    engine.abort("long")
    submit(engine, "unlucky", (13,))
    submit(engine, "wide", max_tokens=500)
    submit(engine, "open", grammar="start: /x/", stop_token_ids=(3,))
    submit(engine, "resumed", grammar="start: /x/", stop_token_ids=(7,), resumed_tokens=1)
    ends = {e.request_id: (e.finish_reason, e.error) for e in drain(engine) if e.finish_reason}
    assert ends["long"] == (FinishReason.ABORT, "")
    assert ends["unlucky"] == (FinishReason.ERROR, "an unlucky prompt")
    for name, hint in (("wide", "exceed"), ("open", "stop_token_ids"), ("resumed", "middle of its grammar")):
        assert hint in ends[name][1]


def test_adapters_have_versions_of_their_own(engine: VllmEngine, stand_in: StandIn, tmp_path: Path) -> None:
    engine.model("a"), engine.model("b")
    engine.put_adapter("a", weights(tmp_path, 4))
    engine.put_adapter("b", weights(tmp_path, 9))
    for name, version in (("a", 4), ("b", 9)):
        submit(engine, f"of-{name}", model=name)
        assert {event.policy_version for event in drain(engine, model=name)} == {version}
    assert [body["model"] for body in stand_in.bodies] == ["a", "b"]
    engine.put_adapter("a", weights(tmp_path, 5))
    assert len(stand_in.calls_of("load_lora")) == 2
    assert stand_in.rpcs[-1] == "wingbeat_replace_adapter"
    assert (engine.model("a").version, engine.model("b").version) == (5, 9)
    assert (engine.stats("a").sampled_tokens, engine.stats("a").reused_tokens) == (4, 1)


TOP_P = SamplingParams(max_tokens=1, top_p=0.5)
GRAMMAR = SamplingParams(max_tokens=1, grammar="start: /x/")


@pytest.mark.parametrize(
    ("sampling", "candidates", "allowed", "expected"),
    [
        (SamplingParams(max_tokens=1), ((1, -1.0),), None, []),
        (SamplingParams(max_tokens=1, temperature=0.0, top_k=3), ((1, -1.0),), None, []),
        (TOP_P, ((1, -1.0), (4, -2.0), (2, -math.inf)), None, [1, 4]),
        (TOP_P, ((1, -1.0), (4, -2.0)), None, None),  # the nucleus may go on beyond the list
        (GRAMMAR, ((3, -1.0), (0, -math.inf)), [1, 3], [3]),  # what vLLM did counts
        (GRAMMAR, ((3, -1.0), (1, -2.0)), [1, 3, 5], [1, 3, 5]),
        (GRAMMAR, ((3, -1.0), (2, -2.0)), [1, 3, 5], None),  # our compiler does not agree with vLLM's
        (GRAMMAR, ((3, -1.0), (1, -2.0)), None, None),
        (TOP_P, ((1, -math.inf), (4, -2.0)), None, None),
    ],
)
def test_supports_are_exact_or_unknown(
    sampling: SamplingParams, candidates: Candidates, allowed: list[int] | None, expected: list[int] | None
) -> None:
    mask = None if allowed is None else np.isin(np.arange(6), allowed)
    found = support_of(candidates[0][0], candidates, sampling, vocabulary=6, allowed=lambda: mask)
    assert found.is_known == (expected is not None)
    if expected:
        assert np.flatnonzero(decode_support(found.blob, vocabulary=6)).tolist() == expected
    else:
        assert found.blob == b""


def test_an_adapter_is_laid_out_as_peft_does_and_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "published.safetensors"
    path.write_bytes(b"weights")
    kept = KeptFile(path)
    names = [
        f"base_model.model.model.layers.0.{m}.lora_{half}.weight" for m in ("mlp.up_proj", "q_proj") for half in "AB"
    ]
    write_adapter(tmp_path / "adapter", kept, names=names, rank=4, alpha=8.0, base="model")
    path.unlink()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == b"weights"
    assert kept.path.read_bytes() == b"weights"
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8.0, ["q_proj", "up_proj"])
    kept.close()


def test_tensors_by_other_names_or_shapes_are_refused() -> None:
    model = {"a": (2, 3), "lm_head.weight": (5, 3)}
    check_fits({"a": (2, 3)}, model, is_tied=True)
    with pytest.raises(ModelSourceError, match=r"lacking lm_head\.weight"):
        check_fits({"a": (2, 3)}, model, is_tied=False)
    with pytest.raises(ModelSourceError, match="unexpected b"):
        check_fits({"a": (2, 3), "b": (1,)}, model, is_tied=True)
    with pytest.raises(ModelSourceError, match=r"expected shape \(2, 3\)"):
        check_fits({"a": (3, 2)}, model, is_tied=True)


def test_every_argument_of_ours_is_refused_from_the_configuration(tmp_path: Path) -> None:
    Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8).save_pretrained(tmp_path)
    spec = ServerSpec(
        tmp_path, "float32", 64, max_running=4, kv_tokens=1000, prefill_tokens=32, adapters=2, adapter_rank=9
    )
    given = arguments(spec)
    assert {argument for argument in given if argument.startswith("--")} <= SET_BY_US
    assert given[given.index("--max-lora-rank") + 1] == "16"
    assert float(given[given.index("--gpu-memory-utilization") + 1]) < 0.1, "others are on the GPU, too"
    assert kv_bytes(spec) == 2 * 2 * 2 * 8 * 4 * (1000 + 512)


def test_vllm_gets_no_keys_and_a_short_folder_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINGBEAT_WORKER_KEY", "WINGBEAT_KEY_EAST", "VLLM_API_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, "secret")
    spec = ServerSpec(tmp_path, "float32", 64, max_running=4, kv_tokens=1000, prefill_tokens=32, threads=3)
    given = environment(spec, sockets=tmp_path)
    assert "secret" not in given.values()
    assert (given["OMP_NUM_THREADS"], given["VLLM_RPC_BASE_PATH"]) == ("3", str(tmp_path))
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    server = OwnServer(spec)
    assert len(server.address) < 100
    assert Path(server.address).parent.stat().st_mode & 0o777 == 0o700
    server.close()
    assert not Path(server.address).parent.exists()
    assert not any(deep.iterdir())


FITTING = {
    "--dtype": "float32",
    "--generation-config": "vllm",
    "--structured-outputs-config": "guidance",
    "--speculative-config": "none",
    "--max-logprobs": -1,
    "--max-loras": 2,
    "--max-lora-rank": 8,
}


@pytest.mark.parametrize(
    ("changed", "loaded", "said"),
    [
        ({}, "", ""),
        (
            {"--generation-config": "auto", "--max-logprobs": 20},
            "",
            "vllm, got auto; expected --max-logprobs 512 or more",
        ),
        ({"--speculative-config": "set"}, "", "expected --speculative-config none, got set"),
        ({}, "0123456789abcdef01", "trained before \\(checksum 0123456789abcdef\\)"),
        (None, "", "another release of Wingbeat: start it anew"),
        ({"--dtype": None}, "", "another release of Wingbeat: start it anew"),
    ],
)
def test_a_running_server_is_asked_how_it_was_started(
    changed: dict[str, Any] | None, loaded: str, said: str, tmp_path: Path
) -> None:
    spec = ServerSpec(tmp_path, "float32", 64, 4, 512, 16, adapters=2, adapter_rank=8)
    flags = {name: value for name, value in (FITTING | (changed or {})).items() if value is not None}
    about = {} if changed is None else {"flags": flags, "loaded": loaded}
    with pytest.raises(SetupError, match=said) if said else contextlib.nullcontext():
        check_running("http://here", root=str(tmp_path), about=about, spec=spec, needs_base=True)


def test_the_checksum_inside_vllm_is_that_of_manifests() -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    assert wingbeat_vllm_worker.checksum(tensors) == tensors_checksum(tensors)


@pytest.mark.parametrize(
    ("engine", "hint"),
    [
        ({"vllm": {"url": "http://x"}}, "backend"),
        ({"backend": "vllm", "device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"backend": "vllm", "count": 2, "vllm": {"url": "http://x"}}, "`count` to 1"),
        ({"backend": "vllm", "vllm": {"url": "http://x", "python": "p"}}, "of own servers"),
        ({"backend": "vllm", "tensor_parallel": 2, "vllm": {"url": "http://x"}}, "--tensor-parallel-size 2"),
        ({"backend": "vllm", "vllm": {"args": ["--max_model_len=3"]}}, "--max-model-len is set by Wingbeat"),
        ({"backend": "vllm", "vllm": {"url": "http://x", "pinned": "server"}}, r"`vllm\.pinned` is of own servers"),
        *(
            ({"backend": "vllm", "vllm": {"args": [argument]}}, "is set by Wingbeat")
            for argument in ("-tp", "--no-enable-lora", "--structured-outputs-config.backend=x", "--tensor-par=2")
        ),
        ({"backend": "vllm", "vllm": {"url": "http://x"}, "policies": 2}, "names one server"),
        ({"backend": "vllm", "rank": 513}, "up to rank 512"),
    ],
)
def test_contradictions_are_refused_by_name(engine: dict[str, Any], hint: str) -> None:
    count, rank = engine.pop("policies", 1), engine.pop("rank", 4)
    policies = {f"p{i}": {"model": "m", "lora": {"rank": rank}} for i in range(count)}
    with pytest.raises(ValueError, match=hint):
        Config.model_validate({"policies": policies, "engine": engine})
