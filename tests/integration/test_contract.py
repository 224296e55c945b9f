"""The episode contract over HTTP, on the shared server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import uuid
from contextlib import aclosing
from pathlib import Path

from harness import Api, Server, environment, eventually

LATE_FINISHES = "wingbeat_late_finishes_total"


def group(size: int) -> dict[str, object]:
    return {"id": f"g-{uuid.uuid4().hex[:8]}", "size": size}


async def test_health_policies_and_status_describe_the_server(api: Api) -> None:
    assert await api.get("/healthz") == {"status": "ok"}
    policies = {policy["name"]: policy for policy in await api.get("/api/policies")}
    assert set(policies) == {"solver", "babbler"}
    assert policies["solver"]["trainer"] == "ready"
    assert policies["babbler"]["trainer"] == "frozen"
    assert policies["solver"]["served_checksum"] == policies["solver"]["published_checksum"]
    status = await api.get("/api/status")
    assert status["state"] == "running"
    assert status["total_steps"] == 1000


async def test_an_episode_from_begin_to_finish(api: Api) -> None:
    episode = await api.begin(label="first")
    assert episode.reply["split"] == "train"
    assert episode.reply["attempt"] == 1
    assert episode.reply["base_url"] == f"{api.url}/v1"
    assert (await api.chat(episode)).status == 200
    beat = await api.call("POST", f"/api/episodes/{episode.id}/heartbeat", key=episode.key)
    assert beat.body == {"episode_id": episode.id, "state": "open", "heartbeat_s": 2.0}
    running = await api.get(f"/api/episodes/{episode.id}", key=episode.key)
    assert (running["state"], running["num_turns"], running["label"]) == ("open", 1, "first")
    reply = (await api.finish(episode, 0.5)).body
    assert (reply["state"], reply["num_turns"]) == ("finished", 1)
    ended = await api.get(f"/api/episodes/{episode.id}", key=episode.key)
    assert (ended["state"], ended["outcome"], ended["num_turns"]) == ("finished", "agent", 1)
    assert ended["num_sampled_tokens"] == reply["num_sampled_tokens"] > 0


async def test_the_first_policy_of_an_episode_is_one_that_trains(api: Api) -> None:
    episode = await api.begin(policies=["babbler", "solver"])
    assert episode.reply["policies"] == ["solver", "babbler"]
    assert [m["id"] for m in (await api.get("/v1/models", key=episode.key))["data"]] == ["solver", "babbler"]
    state = await api.get(f"/api/episodes/{episode.id}", key=episode.key)
    assert state["policies"] == ["solver", "babbler"]
    assert (await api.chat(episode, model="babbler")).status == 200
    assert "called no trainable policy, only 'babbler'" in (await api.finish(episode, 0.5)).body["warning"]


async def test_begin_is_idempotent_by_its_key(api: Api) -> None:
    body = api.begin_body(label="once")
    first = await api.call("POST", "/api/episodes", body)
    again = await api.call("POST", "/api/episodes", body)
    assert first.status == again.status == 200
    assert first.body == again.body
    other = await api.call("POST", "/api/episodes", {**body, "label": "twice"})
    other.refused(409, "idempotency_conflict", body["idempotency_key"])
    await api.abort(api.begun(first))


async def test_finish_counts_once(api: Api) -> None:
    episode = await api.begin()
    first = await api.finish(episode, 1.0, metrics={"steps": 3})
    again = await api.finish(episode, 1.0, metrics={"steps": 3})
    assert (first.status, again.status) == (200, 200)
    assert first.body == again.body
    (await api.finish(episode, 0.0)).refused(409, "idempotency_conflict", episode.id, "another body")
    (await api.chat(episode)).refused(409, "episode_closed", episode.id, "begin a new episode")


async def test_a_group_takes_its_size_and_no_more(api: Api) -> None:
    declared = group(2)
    one, two = await api.begin(group=declared), await api.begin(group=declared)
    assert one.reply["group"] == two.reply["group"]
    full = await api.call("POST", "/api/episodes", api.begin_body(group=declared))
    full.refused(429, "admission_full")
    assert int(full.headers["Retry-After"]) >= 1
    other_size = await api.call("POST", "/api/episodes", api.begin_body(group={**declared, "size": 3}))
    other_size.refused(409, "conflict", "size 2")
    for episode, reward in ((one, 0.0), (two, 1.0)):
        assert (await api.finish(episode, reward)).status == 200
    late = await api.call("POST", "/api/episodes", api.begin_body(group=declared))
    late.refused(409, "conflict", "has closed")


async def test_an_aborted_slot_reopens_as_a_new_attempt(api: Api) -> None:
    declared = group(1)
    first = await api.begin(group=declared)
    assert (await api.abort(first)).body["state"] == "aborted"
    assert (await api.abort(first)).status == 200
    second = await api.begin(group=declared)
    assert (second.id, second.attempt) == (first.id, 2)
    assert second.key != first.key
    (await api.chat(first)).refused(409, "episode_closed")
    (await api.finish(first)).refused(409, "episode_closed")
    assert (await api.finish(second)).status == 200


async def test_an_abort_ends_the_calls_in_flight(api: Api) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    first = await api.chat(episode, max_tokens=4)
    reply = first.body["choices"][0]["message"]
    history = [{"role": "user", "content": "what is 1 plus 2 ?"}, reply, {"role": "user", "content": "more"}]
    watched = asyncio.create_task(api.chat(episode, messages=history, max_tokens=4000, stop=["never"]))
    call = asyncio.create_task(api.chat(episode, messages=history, max_tokens=4000))
    await api.until_metric("wingbeat_requests_in_flight", 2)
    assert (await api.abort(episode)).status == 200
    for answer in await asyncio.gather(watched, call):
        answer.refused(409, "episode_closed", "ended while this call ran")
    await api.until_metric("wingbeat_requests_in_flight", 0)


async def test_a_finish_ends_the_calls_in_flight(api: Api) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    call = asyncio.create_task(api.chat(episode, max_tokens=4000))
    stream = asyncio.create_task(api.chat(episode, max_tokens=4000, stream=True, n=2))
    await api.until_metric("wingbeat_requests_in_flight", 3)
    assert (await api.finish(episode)).status == 200
    (await call).refused(409, "episode_closed", "ended while this call ran")
    last = (await stream).body.strip().rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "episode_closed"


async def test_a_refused_finish_changes_nothing(api: Api) -> None:
    episode = await api.begin(split="eval", policies=["babbler"])
    call = asyncio.create_task(api.chat(episode, max_tokens=2000))
    await api.until_metric("wingbeat_requests_in_flight", 1)
    (await api.finish(episode, {"policies": {"nobody": 1.0}})).refused(400, "invalid_reward", "nobody")
    assert (await call).status == 200
    assert (await api.finish(episode)).body["num_turns"] == 1


async def test_a_silent_client_loses_its_attempt_and_a_successor_decides_which_finish_counts(api: Api) -> None:
    declared = group(1)
    first = await api.begin(group=declared, idle_timeout_s=0.5)

    async def lost() -> bool:
        return (await api.get(f"/api/episodes/{first.id}", key=first.key))["state"] == "lost"

    await eventually(lost, what="the silent attempt to be lost")
    (await api.chat(first)).refused(409, "episode_closed", "lost")
    second = await api.begin(group=declared)
    assert (second.id, second.attempt) == (first.id, 2)
    before = await api.metric(LATE_FINISHES)
    (await api.finish(first)).refused(409, "episode_closed", "superseded")
    assert await api.metric(LATE_FINISHES) == before + 1
    assert (await api.finish(second)).status == 200


async def test_a_late_finish_counts_until_a_successor_began(api: Api) -> None:
    first = await api.begin(group=group(1), idle_timeout_s=0.5)
    assert (await api.chat(first)).status == 200

    async def lost() -> bool:
        return (await api.get(f"/api/episodes/{first.id}", key=first.key))["state"] == "lost"

    await eventually(lost, what="the silent attempt to be lost")
    late = await api.finish(first, 1.0)
    assert (late.status, late.body["num_turns"]) == (200, 1)


async def test_an_open_request_is_a_sign_of_life(api: Api, server: Server) -> None:
    episode = await api.begin(split="eval", policies=["babbler"], idle_timeout_s=0.2)
    answer = await api.chat(episode, max_tokens=2500)
    assert answer.status == 200
    assert answer.body["usage"]["completion_tokens"] == 2500
    assert episode.id not in {event["episode_id"] for event in server.events_named("episode_lost")}
    await api.abort(episode)


async def test_clients_may_announce_the_same_source_at_once(api: Api) -> None:
    body = {"split": "eval", "tasks": [{"source": "same", "id": str(i)} for i in range(200)]}
    answers = await asyncio.gather(*(api.call("PUT", "/api/tasks/same", body) for _ in range(16)))
    assert {answer.status for answer in answers} == {200}


async def test_a_heartbeat_is_a_sign_of_life(api: Api) -> None:
    """Two episodes with a short time-out: the one that is reported alive outlives the other."""
    silent, reported = [await api.begin(idle_timeout_s=1.5) for _ in range(2)]

    async def silent_is_lost() -> bool:
        beat = await api.call("POST", f"/api/episodes/{reported.id}/heartbeat", key=reported.key)
        assert beat.body["state"] == "open"
        return (await api.get(f"/api/episodes/{silent.id}", key=silent.key))["state"] == "lost"

    await eventually(silent_is_lost, what="the silent episode to be lost")
    assert (await api.finish(reported)).status == 200


async def test_leases_deal_out_whole_groups(api: Api) -> None:
    tasks = [{"source": "deal", "id": str(i), "payload": {"n": i}} for i in range(3)]
    put = await api.call("PUT", "/api/tasks/deal", {"split": "train", "tasks": tasks})
    assert put.body == {"source": "deal", "split": "train", "num_tasks": 3, "ratio": None}
    reply = (await api.call("POST", "/api/tasks/lease", {"max_leases": 2, "splits": ["train"]})).body
    one, two = reply["leases"]
    assert one["group"] == two["group"]
    assert one["task"]["source"] == "deal"
    assert set(one["policies"]) == {"solver", "babbler"}
    for lease, reward in ((one, 0.0), (two, 1.0)):
        episode = await api.begin_leased(lease["lease_id"])
        assert episode.reply["task"] == lease["task"]
        assert (await api.finish(episode, {"policies": {"solver": reward, "babbler": 0.0}})).status == 200
    used = await api.call("POST", "/api/episodes", {"idempotency_key": "used", "lease_id": one["lease_id"]})
    used.refused(404, "not_found", "lease again")
    both = await api.call("POST", "/api/episodes", api.begin_body(lease_id="x"))
    both.refused(400, "invalid_request", "exactly one of")


async def test_evaluation_runs_at_its_pinned_version_and_trains_nothing(api: Api) -> None:
    tasks = [{"source": "exam", "id": str(i), "payload": {}} for i in range(2)]
    assert (await api.call("PUT", "/api/tasks/exam", {"split": "eval", "tasks": tasks})).status == 200
    buffered = (await api.get("/api/status"))["groups_buffered"]
    wanted = {"source": "exam", "policy": "solver", "name": "mid"}
    started = (await api.call("POST", "/api/evaluations", wanted)).body
    assert (started["state"], started["version"], started["num_expected"]) == ("running", 0, 2)
    assert (await api.get("/api/status"))["state"] == "evaluating"
    pinned = await api.begin(split="eval", policies=["solver@0"])
    assert (await api.chat(pinned, model="solver", temperature=0)).status == 200
    assert (await api.finish(pinned)).status == 200
    leases = (await api.call("POST", "/api/tasks/lease", {"max_leases": 2, "splits": ["eval"]})).body["leases"]
    for lease, reward in zip(leases, (0.0, 1.0), strict=True):
        assert lease["split"] == "eval"
        episode = await api.begin_leased(lease["lease_id"])
        assert (await api.chat(episode, model="solver")).status == 200
        assert (await api.finish(episode, {"policies": {"solver": reward}})).status == 200

    async def done() -> dict[str, object] | None:
        reply = await api.get(f"/api/evaluations/{started['evaluation_id']}")
        return reply if reply["state"] == "done" else None

    result = await eventually(done, what="the evaluation's end")
    assert (result["mean_reward"], result["num_finished"]) == (0.5, 2)
    assert result["rewards"] == {"0": [0.0], "1": [1.0]}
    assert (await api.get("/api/status"))["groups_buffered"] == buffered
    gone = await api.call("POST", "/api/episodes", api.begin_body(split="eval", policies=["solver@7"]))
    gone.refused(503, "version_gone", "POST /api/evaluations")
    training = await api.call("POST", "/api/episodes", api.begin_body(policies=["solver@0"]))
    training.refused(400, "invalid_request", "only eval episodes")


async def test_events_are_sent_as_they_happen(api: Api) -> None:
    async with aclosing(api.lines("/api/events")) as lines:
        assert await anext(lines) == ": following"
        episode = await api.begin()
        await api.abort(episode)
        async for line in lines:
            if line.startswith("data:"):
                event = json.loads(line[5:])
                if event["event"] == "episode_aborted" and event["episode_id"] == episode.id:
                    return


async def test_metrics_are_in_the_prometheus_text_format(api: Api) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name for family in text_string_to_metric_families(await api.get("/metrics"))}
    assert {"wingbeat_turns", "wingbeat_episodes", "wingbeat_requests_in_flight", "wingbeat_engines"} <= families


async def test_openapi_describes_every_route(api: Api) -> None:
    description = await api.get("/openapi.json")
    paths = description["paths"]
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(description)))
    assert referred <= set(description["components"]["schemas"])
    described = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert described >= {  # all of them are compared with the reference in tests/architecture
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "GET /v1/models",
        "GET /v1/models/{model}",
        "PUT /api/tasks/{source}",
        "DELETE /api/tasks/{source}",
        "GET /api/mixing",
        "PUT /api/mixing",
        "POST /api/tasks/lease",
        "POST /api/episodes",
        "GET /api/episodes/{episode_id}",
        "POST /api/episodes/{episode_id}/confirm",
        "POST /api/episodes/{episode_id}/heartbeat",
        "POST /api/episodes/{episode_id}/finish",
        "POST /api/episodes/{episode_id}/abort",
        "GET /api/status",
        "GET /api/policies",
        "POST /api/evaluations",
        "GET /api/evaluations/{evaluation_id}",
        "POST /api/stop",
        "GET /api/events",
        "GET /metrics",
        "GET /healthz",
    }
    begin = paths["/api/episodes"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "idempotency_key" in begin["properties"]


async def test_the_curl_walk(api: Api) -> None:
    """What docs show to people without the SDK."""
    script = Path(__file__).parent / "curl_walk.sh"
    process = await asyncio.create_subprocess_exec(
        "sh", str(script), env={**environment(), "URL": api.url}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    completion, finished = (json.loads(line) for line in out.decode().splitlines())
    assert completion["object"] == "chat.completion"
    assert (finished["state"], finished["num_turns"]) == ("finished", 1)


def test_control_never_loads_torch(server: Server) -> None:
    maps = Path(f"/proc/{server.pid('control')}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{server.pid('engine-0')}/maps").read_text()
    assert os.path.realpath(f"/proc/{server.pid('control')}/exe") == os.path.realpath(
        f"/proc/{server.pid('engine-0')}/exe"
    )
