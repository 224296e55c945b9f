"""Slips that every caller makes sooner or later: the refusal says what was probably meant."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from wingbeat.core.errors import InvalidReward, RequestError, UnsupportedField
from wingbeat.core.protocol import BeginRequest, FinishRequest, LeaseRequest, TaskSourceRequest, Wire
from wingbeat.server.calls.dialects.chat import CHAT
from wingbeat.server.calls.dialects.messages import MESSAGES
from wingbeat.server.calls.routes import base_url_hint, dialect_of
from wingbeat.server.http.bodies import parse


@pytest.mark.parametrize(
    ("model", "body", "hint"),
    [
        (FinishRequest, {"reward": 1.0}, "`reward`: unknown field; did you mean `rewards`?"),
        (LeaseRequest, {"max_lease": 2}, "`max_lease`: unknown field; did you mean `max_leases`?"),
        (BeginRequest, {"idempotency_key": "k", "tasks": {}}, "did you mean `task`?"),
        (BeginRequest, {"idempotency_key": "k", "task": {"id": "t", "payloads": {}}}, "did you mean `payload`?"),
        (BeginRequest, {"idempotency_key": "k", "group": {"id": "g", "size": 2, "zzz": 0}}, "known are id, size"),
        (
            TaskSourceRequest,
            {"tasks": [{"id": "t", "sorce": "s"}]},
            "`tasks.0.sorce`: unknown field; did you mean `sour",
        ),
    ],
)
def test_an_unknown_field_of_an_api_body(model: type[Wire], body: dict[str, Any], hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(model, orjson.dumps(body))
    assert hint in caught.value.message


@pytest.mark.parametrize(
    ("rewards", "hint"),
    [
        ({"solver": 1}, '`policies`: {"policies":{"solver":1}}'),
        ({"solver:critic": 0.5}, '`agents`: {"agents":{"solver:critic":0.5}}'),
        ({"policy": {"solver": 1}}, "did you mean `policies`?"),
    ],
)
def test_rewards_in_the_wrong_place(rewards: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidReward) as caught:
        parse(FinishRequest, orjson.dumps({"rewards": rewards}))
    assert hint in caught.value.message and caught.value.param == f"rewards.{next(iter(rewards))}"


@pytest.mark.parametrize(("name", "hint"), [("max_tokenz", "did you mean `max_tokens`?"), ("xyz", "leave it out")])
def test_an_unknown_field_of_a_model_call(name: str, hint: str) -> None:
    body = {"model": "solver", "messages": [{"role": "user", "content": "hi"}], name: 1}
    with pytest.raises(UnsupportedField) as caught:
        CHAT.parse(body)
    assert caught.value.message == f"unknown field `{name}`; {hint}"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/messages", "one /v1 too many, the path is /v1/messages"),
        ("/s/secret/v1/v1/chat/completions", "one /v1 too many, the path is /v1/chat/completions"),
        ("/chat/completions", "lacks its /v1: use `episode.base_url`, so that the path is /v1/chat/completions"),
        ("/messages", "lacks its /v1"),
        ("/models/solver", "lacks its /v1"),
    ],
)
def test_a_base_url_with_too_many_or_too_few_parts(path: str, hint: str) -> None:
    assert hint in base_url_hint(path) and "secret" not in base_url_hint(path)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/v1/v1/messages", "/api/messages"])
def test_other_unknown_paths_get_no_hint(path: str) -> None:
    assert base_url_hint(path) == ""


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/messages", "/v1/messages/batches"])
def test_an_anthropic_client_reads_the_hint_in_its_own_shape(path: str) -> None:
    assert dialect_of(path) is MESSAGES
