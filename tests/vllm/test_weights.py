"""New weights in a real vLLM server: what it samples afterwards is what a torch forward with them says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import children_of
from rig import Replies, Rig, gap, logits_of, perturb

from wingbeat.core.errors import ModelSourceError
from wingbeat.core.support import decode_support
from wingbeat.core.types import FinishReason
from wingbeat.core.weight_protocol import WeightsServed
from wingbeat.core.worker_protocol import Failed
from wingbeat.tracking import ChatTemplate
from wingbeat.tracking.grammar import build_grammar
from wingbeat.workers.hosting import ModelHost

CLOSE = 1e-4
TOKENS = 900
ATTEMPTS = 5
"""On a busy machine vLLM's own server may lag, so that all tokens are sampled before the first of them is seen."""
LONG = list(range(1, 200))
"""More than a block of the prefix cache."""
ANSWER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tied(make_rig: Callable[..., Rig]) -> tuple[Rig, ModelHost]:
    rig = make_rig(model="tied")
    return rig, rig.load()


@pytest.fixture(scope="module")
def untied(make_rig: Callable[..., Rig]) -> tuple[Rig, ModelHost]:
    rig = make_rig(model="untied", kv_on_update="keep", vllm={"pinned": "server"})
    return rig, rig.load()


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_logprobs_after_each_update_are_those_of_the_new_weights(model: str, request: pytest.FixtureRequest) -> None:
    """The prefix cache is warm with what the old weights made of the same prompt."""
    rig, host = request.getfixturevalue(model)
    reference = rig.reference()
    begin = host.policy_version
    for version in range(begin + 1, begin + 4):
        rig.serve(host, rig.publish(perturb(reference, seed=version), version=version))
        for _ in range(2):
            asked = Replies(host)
            asked.submit("a", LONG, seed=version)
            asked.submit("b", LONG[:5], temperature=0.7)
            replies = asked.finish()
            assert gap(logits_of(reference, LONG, replies["a"]), replies["a"]) < CLOSE
            assert gap(logits_of(reference, LONG[:5], replies["b"]), replies["b"], temperature=0.7) < CLOSE
            assert {v for reply in replies.values() for v in reply.versions} == {version}
        asked.until(lambda: host.stats().reused_tokens > 0)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_running_requests_go_on_over_an_update_and_each_token_names_its_weights(
    model: str, request: pytest.FixtureRequest
) -> None:
    """``tied`` recomputes the KV of running requests, ``untied`` keeps it."""
    rig, host = request.getfixturevalue(model)
    for _ in range(ATTEMPTS):
        old, new = rig.reference(), rig.reference()
        first, second = host.policy_version + 1, host.policy_version + 2
        rig.serve(host, rig.publish(perturb(old, seed=1), version=first))
        tensors = perturb(new, seed=2)
        asked = Replies(host)
        for i in range(8):
            asked.submit(f"r{i}", [7 + i, 8, 9], max_tokens=TOKENS)
        asked.until(lambda asked=asked: all(len(asked.replies[name].tokens) >= 20 for name in asked.prompts))
        rig.serve(host, rig.publish(tensors, version=second), meanwhile=asked.step)
        replies = asked.finish()
        if all(second in reply.versions for reply in replies.values()):
            break
    for name, reply in replies.items():
        prompt, cut = asked.prompts[name], reply.versions.index(second)
        assert (len(reply.tokens), reply.finish) == (TOKENS, FinishReason.LENGTH)
        assert 20 <= cut < TOKENS
        assert reply.versions == [first] * cut + [second] * (TOKENS - cut)
        assert gap(logits_of(old, prompt, reply), reply, end=cut) < CLOSE
        if model == "tied":
            after = logits_of(new, prompt, reply)
        else:
            with torch.no_grad():
                kept = old(torch.tensor([[*prompt, *reply.tokens[: cut - 1]]]), use_cache=True).past_key_values
                rest = new(torch.tensor([reply.tokens[cut - 1 : -1]]), past_key_values=kept).logits[0]
            after = torch.cat([logits_of(old, prompt, reply)[:cut], rest])
        assert gap(after, reply, begin=cut) < CLOSE


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(tied: tuple[Rig, ModelHost]) -> None:
    rig, host = tied
    version, reference = host.policy_version, rig.reference()
    tensors = perturb(reference, seed=5)
    tensors["model.layers.0.other"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ModelSourceError, match=r"mlp\.up_proj"):
        rig.serve(host, rig.publish(tensors, version=99))
    assert host.policy_version == version
    asked = Replies(host)
    asked.submit("a", [1, 2, 3])
    assert set(asked.finish()["a"].versions) == {version}


