"""Every kind of bad input gets a specific refusal, and leaves the server and other episodes untouched."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import QUESTION, Api, Begun, cli, config_text, eventually

HOLDER = """
import sys, urllib.request
url, key, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {"Authorization": "Bearer " + key})
urllib.request.urlopen(request)
"""
"""A client process in the middle of a model call."""

RUNNING = 'wingbeat_engine_requests{policy="babbler",state="running",worker="engine-0"}'


@pytest.fixture
async def bystander(api: Api) -> AsyncIterator[Begun]:
    """Another episode, open all the while: it must work afterwards."""
    episode = await api.begin(label="bystander")
    yield episode
    assert (await api.chat(episode)).status == 200
    reply = await api.finish(episode)
    assert (reply.status, reply.body["num_turns"]) == (200, 1)


@pytest.fixture
async def episode(api: Api, bystander: Begun) -> AsyncIterator[Begun]:
    """The episode that misbehaves; a refusal must not end it either."""
    begun = await api.begin(split="train")
    yield begun
    assert (await api.get(f"/api/episodes/{begun.id}", key=begun.key))["state"] == "open"
    assert (await api.abort(begun)).status == 200


async def test_unknown_policy(api: Api, episode: Begun) -> None:
    (await api.chat(episode, model="gpt-4o")).refused(404, "model_not_found", "'gpt-4o'", "it has solver")
    wrong = await api.call("POST", "/api/episodes", api.begin_body(policies=["nobody"]))
    wrong.refused(404, "model_not_found", "'nobody'", "this server has")


async def test_foreign_and_missing_keys(api: Api, episode: Begun, bystander: Begun) -> None:
    body = {"model": "solver", "messages": QUESTION}
    foreign = await api.call("POST", "/v1/chat/completions", body, key="wb-ep-of-another-server")
    foreign.refused(401, "invalid_api_key", "has expired or is another server's")
    (await api.call("POST", "/v1/chat/completions", body)).refused(401, "invalid_api_key", "no API key")
    theirs = await api.call("POST", f"/api/episodes/{bystander.id}/finish", {"rewards": 0.0}, key=episode.key)
    theirs.refused(403, "permission_denied", "another episode")


async def test_a_base_url_with_too_many_or_too_few_parts(api: Api, episode: Begun) -> None:
    body = {"model": "solver", "max_tokens": 1, "messages": QUESTION}
    for path, hint in (("/v1/v1/messages", "one /v1 too many"), ("/chat/completions", "lacks its /v1")):
        (await api.call("POST", path, body, key=episode.key)).refused(404, "not_found", path, hint)
    (await api.call("POST", "/v1/embeddings", body, key=episode.key)).refused(404, "not_found", "/v1/embeddings")


async def test_a_call_after_finish(api: Api, bystander: Begun) -> None:
    done = await api.begin()
    assert (await api.finish(done)).status == 200
    (await api.chat(done)).refused(409, "episode_closed", "finished", "begin a new episode")


@pytest.mark.parametrize("raw", [b'{"model":', b"", b"\xff\xfe", b"[" * 5000], ids=["cut", "empty", "bytes", "deep"])
async def test_malformed_json(api: Api, episode: Begun, raw: bytes) -> None:
    answer = await api.call("POST", "/v1/chat/completions", raw=raw, key=episode.key)
    answer.refused(400, "invalid_request", "not valid JSON")


async def test_malformed_json_of_the_episode_api(api: Api, episode: Begun) -> None:
    answer = await api.call("POST", f"/api/episodes/{episode.id}/finish", raw=b"{", key=episode.key)
    answer.refused(400, "invalid_request", "not valid JSON")
    (await api.call("POST", "/api/episodes", raw=b"[1]")).refused(400, "invalid_request")


async def test_a_prompt_beyond_the_context(api: Api, episode: Begun) -> None:
    long = [{"role": "user", "content": "7" * 500}]
    answer = await api.chat(episode, messages=long)
    answer.refused(400, "context_length_exceeded", "context of policy 'solver' is 128", "shorten the conversation")


@pytest.mark.parametrize("value", [-1, 0, 1.5, "8", True])
async def test_max_tokens_that_is_no_positive_integer(api: Api, episode: Begun, value: Any) -> None:
    answer = await api.chat(episode, max_tokens=value)
    answer.refused(400, "invalid_request", "`max_tokens` must be")
    assert answer.error["param"] == "max_tokens"


async def test_max_tokens_beyond_the_context_is_clamped(api: Api, bystander: Begun) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    answer = await api.chat(episode, max_tokens=2**31)
    assert answer.body["choices"][0]["finish_reason"] == "length"
    assert answer.body["usage"]["total_tokens"] == 4096
    await api.abort(episode)


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"type": "object", "properties": 3}, "text", True])
async def test_a_tool_schema_that_is_no_json_schema(api: Api, episode: Begun, schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "calc", "parameters": schema}}]
    answer = await api.chat(episode, tools=tools)
    answer.refused(400, "invalid_tool_schema", "`tools[0].function.parameters`")


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", '"great"', '"1.0"', "true", "null", "[1]"])
async def test_a_reward_that_is_no_finite_number(api: Api, episode: Begun, reward: str) -> None:
    raw = f'{{"rewards": {reward}}}'.encode()
    answer = await api.call("POST", f"/api/episodes/{episode.id}/finish", raw=raw, key=episode.key)
    if reward in ("NaN", "Infinity", "-Infinity"):
        answer.refused(400, "invalid_request", "send finite numbers")
    else:
        answer.refused(400, "invalid_reward", "`rewards`")
    body = {"policies": {"solver": "1.0"}}
    (await api.finish(episode, body)).refused(400, "invalid_reward", "`rewards.policies.solver`")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("top_logprobs", 3),
        ("functions", [{}]),
        ("no_such_field", 1),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(api: Api, episode: Begun, field: str, value: Any) -> None:
    answer = await api.chat(episode, **{field: value})
    answer.refused(400, "unsupported_field", f"`{field}`")
    assert answer.error["param"] == field


async def test_a_body_that_is_too_large(api: Api, episode: Begun) -> None:
    answer = await api.chat(episode, user="x" * 1_100_000)
    answer.refused(413, "payload_too_large", "server.max_body_bytes = 1000000")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100_000

    streamed = await api.call("POST", "/v1/chat/completions", raw=pieces(), key=episode.key)
    streamed.refused(413, "payload_too_large", "server.max_body_bytes = 1000000")


async def test_an_unknown_field_of_the_episode_api(api: Api, episode: Begun) -> None:
    wrong = await api.call("POST", "/api/episodes", api.begin_body(polices=["solver"]))
    wrong.refused(400, "invalid_request", "`polices`")


async def test_a_task_that_is_nested_too_deeply(api: Api, bystander: Begun) -> None:
    """Else it would be dealt out and break every lease."""
    payload: dict[str, Any] = {}
    for _ in range(300):
        payload = {"a": payload}
    task = {"source": "deep", "id": "1", "payload": payload}
    wrong = await api.call("POST", "/api/episodes", api.begin_body(task=task))
    wrong.refused(400, "invalid_request", "`task.payload`", "nested deeper than 64")
    put = await api.call("PUT", "/api/tasks/deep", {"tasks": [task]})
    put.refused(400, "invalid_request", "`tasks.0.payload`", "nested deeper than 64")


async def test_an_unknown_path_and_method(api: Api, bystander: Begun) -> None:
    (await api.call("GET", "/api/nothing")).refused(404, "not_found", "/api/nothing")
    (await api.call("DELETE", "/api/episodes")).refused(405, "method_not_allowed", "/api/episodes")
    (await api.call("GET", "/api/episodes/ep-0")).refused(404, "episode_not_found", "'ep-0'")


async def test_a_client_that_hangs_up_aborts_its_generation(api: Api, bystander: Begun) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    call = asyncio.create_task(api.chat(episode, max_tokens=4000))
    stream = asyncio.create_task(api.chat(episode, max_tokens=4000, stream=True))
    await api.until_metric("wingbeat_requests_in_flight", 2)
    await api.until_metric(RUNNING, 2)
    for task in (call, stream):
        task.cancel()
    await api.until_metric("wingbeat_requests_in_flight", 0)
    await api.until_metric(RUNNING, 0)
    assert (await api.chat(episode)).status == 200
    await api.abort(episode)


async def test_a_client_killed_mid_episode_loses_only_that_episode(api: Api, bystander: Begun) -> None:
    declared = {"id": "killed", "size": 1}
    episode = await api.begin(policies=["solver", "babbler"], group=declared, idle_timeout_s=0.5)
    body = json.dumps({"model": "babbler", "messages": QUESTION, "max_tokens": 4000})
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, f"{api.url}/v1/chat/completions", episode.key, body
    )
    await api.until_metric("wingbeat_requests_in_flight", 1)
    client.kill()
    await client.wait()

    async def reissued() -> Begun | None:
        answer = await api.call("POST", "/api/episodes", api.begin_body(group=declared, policies=["solver", "babbler"]))
        return api.begun(answer) if answer.status == 200 else None

    second = await eventually(reissued, what="the episode to be issued again")
    assert (second.id, second.attempt) == (episode.id, 2)
    assert (await api.finish(second)).status == 200


# --- the command line ------------------------------------------------------------------------------


def one_line_error(result: subprocess.CompletedProcess[str], *hints: str) -> None:
    """Exit code 2, one line of error (after notes of what was begun), and in it what to do."""
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("preparing the model ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for hint in hints:
        assert hint in lines[0]


def write_config(folder: Path, models: Path, **settings: Any) -> str:
    path = folder / "config.toml"
    path.write_text(config_text(folder, models, **settings), encoding="utf-8")
    return str(path)


def test_a_config_value_of_the_wrong_type(tmp_path: Path, models: Path) -> None:
    one_line_error(cli("serve", write_config(tmp_path, models, run__steps="many")), "`run.steps`", "'many'")


def test_an_unknown_config_key_names_the_nearest(tmp_path: Path, models: Path) -> None:
    config = write_config(tmp_path, models)
    one_line_error(cli("train", config, "--run.step=3"), "unknown key `run.step`", "did you mean 'steps'?")


def test_a_port_in_use(tmp_path: Path, models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = cli("serve", write_config(tmp_path, models, server__port=port))
    one_line_error(result, f"port {port}", "in use", "--server.port=0")


@pytest.mark.parametrize("content", [None, "not json"], ids=["missing", "broken"])
def test_an_unreadable_model_folder(tmp_path: Path, models: Path, content: str | None) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    result = cli("serve", write_config(tmp_path, models, policies__solver__model=str(folder)))
    one_line_error(result, str(folder))


def test_exposure_without_a_key(tmp_path: Path, models: Path) -> None:
    config = write_config(tmp_path, models, server__host="0.0.0.0")
    one_line_error(cli("serve", config), "server.admin_key")
