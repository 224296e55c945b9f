"""Applications in production: their conversations become episodes, and only what may train ever trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from harness import Answer, Api, eventually
from openai import APIStatusError, AsyncOpenAI

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripts import Reply, ScriptedCall
from wingbeat.core.types import Split
from wingbeat.dataflow.audit import audit_run
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.ledger_schema import SampleState
from wingbeat.dataflow.ledger_views import AttemptView
from wingbeat.server.keys.file import KeyFile, NewKey
from wingbeat.server.keys.principals import Role
from wingbeat.tracking import EpisodeGraph, load_graph

ADMIN = "the-admin-key-of-the-test"
SETTINGS = {
    "server.admin_key": ADMIN,
    "policies.solver.trainer.algorithm": "reinforce",
    "policies.grouped.trainer.algorithm": "grpo",
    "dataflow.groups_per_step": 1,
    "dataflow.max_staleness": 2,
    "collect.idle_s": 0.5,
}


def say(text: str) -> Any:
    return {"role": "user", "content": text}


def reply_of(call: ScriptedCall) -> Reply:
    """Two users who ask the same get the same answer: only what is said apart tells them apart."""
    if "wait for it" in call.prompt.rpartition("user")[2]:
        return Reply("at last", hold_after=0)
    return Reply(f"reply {call.prompt.count('assistant')}")


@dataclass(frozen=True)
class Shop:
    """One server, and a key of each kind."""

    server: ScriptedServer
    keys: dict[str, str]

    def sdk(self, key: str, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key=self.keys[key], max_retries=0, **options)

    def attempt(self, episode_id: str) -> AttemptView:
        with open_read_only(self.server.run_dir / "ledger.sqlite") as ledger:
            (view,) = ledger.episode(episode_id)
            return view

    def graph(self, episode_id: str) -> EpisodeGraph:
        record = self.attempt(episode_id).record
        assert record is not None
        return load_graph(record.graph)

    def trained(self) -> set[str]:
        """Every episode that some batch holds."""
        with open_read_only(self.server.run_dir / "ledger.sqlite") as ledger:
            batches = [b for policy in ("solver", "grouped") for b in ledger.batches_after(policy, 0)]
            assert ledger.verify() == []
        return {member.episode_id for batch in batches for member in batch.episodes}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "runs").mkdir()
    file, made = KeyFile(folder / "runs" / "keys.json"), {}
    for new in (
        NewKey(Role.COLLECT, name="shop", train=True),
        NewKey(Role.COLLECT, name="quiet"),
        NewKey(Role.COLLECT, name="proxy", record=False),
        NewKey(Role.COLLECT, name="narrow", train=True, policies=("grouped",)),
        NewKey(Role.CLIENT, name="agents"),
    ):
        made[new.name] = file.create(new)[1]
    with scripted_server(folder, reply_of, settings=SETTINGS) as server:
        yield Shop(server, made)


@pytest.fixture
async def api(shop: Shop) -> AsyncIterator[Api]:
    server: Any = shop.server
    async with Api(server) as api:
        yield api


async def ask(client: AsyncOpenAI, *messages: Any, **fields: Any) -> tuple[str, Any]:
    """(episode id, completion)."""
    raw = await client.chat.completions.with_raw_response.create(
        model=fields.pop("model", "solver"), messages=list(messages), **fields
    )
    return raw.headers["x-wingbeat-episode"], raw.parse()


def replied(completion: Any) -> dict[str, Any]:
    return completion.choices[0].message.model_dump(exclude_none=True)


async def feedback(api: Api, key: str, episode: str, **body: Any) -> Answer:
    return await api.call("POST", f"/api/episodes/{episode}/finish", {"rewards": 1.0, **body}, key=key)


async def test_each_call_goes_on_with_its_own_conversation(shop: Shop, api: Api) -> None:
    async with shop.sdk("shop") as client:
        header = {"x-wingbeat-conversation": "user-1"}
        named, first = await ask(client, say("hello"), extra_headers=header)
        other, second = await ask(client, say("hello"), metadata={"conversation_id": "user-2"})
        assert named != other, "two users who say the same are two conversations"
        assert (await ask(client, say("hello"), replied(first), say("more"), extra_headers=header))[0] == named
        again, _ = await ask(client, say("hello"), replied(second), say("more"), metadata={"conversation_id": "user-2"})
        assert again == other

        alone, third = await ask(client, say("who am I?"))
        told, fourth = await ask(client, say("who am I?"), replied(third), say("and you?"))
        assert told == alone, "found by its messages"
        assert (await ask(client, say("who am I?"), replied(third), say("or rather: who are you?")))[0] == alone
        fresh, _ = await ask(client, say("who am I?"))
        assert fresh != alone, "a first turn always opens a conversation"
        unclear, _ = await ask(client, say("who am I?"), replied(third), say("hm"))
        assert unclear not in (alone, fresh), "two that say the same are never mixed up"

        responses = await client.responses.with_raw_response.create(model="solver", input="hi there")
        one = responses.parse()
        following = await client.responses.with_raw_response.create(
            model="solver", input="go on", previous_response_id=one.id
        )
        assert following.headers["x-wingbeat-episode"] == responses.headers["x-wingbeat-episode"]
        answer = await feedback(api, shop.keys["shop"], following.parse().id)
        assert answer.body["num_turns"] == 2, "feedback finds the conversation by a response's id, too"
        after = await client.responses.with_raw_response.create(
            model="solver", input="still there?", previous_response_id=following.parse().id
        )
        assert after.headers["x-wingbeat-episode"] != responses.headers["x-wingbeat-episode"]
        assert after.parse().output_text == "reply 3", "what has its feedback is known, and goes on as another"
    async with AsyncAnthropic(base_url=shop.server.url, api_key=shop.keys["shop"], max_retries=0) as messages:
        headers = {"x-wingbeat-conversation": "user-3"}
        create = messages.messages.with_raw_response.create
        found = [
            await create(model="solver", max_tokens=64, messages=[say("hey")], extra_headers=headers) for _ in range(2)
        ]
        (third_user,) = {raw.headers["x-wingbeat-episode"] for raw in found}
        assert third_user not in (named, other)
    async with shop.sdk("shop") as client:
        stream = await client.chat.completions.create(model="solver", messages=[say("stream it")], stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "reply 1"
    graph_of = await api.get(f"/api/episodes/{told}", key=shop.keys["shop"])
    assert (graph_of["num_turns"], graph_of["state"]) == (3, "open")
    assert (await feedback(api, shop.keys["shop"], fourth.id)).status == 200
    one, two, three = shop.graph(alone).turns
    assert two.parent_id == three.parent_id == one.turn_id


async def test_only_keys_that_opted_in_train(shop: Shop, api: Api) -> None:
    async with shop.sdk("quiet") as quiet, shop.sdk("shop") as client:
        silent, _ = await ask(quiet, say("nobody may learn this"))
        greedy, _ = await ask(client, say("be exact"), temperature=0.0)
        trains, _ = await ask(client, say("learn this"), temperature=0.7)
        for key, episode in (("quiet", silent), ("shop", greedy), ("shop", trains)):
            answer = await feedback(api, shop.keys[key], episode)
            assert answer.status == 200, answer
            assert bool(answer.body["warning"]) == (episode == greedy), answer
        assert (await feedback(api, shop.keys["shop"], trains)).status == 200, "the same again"
        (await feedback(api, shop.keys["shop"], trains, rewards=0.0)).refused(409, "idempotency_conflict")

        async def is_trained() -> bool:
            return trains in shop.trained()

        await eventually(is_trained, what="the step that trains it")
    assert not {silent, greedy} & shop.trained()
    view = shop.attempt(silent)
    assert view.group.split is Split.EVAL and view.samples == () and view.record is not None
    assert view.record.samples == () and view.record.rewards == {"solver": 1.0}
    (status,) = shop.attempt(trains).samples
    assert status.state in (SampleState.BATCHED, SampleState.TRAINED)
    assert shop.graph(trains).turns[0].temperature == pytest.approx(0.7), "production gets what it asks for"
    async with shop.sdk("narrow") as narrow:
        compared, _ = await ask(narrow, say("one of none"), model="grouped")
        answer = await feedback(api, shop.keys["narrow"], compared)
        assert "compares the episodes of a group" in answer.body["warning"]
        with pytest.raises(APIStatusError, match="grouped"):
            await ask(narrow, say("not for you"), model="solver")


async def test_a_conversation_that_waits_never_holds_training_back(shop: Shop, api: Api) -> None:
    async with shop.sdk("shop") as client:
        old, _ = await ask(client, say("think about it for long"))
        for number in range(4):
            episode, _ = await ask(client, say(f"quick {number}"))
            assert (await feedback(api, shop.keys["shop"], episode)).body["warning"] == ""

            async def is_trained(episode: str = episode) -> bool:
                return episode in shop.trained()

            await eventually(is_trained, what="its step, although an older conversation waits")
        assert "too old" in (await feedback(api, shop.keys["shop"], old)).body["warning"]

    async def is_dropped() -> bool:
        (status,) = shop.attempt(old).samples
        return (status.state, status.reason) == (SampleState.DROPPED, "stale")

    await eventually(is_dropped, what="its record to say so")


async def test_feedback_does_not_break_an_answer_off(shop: Shop, api: Api) -> None:
    async with shop.sdk("shop") as client:
        episode, first = await ask(client, say("quick one"))
        late = asyncio.create_task(ask(client, say("quick one"), replied(first), say("wait for it")))

        async def is_sampled() -> bool:
            return any(call.cache_key == episode and call.turn == 1 for call in shop.server.engine.calls)

        await eventually(is_sampled, what="the second turn to begin")
        assert (await feedback(api, shop.keys["shop"], episode)).body["num_turns"] == 1
        shop.server.engine.release()
        assert (await late)[1].choices[0].message.content == "at last"
    assert shop.graph(episode).num_turns == 1


async def test_keys_keep_to_their_own(shop: Shop, api: Api) -> None:
    mine, quiet = shop.keys["shop"], shop.keys["quiet"]
    async with shop.sdk("shop") as client, shop.sdk("proxy") as proxy:
        episode, completion = await ask(client, say("mine"))
        for ref in (episode, completion.id):
            (await feedback(api, quiet, ref)).refused(404, "episode_not_found")
            (await api.call("DELETE", f"/api/episodes/{ref}", key=quiet)).refused(404, "episode_not_found")
            (await api.call("GET", f"/api/episodes/{ref}", key=shop.keys["agents"])).refused(403, "permission_denied")
        (await feedback(api, "wb-collect-" + "x" * 32, episode)).refused(401, "invalid_api_key")
        begun = await api.call("POST", "/api/episodes", api.begin_body(split="eval"), key=shop.keys["agents"])
        foreign = begun.body["episode_id"]
        (await feedback(api, mine, foreign)).refused(403, "permission_denied")
        for method, path in (("GET", "/api/status"), ("POST", "/api/stop"), ("POST", "/api/tasks/lease")):
            assert (await api.call(method, path, {} if method == "POST" else None, key=mine)).status == 403, path
        for wrong in ("0", "1001", "x", "-1", "9" * 5000):
            (await api.call("GET", f"/api/conversations?limit={wrong}", key=mine)).refused(400, "invalid_request")
        listed = await api.get("/api/conversations?limit=1000", key=mine)
        assert episode in {one["episode_id"] for one in listed} and {one["key"] for one in listed} == {"shop"}

        passed = await proxy.chat.completions.with_raw_response.create(model="solver", messages=[say("forget me")])
        assert "x-wingbeat-episode" not in passed.headers and passed.parse().choices[0].message.content == "reply 1"
        assert b"forget me" not in b"".join(p.read_bytes() for p in (shop.server.run_dir / "collected").iterdir())

        # deletion: open, and after its feedback
        assert (await api.call("DELETE", f"/api/episodes/{episode}", key=mine)).status == 200
        (await feedback(api, mine, episode)).refused(404, "episode_not_found")
        secret, _ = await ask(client, say("my secret"), extra_headers={"x-wingbeat-conversation": "secret-name"})
        assert (await feedback(api, mine, secret, message="a secret comment", outcome="environment")).status == 200
        assert (await api.call("DELETE", f"/api/episodes/{secret}", key=mine)).body["in_batches"] == 0
    view = shop.attempt(secret)
    assert view.record is not None and (view.record.graph, view.record.samples, view.message) == (b"", (), "")
    assert view.group.task.id == secret and not shop.trained() & {secret}


async def test_conversations_outlive_the_server(shop: Shop, api: Api) -> None:
    async with shop.sdk("shop") as client:
        kept, first = await ask(client, say("remember me"))
        idle, _ = await ask(client, say("remember me, too"))
        ended, _ = await ask(client, say("scored before"))
        before = await feedback(api, shop.keys["shop"], ended)
        await asyncio.to_thread(shop.server.kill)
        await asyncio.to_thread(shop.server.start)
        await asyncio.to_thread(shop.server.until_served)
        assert (await feedback(api, shop.keys["shop"], ended)).body == before.body
        (await feedback(api, shop.keys["shop"], ended, rewards=0.5)).refused(409, "idempotency_conflict")
        again, second = await ask(client, say("remember me"), replied(first), say("do you?"))
        assert again == kept and second.id != first.id
        for key, episode, num_turns in ((shop.keys["shop"], kept, 2), (ADMIN, idle, 1)):
            answer = await feedback(api, key, episode)
            assert (answer.body["num_turns"], answer.body["warning"]) == (num_turns, ""), "an admin may, too"
    one, two = shop.graph(kept).turns
    assert two.parent_id == one.turn_id

    async def are_trained() -> bool:
        return {kept, idle} <= shop.trained()

    await eventually(are_trained, what="their steps")
    metrics = await api.get("/metrics", key=ADMIN)
    assert 'wingbeat_collected_conversations_total{key="shop",result="trained"} 2.0' in metrics
    assert 'wingbeat_collect_open{key="shop"}' in metrics

    async def is_sound() -> bool:
        return await asyncio.to_thread(audit_run, shop.server.run_dir) == []

    await eventually(is_sound, what="the feedback whose group the kill left open to be settled, and nothing else amiss")