def test_restricted_tokens_come_with_exactly_what_they_were_drawn_from(tied: tuple[Rig, ModelHost]) -> None:
    """Top-k, top-p, both, and a grammar: logprobs are those of the model over each token's support."""
    rig, host = tied
    reference = rig.reference()
    rig.serve(host, rig.publish(perturb(reference, seed=9, scale=0.01), version=host.policy_version + 1))
    template = ChatTemplate.load(rig.source)
    grammar = build_grammar(template, tools=None, schema=ANSWER)
    end = template.eos_token_ids
    asked = Replies(host)
    asked.submit("k", [3, 4], max_tokens=24, top_k=5)
    asked.submit("p", [3, 4], max_tokens=24, top_p=0.6)
    asked.submit("kp", [3, 4], max_tokens=24, top_k=20, top_p=0.9)
    asked.submit("g", [3, 4], max_tokens=40, grammar=grammar, stop_token_ids=end)
    replies = asked.finish()
    for name, reply in replies.items():
        assert not reply.error, reply
        assert all(reply.supports), "every token has a support"
        assert gap(logits_of(reference, [3, 4], reply), reply) < CLOSE, name
    vocabulary = reference.config.vocab_size
    assert {decode_support(blob, vocabulary=vocabulary).sum() for blob in replies["k"].supports} == {5}
    assert {decode_support(blob, vocabulary=vocabulary).sum() for blob in replies["g"].supports} > {1}


def test_an_aborted_request_is_freed_and_bad_ones_end_with_the_reason(tied: tuple[Rig, ModelHost]) -> None:
    _, host = tied
    asked = Replies(host)
    asked.submit("long", [1, 2, 3], max_tokens=900)
    asked.until(lambda: len(asked.replies["long"].tokens) > 3)
    host.abort("long")
    asked.submit("wide", [1, 2, 3], max_tokens=5000)
    asked.submit("strange", [10**6])
    replies = asked.finish()
    assert replies["long"].finish is FinishReason.ABORT
    assert len(replies["long"].tokens) < 900
    assert "exceed" in replies["wide"].error
    assert "token ids" in replies["strange"].error


def test_a_killed_server_comes_back_with_its_weights_and_its_requests(
    tied: tuple[Rig, ModelHost], vllm_models: Path
) -> None:
    rig, host = tied
    reference, version = rig.reference(), host.policy_version + 1
    manifest = rig.publish(perturb(reference, seed=13), version=version)
    rig.serve(host, manifest)
    rig.publishers["solver"].release(version)  # its file is gone when the new server needs it
    asked = Replies(host)
    for i in range(4):
        asked.submit(f"r{i}", [20 + i, 2], max_tokens=TOKENS)
    asked.until(lambda: all(len(asked.replies[name].tokens) >= 10 for name in asked.prompts))
    (server,) = [pid for pid in _servers() if str(rig.source).encode() in _command(pid).split(b"\0")]
    workers = [pid for pid in children_of(server) if b"VLLM::Worker" in _command(pid)]
    for pid in workers or [server]:  # and none of another model's
        os.kill(pid, signal.SIGKILL)
    for name, reply in asked.finish().items():
        assert (len(reply.tokens), reply.finish, reply.error) == (TOKENS, FinishReason.LENGTH, ""), reply.error
        assert set(reply.versions) == {version}
        assert gap(logits_of(reference, asked.prompts[name], reply), reply) < CLOSE
    asked.until(lambda: any(isinstance(message, WeightsServed) for message in rig.sent))
    told = rig.sent[0]
    assert isinstance(told, Failed)
    assert told.command == "generate"
    assert rig.sent[-1] == WeightsServed("solver", version, manifest.checksum)


def test_a_pinned_version_has_a_server_of_its_own_beside_the_live_one(untied: tuple[Rig, ModelHost]) -> None:
    """It stays as it is while the live one goes on, and its server ends with it."""
    rig, host = untied
    live, kept = rig.reference(), rig.reference()
    before = _servers()
    version = host.policy_version + 1
    manifest = rig.publish(perturb(kept, seed=21), version=version)
    rig.serve(host, manifest)
    pinned = rig.load(pinned=True)
    assert len(_servers()) == len(before) + 1
    rig.serve(pinned, manifest)
    rig.serve(host, rig.publish(perturb(live, seed=22), version=version + 1))
    for served, model, number in ((pinned, kept, version), (host, live, version + 1)):
        asked = Replies(served)
        asked.submit(f"r{number}", LONG)
        (reply,) = asked.finish().values()
        assert set(reply.versions) == {number}
        assert gap(logits_of(model, LONG, reply), reply) < CLOSE
    pinned.close()
    assert _servers() == before
    asked = Replies(host)
    asked.submit("after", LONG)
    assert set(asked.finish()["after"].versions) == {version + 1}


def _servers() -> set[int]:
    """vLLM servers of this process, by what their command lines name."""
    return {pid for pid in children_of(os.getpid()) if b"wingbeat_vllm_launch" in _command(pid)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
