"""The engine worker on a tiny real model, driven by messages and without a network."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from wingbeat.core.config import EngineConfig, PolicyConfig
from wingbeat.core.ports import TokenEvent
from wingbeat.core.support import decode_support
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import Manifest, PinVersion, UnpinVersion, UpdateWeights, WeightsServed
from wingbeat.core.worker_protocol import (
    Abort,
    Failed,
    Generate,
    Heartbeat,
    PolicySpec,
    Shutdown,
    TokenChunk,
    Tokens,
    Welcome,
    WorkerMessage,
)
from wingbeat.environments.calculator.tokenizer import build_tokenizer, write_tokenizer
from wingbeat.tracking import ChatTemplate, parse_reply
from wingbeat.tracking.grammar import build_grammar
from wingbeat.weights.publish import WeightPublisher
from wingbeat.workers.engine import EngineWorker, Span
from wingbeat.workers.link import Connected, Disconnected, Inbound

HOST = "this-host"
VOCABULARY = build_tokenizer().get_vocab_size()
Turn = list[Inbound] | Callable[[], list[Inbound]]


def build_model(seed: int, *, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    build_model(0).save_pretrained(folder)
    config = PolicyConfig(model=str(folder), context_tokens=128)
    return PolicySpec("solver", str(folder), 128, config.model_dump(mode="json"))


@pytest.fixture(scope="module")
def manifests(spec: PolicySpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Manifest]]:
    """Versions 0, 1 and 2, each of other weights."""
    with WeightPublisher(tmp_path_factory.mktemp("weights"), host_id=HOST, policy="solver") as publisher:
        yield [
            publisher.publish(build_model(v).state_dict(), version=v, kind="full", base_model=spec.model)
            for v in range(3)
        ]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicySpec, Manifest]:
    """A model with logits for every token of the tokenizer, served from its folder."""
    folder = tmp_path_factory.mktemp("wide")
    write_tokenizer(folder)
    build_model(0, vocabulary=build_tokenizer().get_vocab_size()).save_pretrained(folder)
    config = PolicyConfig(model=str(folder), context_tokens=128)
    spec = PolicySpec("solver", str(folder), 128, config.model_dump(mode="json"))
    return spec, Manifest("solver", 0, "full", "", "", "base", 0, (), base_model=str(folder))


def generate(name: str, *, max_tokens: int = 6, stream: bool = False, **more: Any) -> Generate:
    prompt = np.arange(1, 6, dtype="<i4").tobytes()
    return Generate(name, "solver", prompt, max_tokens, stream=stream, **more)


class Driver:
    """Plays a script: one entry per loop of the worker, then nothing until its work is done."""

    def __init__(self, spec: PolicySpec, **options: Any) -> None:
        settings = EngineConfig(max_running=8, kv_tokens=2048, prefill_tokens=64, **options)
        self.sent: list[WorkerMessage] = []
        self.own: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        """What the worker tells itself."""
        self.worker = EngineWorker(HOST, lambda *messages: self.sent.extend(messages), self.own.put)
        self.welcome = Connected(
            Welcome("engine-0", 1.0, (spec,), "run", seed=1, engine=settings.model_dump(mode="json"))
        )
        self.num_loops = 0

    def play(self, *script: Turn) -> None:
        first: list[Inbound] = [self.welcome]
        turns = iter([first, *script])

        def receive(*, block: bool) -> list[Inbound]:
            if self.worker.receiving.is_busy:  # weights come between two entries of the script
                return [self.own.get(timeout=20)]
            self.num_loops += 1
            turn = next(turns, None)
            if turn is None:
                return [Shutdown()] if block else []
            return turn() if callable(turn) else turn

        self.worker.run(receive)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def chunks(self, name: str) -> list[TokenChunk]:
        return [c for message in self.of(Tokens) for c in message.chunks if c.request_id == name]


@pytest.fixture
def driver(spec: PolicySpec) -> Driver:
    return Driver(spec)


@torch.no_grad()
def logprobs(version: int, sampled: Sequence[int]) -> list[float]:
    """What a plain forward pass of that version says of the sampled tokens."""
    ids = torch.tensor([[*range(1, 6), *sampled]])
    logits_TV = build_model(version)(input_ids=ids).logits[0].log_softmax(-1)[4:-1]
    return logits_TV.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1).tolist()


def test_weights_are_served_once_acknowledged_and_a_request_ends_with_one_chunk(
    driver: Driver, manifests: list[Manifest]
) -> None:
    driver.play([UpdateWeights(manifests[1])], [generate("r", max_tokens=4)])
    assert driver.sent[0] == WeightsServed("solver", 1, manifests[1].checksum)
    (chunk,) = driver.chunks("r")
    assert (len(chunk.token_ids), chunk.version, chunk.finish) == (4, 1, FinishReason.LENGTH)
    assert list(chunk.logprobs) == pytest.approx(logprobs(1, chunk.token_ids), abs=1e-4)


def test_a_streamed_request_gets_a_chunk_per_token(driver: Driver, manifests: list[Manifest]) -> None:
    driver.play([UpdateWeights(manifests[0])], [generate("s", max_tokens=3, stream=True), generate("r", max_tokens=3)])
    assert [(len(c.token_ids), c.finish) for c in driver.chunks("s")] == [
        (1, None),
        (1, None),
        (1, FinishReason.LENGTH),
    ]
    assert [len(c.token_ids) for c in driver.chunks("r")] == [3]


@pytest.mark.parametrize("stream", [False, True])
def test_no_chunk_mixes_versions_and_each_token_is_of_the_version_it_names(
    driver: Driver, manifests: list[Manifest], stream: bool
) -> None:
    names = [f"r{i}" for i in range(3)]
    requests: list[Inbound] = [generate(name, max_tokens=9, stream=stream, seed=5 + i) for i, name in enumerate(names)]
    driver.play(
        [UpdateWeights(manifests[0])],
        requests,
        [],
        [],
        [UpdateWeights(manifests[1])],
        [],
        [UpdateWeights(manifests[2])],
    )
    for name in names:
        found = driver.chunks(name)
        tokens = [token for chunk in found for token in chunk.token_ids]
        versions = [chunk.version for chunk in found for _ in chunk.token_ids]
        assert len(tokens) == 9 and sorted(set(versions)) == [0, 1, 2] and versions == sorted(versions)
        assert len(found) == (9 if stream else 3)  # one span per version
        by_version = {version: logprobs(version, tokens) for version in range(3)}
        expected = [by_version[version][index] for index, version in enumerate(versions)]
        assert [p for chunk in found for p in chunk.logprobs] == pytest.approx(expected, abs=1e-4)
        assert [chunk.finish for chunk in found][:-1] == [None] * (len(found) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_supports_stand_beside_their_tokens_across_versions(
    driver: Driver, manifests: list[Manifest], stream: bool
) -> None:
    driver.play(
        [UpdateWeights(manifests[0])],
        [
            generate("cut", max_tokens=9, stream=stream, top_k=4, seed=1),
            generate("free", max_tokens=9, stream=stream),
            generate("greedy", max_tokens=9, stream=stream, top_k=4, temperature=0.0),
        ],
        [],
        [],
        [UpdateWeights(manifests[1])],
    )
    found = driver.chunks("cut")
    assert {chunk.version for chunk in found} == {0, 1} and all(c.token_ids for c in found)
    tokens = [token for chunk in found for token in chunk.token_ids]
    full = {version: logprobs(version, tokens) for version in (0, 1)}
    at = 0
    for chunk in found:
        assert len(chunk.supports) == len(chunk.token_ids)
        for token, logprob, blob in zip(chunk.token_ids, chunk.logprobs, chunk.supports, strict=True):
            allowed = decode_support(blob, vocabulary=VOCABULARY)
            assert allowed[token] and allowed.sum() == 4
            assert logprob > full[chunk.version][at]  # the same weight among four is more than among all
            at += 1
    assert not any(chunk.supports for name in ("free", "greedy") for chunk in driver.chunks(name))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_goes_back_and_says_which_lineage_sampled_what(
    driver: Driver, manifests: list[Manifest], stream: bool
) -> None:
    """Also of tokens that are sent only after it went back."""
    back = msgspec.structs.replace(manifests[1], lineage=1)
    driver.play(
        [UpdateWeights(manifests[2])],
        [generate("r", max_tokens=9, stream=stream)],
        [],
        [],
        [UpdateWeights(back)],
    )
    found = driver.chunks("r")
    tokens = [token for chunk in found for token in chunk.token_ids]
    sampled_by = [(chunk.version, chunk.lineage) for chunk in found for _ in chunk.token_ids]
    assert len(tokens) == 9 and sorted(set(sampled_by)) == [(1, 1), (2, 0)] and sampled_by[-1] == (1, 1)
    expected = {version: logprobs(version, tokens) for version in (1, 2)}
    told = [p for chunk in found for p in chunk.logprobs]
    assert told == pytest.approx([expected[v][i] for i, (v, _) in enumerate(sampled_by)], abs=1e-4)
    served = [(m.version, m.lineage, m.checksum) for m in driver.of(WeightsServed)]
    assert served == [(2, 0, manifests[2].checksum), (1, 1, manifests[1].checksum)]


def test_a_span_is_filled_where_only_later_tokens_were_restricted() -> None:
    span = Span(3, lineage=0)
    span.add(TokenEvent("r", (5,), (-1.0,), 3))
    assert span.chunk("r").supports == ()
    span.add(TokenEvent("r", (6, 7), (-1.0, -2.0), 3, supports=(b"\x01abcd", b"")))
    span.add(TokenEvent("r", (8,), (-1.0,), 3))
    chunk = span.chunk("r")
    assert (chunk.token_ids, chunk.supports) == ((5, 6, 7, 8), (b"", b"\x01abcd", b"", b""))


def test_a_grammar_reaches_live_and_pinned_models_and_goes_on_where_it_stood(
    wide: tuple[PolicySpec, Manifest],
) -> None:
    spec, manifest = wide
    tokenizer = build_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    grammar = "start: /[a-f]{3,5}/"
    options: dict[str, Any] = {"max_tokens": 20, "stop_token_ids": (end,), "grammar": grammar}
    begun = generate("begun", resumed_tokens=3, **options)
    begun = msgspec.structs.replace(begun, prompt_ids=np.array(tokenizer.encode("xyzabc").ids, "<i4").tobytes())
    wrong = msgspec.structs.replace(begun, request_id="wrong", resumed_tokens=4)
    driver = Driver(spec)
    driver.play(
        [UpdateWeights(manifest), PinVersion(manifest)],
        [generate("live", **options), generate("pinned", version=0, **options), begun, wrong, generate("free")],
    )
    for name, shortest, longest in (("live", 3, 5), ("pinned", 3, 5), ("begun", 0, 2)):
        (chunk,) = driver.chunks(name)
        assert chunk.finish is FinishReason.STOP and chunk.token_ids[-1] == end
        text = tokenizer.decode(chunk.token_ids[:-1])
        assert shortest <= len(text) <= longest and set(text) <= set("abcdef")
        assert all(chunk.supports) and len(chunk.supports) == len(chunk.token_ids)
    (chunk,) = driver.chunks("wrong")
    assert chunk.finish is FinishReason.ERROR and "do not follow the grammar" in chunk.error
    assert driver.chunks("free")[0].finish is FinishReason.LENGTH


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "order": {
            "type": "object",
            "properties": {
                "dish": {"enum": ["crêpe", "寿司", "pão"]},
                "guests": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
                "table": {
                    "type": "object",
                    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 40}},
                    "required": ["number"],
                    "additionalProperties": False,
                },
            },
            "required": ["dish", "guests", "table"],
            "additionalProperties": False,
        },
        "cancel": None,
    }.items()
]


@pytest.mark.parametrize(
    ("names", "way"), [((), {}), (("order",), {"temperature": 1.5}), (("cancel",), {"top_p": 0.9})]
)
def test_a_random_model_makes_the_calls_that_were_demanded(
    wide: tuple[PolicySpec, Manifest], names: tuple[str, ...], way: dict[str, Any]
) -> None:
    spec, manifest = wide
    template = ChatTemplate.load(Path(spec.model))
    grammar = build_grammar(template, tools=TOOLS, names=names, required=True, one_call=True)
    options = {"max_tokens": 100, "grammar": grammar, "stop_token_ids": template.eos_token_ids, **way}
    driver = Driver(spec)
    requests: list[Inbound] = [generate(f"r{index}", seed=index, **options) for index in range(16)]
    driver.play([UpdateWeights(manifest)], requests)
    called: list[str] = []
    for index in range(16):
        (chunk,) = driver.chunks(f"r{index}")
        assert not chunk.error
        if chunk.finish is FinishReason.LENGTH:
            continue
        reply = parse_reply(template, chunk.token_ids, tools_given=True, new_id=lambda: "call")
        (call,) = reply.message.tool_calls
        assert (reply.message.content, reply.tool_calls_malformed) == ("", 0)
        called.append(call.name)
        parameters = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call.name)
        jsonschema.validate(json.loads(call.arguments_text), parameters or {"maxProperties": 0})
    assert len(called) >= 8
    assert set(called) == set(names or ("order", "cancel"))


def test_an_abort_ends_a_request_with_what_it_had(driver: Driver, manifests: list[Manifest]) -> None:
    driver.play(
        [UpdateWeights(manifests[0])],
        [generate("r", max_tokens=100), generate("other", max_tokens=5)],
        [],
        [Abort("r"), Abort("unknown")],
    )
    (chunk,) = driver.chunks("r")
    assert chunk.finish is FinishReason.ABORT and 0 < len(chunk.token_ids) < 100
    assert [c.finish for c in driver.chunks("other")] == [FinishReason.LENGTH]


def test_a_pinned_version_stays_while_the_live_one_moves_on(driver: Driver, manifests: list[Manifest]) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 4}
    driver.play(
        [UpdateWeights(manifests[0]), PinVersion(manifests[0]), PinVersion(manifests[0])],
        [UpdateWeights(manifests[1])],
        [generate("live", **greedy), generate("pinned", version=0, **greedy)],
    )
    served = [(m.version, m.pinned) for m in driver.of(WeightsServed)]
    assert sorted(served[:3]) == [(0, False), (0, True), (0, True)] and served[3:] == [(1, False)]
    (live,), (pinned,) = driver.chunks("live"), driver.chunks("pinned")
    assert (live.version, pinned.version) == (1, 0)
    assert list(pinned.logprobs) == pytest.approx(logprobs(0, pinned.token_ids), abs=1e-4)


def test_requests_of_a_version_that_is_released_end_with_an_error(driver: Driver, manifests: list[Manifest]) -> None:
    driver.play(
        [UpdateWeights(manifests[1]), PinVersion(manifests[0])],
        [generate("r", version=0, max_tokens=100), generate("live", max_tokens=100, stream=True)],
        [],
        [UnpinVersion("solver", 0), UnpinVersion("solver", 7)],
        [Abort("live"), generate("late", version=0)],
    )
    assert [c.finish for c in driver.chunks("r")] == [FinishReason.ERROR]
    assert "released" in driver.chunks("r")[0].error
    assert driver.chunks("live")[-1].finish is FinishReason.ABORT  # it went on until then
    assert "version 0 is not loaded here" in driver.chunks("late")[0].error


def test_a_request_that_cannot_fit_is_an_error_of_its_own(driver: Driver, manifests: list[Manifest]) -> None:
    driver.play([UpdateWeights(manifests[0])], [generate("big", max_tokens=1000), generate("r")])
    assert [c.finish for c in driver.chunks("big")] == [FinishReason.ERROR] and driver.chunks("big")[0].error
    assert [c.finish for c in driver.chunks("r")] == [FinishReason.LENGTH]


def test_weights_that_cannot_be_read_are_reported_and_the_old_ones_serve_on(
    driver: Driver, manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wingbeat.weights.receiver.GONE_PATIENCE_S", 0.0)
    gone = Manifest("solver", 9, "full", str(tmp_path / "gone"), HOST, "x", 1, (), base_model="")
    driver.play([UpdateWeights(manifests[1])], [UpdateWeights(gone), PinVersion(gone)], [generate("r")])
    assert {(m.command, m.policy) for m in driver.of(Failed)} == {
        ("update_weights", "solver"),
        ("pin_version", "solver"),
    }
    assert "VersionGone" in driver.of(Failed)[0].error
    assert [c.version for c in driver.chunks("r")] == [1]


def test_a_lost_control_ends_its_requests_and_pins_but_not_the_live_weights(
    driver: Driver, manifests: list[Manifest]
) -> None:
    driver.play(
        [UpdateWeights(manifests[1]), PinVersion(manifests[0])],
        [generate("old", max_tokens=100), generate("old-pinned", version=0, max_tokens=100)],
        [],
        [Disconnected()],
        [driver.welcome],
        [generate("new", max_tokens=3), generate("new-pinned", version=0)],
    )
    assert driver.chunks("old") == driver.chunks("old-pinned") == []
    assert [c.finish for c in driver.chunks("new")] == [FinishReason.LENGTH]
    assert [c.finish for c in driver.chunks("new-pinned")] == [FinishReason.ERROR]


def test_a_frozen_policy_serves_its_folder(driver: Driver, spec: PolicySpec) -> None:
    base = Manifest("solver", 0, "full", "", "", "base", 0, (), base_model=spec.model)
    driver.play([UpdateWeights(base)], [generate("r", temperature=0.0)])
    assert driver.of(WeightsServed) == [WeightsServed("solver", 0, "base")]
    (chunk,) = driver.chunks("r")
    assert list(chunk.logprobs) == pytest.approx(logprobs(0, chunk.token_ids), abs=1e-4)


def test_heartbeats_tell_what_was_done_since_the_last(driver: Driver, manifests: list[Manifest]) -> None:
    assert driver.worker.heartbeat() == Heartbeat(0.0, {})
    driver.play([UpdateWeights(manifests[2])], [generate("r", max_tokens=5)])
    beat = driver.worker.heartbeat()
    assert beat.busy_s > 0 and driver.worker.heartbeat().busy_s == 0
    stats = beat.stats["solver"]
    assert (stats["sampled_tokens"], stats["policy_version"], stats["running"]) == (5.0, 2.0, 0.0)


def test_an_idle_worker_blocks_instead_of_spinning(driver: Driver, manifests: list[Manifest]) -> None:
    driver.play([UpdateWeights(manifests[0])])
    assert driver.num_loops == 3  # welcome, weights, shutdown


class SlowHost:
    """Gets weights ready beside its requests."""

    policy_version, lineage = 0, 0

    def __init__(self) -> None:
        self.log: list[str] = []

    def prepare(self, manifest: Manifest, received: Any) -> bool:
        self.log.append("prepare")
        if manifest.version == 2:
            raise ValueError("they do not fit")
        return self.log.count("prepare") == 3

    def serve(self, manifest: Manifest, weights: Any) -> None:
        self.log.append(f"serve {manifest.version} of {weights.path.name}")

    def has_work(self) -> bool:
        return "serve 1" not in " ".join(self.log)

    def step(self) -> list[TokenEvent]:
        self.log.append("step")
        return []

    def close(self) -> None: ...


def test_weights_are_made_ready_between_steps(driver: Driver, manifests: list[Manifest]) -> None:
    host = SlowHost()
    driver.worker._backend = SimpleNamespace(load=lambda *_, **__: host, close=lambda: None)  # pyright: ignore
    driver.play([UpdateWeights(manifests[1])], [], [], [], [UpdateWeights(manifests[2])])
    assert host.log[:6] == [
        "prepare",
        "step",
        "prepare",
        "step",
        "prepare",
        f"serve 1 of {Path(manifests[1].path).name}",
    ]
    assert [(m.version, m.checksum) for m in driver.of(WeightsServed)] == [(1, manifests[1].checksum)]
    (failed,) = driver.of(Failed)
    assert failed.error == "ValueError: they do not fit" and host.log[-1] == "prepare"


def test_what_another_control_asked_for_is_not_served(driver: Driver, manifests: list[Manifest]) -> None:
    """Weights that were on their way when the connection broke, and a pin that was given up before they came."""
    receive = driver.worker._receiver.receive
    gate = Event()

    def slow(manifest: Manifest, *more: Any, **how: Any) -> Any:
        assert gate.wait(20)
        return receive(manifest, *more, **how)

    driver.worker._receiver.receive = slow  # type: ignore[method-assign]
    told: list[Inbound] = []

    def both() -> list[Inbound]:
        return [UpdateWeights(manifests[0]), PinVersion(manifests[1]), Disconnected(), driver.welcome]

    def opened() -> list[Inbound]:
        gate.set()
        told.extend([driver.own.get(timeout=20), driver.own.get(timeout=20)])  # they come all the same
        return told

    driver.play(both, opened, [PinVersion(manifests[2]), UnpinVersion("solver", 2)])
    assert len(told) == 2 and driver.of(WeightsServed) == [] and not driver.worker._pinned


def test_weights_that_overflow_are_said_once_for_each_version_besides_the_replies(
    driver: Driver, spec: PolicySpec, tmp_path: Path
) -> None:
    broken = build_model(0)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with WeightPublisher(tmp_path, host_id=HOST, policy="solver") as publisher:
        weights = [
            publisher.publish(model.state_dict(), version=version, kind="full", base_model=spec.model)
            for version, model in ((1, broken), (2, broken), (3, build_model(1)))
        ]
        driver.play(
            [UpdateWeights(weights[0])],
            [generate("a"), generate("b"), generate("c", stream=True)],
            [UpdateWeights(weights[1])],
            [generate("d")],
            [driver.welcome],  # of a control that has not heard of it
            [UpdateWeights(weights[1]), generate("f")],
            [UpdateWeights(weights[2])],
            [generate("e")],
        )
    for name in "abcdf":
        assert driver.chunks(name)[-1].finish is FinishReason.ERROR and not driver.chunks(name)[-1].token_ids
    assert driver.chunks("e")[-1].finish is FinishReason.LENGTH
    first, second, again = driver.of(Failed)
    assert (first.policy, first.command, first.final) == ("solver", "generate", False)
    assert "non-finite logits at policy version 1" in first.error and "version 2" in second.error
    assert again == second
