"""Which conversation a call goes on with, how long it is kept, and what becomes of it."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from wingbeat.core.errors import EpisodeClosed, InvalidReward, RequestError, UnavailableError, WingbeatError
from wingbeat.core.protocol import AbortRequest, FinishReply, FinishRequest
from wingbeat.core.types import Outcome, Split
from wingbeat.core.worker_protocol import Generate
from wingbeat.server.calls.model_call import Prepared
from wingbeat.server.calls.routes import ModelCalls
from wingbeat.server.collect.conversation_files import ConversationFiles, Marks, Opened, Taken
from wingbeat.server.collect.conversations import Conversation, ConversationBook
from wingbeat.server.collect.setup import make_collecting
from wingbeat.server.keys.principals import Principal, Role
from wingbeat.server.keys.ring import KeyRing, digest
from wingbeat.tracking.messages import Message, ToolCall
from wingbeat.tracking.prefix_digests import PrefixWalk
from wingbeat.tracking.serialize import load_graph

pytestmark = pytest.mark.slow  # as a whole; the unit part stays under a minute

SHOP, QUIET, SILENT = "wb-collect-shop", "wb-collect-quiet", "wb-collect-silent"
ADMIN = "wb-admin-key"
KEYS = {
    digest(SHOP): Principal(Role.COLLECT, key_id="key-1", name="shop", train=True),
    digest(QUIET): Principal(Role.COLLECT, key_id="key-2", name="quiet"),
    digest(SILENT): Principal(Role.COLLECT, key_id="key-3", name="silent", record=False),
    digest(ADMIN): Principal(Role.ADMIN, name="admin"),
}
CHAT = "/v1/chat/completions"


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def episode(self) -> str:
        return self.headers["x-wingbeat-episode"]

    @property
    def reply(self) -> dict[str, Any]:
        return self.body["choices"][0]["message"]


@dataclass
class Shop:
    """A desk with keys that collect, an engine, and no socket."""

    desk: Any
    engine: Any
    app: ModelCalls
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def store(self) -> Any:
        return self.desk.collecting.store

    async def call(
        self, *messages: Any, key: str = SHOP, says: str | None = "yes<|im_end|>", path: str = CHAT, **fields: Any
    ) -> Answer:
        """A call that the engine answers at once; ``says`` None: nothing is generated."""
        headers = fields.pop("headers", {})
        body = orjson.dumps({"model": "solver", "messages": list(messages), **fields})
        before, sent = len(self.engine.of(Generate)), list[dict[str, Any]]()
        gone = asyncio.Event()

        async def receive() -> Any:
            if not gone.is_set():
                gone.set()
                return {"type": "http.request", "body": body}
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path}
        scope["headers"] = [(b"authorization", b"Bearer " + key.encode())] + [
            (name.encode(), value.encode()) for name, value in headers.items()
        ]
        task = asyncio.create_task(self.app(scope, receive, send))  # type: ignore[arg-type]
        if says is not None:
            async with asyncio.timeout(10):
                while len(self.engine.of(Generate)) == before and not task.done():  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0)
            if not task.done():
                request = self.engine.of(Generate)[-1]
                version = self.desk.solver.version
                tokens = self.desk.solver.template.encode(says)
                self.engine.say(request.request_id, *tokens, finish="stop", version=version)
        await task
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], found, orjson.loads(b"".join(m.get("body", b"") for m in sent)))

    def target(self, name: str, *, key: str = SHOP) -> Any:
        found = self.desk.collecting.claim(name, {"authorization": f"Bearer {key}"})
        assert found is not None
        return found

    async def feedback(self, name: str, *, key: str = SHOP, **body: Any) -> FinishReply:
        request = FinishRequest.model_validate({"rewards": 1.0, **body})
        return await self.desk.collecting.ends.finish(self.target(name, key=key), request)

    async def settle(self) -> None:
        """What the sweep began is done."""
        self.desk.collecting.sweep()
        await asyncio.gather(*self.desk.collecting._closing.values())

    def result(self, name: str, key: str = "shop") -> float:
        labels = {"key": key, "result": name}
        return self.desk.metrics.registry.get_sample_value("wingbeat_collected_conversations_total", labels) or 0.0


@pytest.fixture
def open_shop(open_desk: Any, join_engine: Any) -> Callable[..., Shop]:
    def build(*, desk: Any = None, **options: Any) -> Shop:
        desk = desk or open_desk(
            policies={"solver": {"trainer": {"algorithm": "reinforce"}, "context_tokens": 500}}, **options
        )
        object.__setattr__(desk, "collecting", make_collecting(desk, KeyRing(KEYS, is_open=False), wall=desk.clock))
        engine = join_engine(desk.engines)
        engine.serve()
        return Shop(desk, engine, ModelCalls(desk, None))  # type: ignore[arg-type]

    return build


async def test_only_what_can_be_told_apart_is_continued(open_shop: Any) -> None:
    shop = open_shop()
    one, two = await shop.call(say("hi")), await shop.call(say("hi"))
    unclear = await shop.call(say("hi"), one.reply, say("more"))
    assert len({one.episode, two.episode, unclear.episode}) == 3
    assert shop.desk.metrics.registry.get_sample_value("wingbeat_collect_ambiguous_total", {"key": "shop"}) == 1
    other_key = await shop.call(say("hi"), unclear.reply, say("more"), key=QUIET)
    assert other_key.episode not in {one.episode, two.episode, unclear.episode}

    alone = await shop.call(say("only once"))
    reasoned = {**alone.reply, "reasoning_content": "because", "name": "bot"}
    assert (await shop.call(say("only once"), reasoned, say("more"))).episode == alone.episode


def test_tool_call_ids_tell_conversations_apart_that_say_the_same() -> None:
    book, walks = ConversationBook(), dict[str, PrefixWalk]()
    for name in ("a", "b"):
        call = ToolCall.of(f"call_{name}", name="add", arguments='{"a": 1}')
        walk = walks[name] = PrefixWalk("key").after([Message("user", "hi"), Message("assistant", tool_calls=(call,))])
        book.add(Conversation(name, "key", "shop", "", True, (), 0.0, 0.0, 0.0, prefixes=[walk.key]))
    assert len({walk.key.meaning for walk in walks.values()}) == 1
    for name, walk in walks.items():
        found, is_unclear = book.continued([walk.key])
        assert found is not None and (found.episode_id, is_unclear) == (name, False)
    other = PrefixWalk("key").after(
        [Message("user", "hi"), Message("assistant", tool_calls=(ToolCall.of("x", name="add", arguments='{"a":1.0}'),))]
    )
    assert book.continued([other.key]) == (None, True), "a client that renames them cannot be told apart"
    book.remove(book.of_key("key")[0])
    assert book.continued([other.key])[0] is book.get("b")
    assert book.continued([PrefixWalk("another key").after([]).key]) == (None, False)


async def test_a_name_goes_before_the_messages_and_starts_anew_after_feedback(open_shop: Any) -> None:
    shop = open_shop()
    named = {"x-wingbeat-conversation": "a"}
    first = await shop.call(say("hi"), headers=named)
    assert (await shop.call(say("other words"), metadata={"conversation_id": "a"})).episode == first.episode
    assert (await shop.call(say("hi"), headers=named, key=QUIET)).episode != first.episode, "names are of one key"
    assert (await shop.feedback(first.body["id"])).num_turns == 2
    second = await shop.call(say("hi"), first.reply, say("more"), headers=named)
    assert second.episode != first.episode
    for wrong in ({"x-wingbeat-conversation": ""}, {"x-wingbeat-conversation": "x" * 201}):
        assert (await shop.call(say("hi"), headers=wrong, says=None)).status == 400
    assert (await shop.call(say("hi"), metadata={"conversation_id": 7}, says=None)).status == 400


async def test_a_refused_call_opens_nothing(open_shop: Any) -> None:
    shop = open_shop()
    for fields in ({"model": "nobody"}, {"messages": []}, {"logit_bias": {"1": 2}}):
        assert (await shop.call(say("hi"), says=None, **fields)).status in (400, 404)
    assert len(shop.store.book) == 0 and shop.store.loaded == ()
    assert (await shop.call(say("hi"), key="wb-collect-unknown", says=None)).status == 401


async def test_feedback_that_is_refused_changes_nothing(open_shop: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"))
    for wrong in ({"policies": {"nobody": 1.0}}, {"turns": {"chatcmpl-other": 1.0}}, {"policies": {}}):
        with pytest.raises(InvalidReward):
            await shop.feedback(first.episode, rewards=wrong)
    with pytest.raises(RequestError, match="transaction"):
        await shop.feedback(first.episode, transaction={"id": "t" * 22})
    assert (await shop.call(say("hi"), first.reply, say("more"))).episode == first.episode
    one, two = await asyncio.gather(shop.feedback(first.episode), shop.feedback(first.body["id"]))
    assert one == two and one.num_turns == 2
    for late in (AbortRequest(), AbortRequest(outcome=Outcome.TIMEOUT)):
        with pytest.raises(EpisodeClosed):
            await shop.desk.collecting.ends.abort(shop.target(first.episode), late)
    aborted = await shop.call(say("stop"))
    for _ in range(2):
        await shop.desk.collecting.ends.abort(shop.target(aborted.episode), AbortRequest(message="by hand"))
    (view,) = shop.desk.ledger.episode(aborted.episode)
    assert (view.cause, view.message) == ("client_aborted", "by hand")
    assert "by hand" not in str(shop.desk.log), "what people say is not for logs"


async def test_a_retry_of_a_first_turn_is_no_second_conversation(open_shop: Any) -> None:
    shop = open_shop()
    key = {"idempotency-key": "once"}
    first = await shop.call(say("hi"), headers=key)
    again = await shop.call(say("hi"), headers=key, says=None)
    assert (again.body, again.episode) == (first.body, first.episode)
    retry = {"x-stainless-retry-count": "1"}
    other = await shop.call(say("hi"), headers=retry)
    assert other.episode != first.episode, "the answer to the first was received: this one is another user's"


async def test_idle_conversations_leave_the_memory_and_come_back(open_shop: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"), headers={"x-wingbeat-conversation": "a"})
    conversation: Any = shop.store.loaded[0]
    conversation.episode.undelivered.add(first.body["id"])
    shop.desk.clock.now += shop.desk.config.collect.idle_s + 1
    shop.desk.collecting.sweep()
    assert shop.store.loaded == ()
    assert conversation.episode is None
    (run,) = shop.desk.collecting.seen_by(KEYS[digest(SHOP)]).order
    assert run.episode.graph.num_turns == 0, "what is kept for retries does not keep its tokens"
    second = await shop.call(say("hi"), first.reply, say("more"))
    assert second.episode == first.episode
    back: Any = shop.store.loaded[0].episode
    one, two = back.graph.turns
    assert (one.turn_id, two.parent_id) == (first.body["id"], one.turn_id)
    assert back.undelivered == {first.body["id"]}
    assert int(two.turn_id.rpartition("-")[2]) == 1000, "no response id is given twice"


@pytest.mark.parametrize("keeps", [True, False])
async def test_without_feedback_a_conversation_is_closed_unscored(open_shop: Any, keeps: bool) -> None:
    shop = open_shop(collect={"keep_unscored": keeps})
    busy, lonely = await shop.call(say("hi")), await shop.call(say("ho"))
    shop.desk.clock.now += shop.desk.config.collect.feedback_s / 2
    await shop.call(say("hi"), busy.reply, say("more"))
    shop.desk.clock.now += shop.desk.config.collect.feedback_s / 2 + 1
    await shop.settle()
    assert [one.episode_id for one in shop.store.book] == [busy.episode]
    assert shop.result("unscored") == 1
    with pytest.raises(WingbeatError) as refusal:
        await shop.feedback(lonely.episode)
    if keeps:
        assert isinstance(refusal.value, EpisodeClosed)
        (view,) = shop.desk.ledger.episode(lonely.episode)
        assert (view.outcome, view.cause, view.samples) == (Outcome.TIMEOUT, "feedback_missing", ())
        assert view.record.num_turns == 1 and view.group.split is Split.EVAL
    assert shop.desk.ledger.open_groups() == () and shop.desk.ledger.verify() == []


async def test_too_many_conversations_make_room(open_shop: Any) -> None:
    shop = open_shop(collect={"max_open": 2})
    found = [await shop.call(say(f"{number}")) for number in range(2)]
    await shop.call(say("0"), found[0].reply, say("more"))
    await shop.call(say("another key's"), key=QUIET)
    await shop.call(say("2"))
    await shop.settle()
    left = {one.episode_id for one in shop.store.book if one.key_id == "key-1"}
    assert len(left) == 2 and found[1].episode not in left and found[0].episode in left
    shop.store.book.num_bytes += shop.desk.config.collect.max_disk_mb * 2**20 + 1
    await shop.settle()
    assert len(shop.store.book) == 0


async def test_what_comes_back_calls_the_policies_that_there_are_now(open_shop: Any) -> None:
    shop = open_shop()
    headers = {"x-wingbeat-conversation": "ticket"}
    first = await shop.call(say("hi"), headers=headers)
    conversation = shop.store.book.get(first.episode)
    shop.store.unload(conversation)
    conversation.policies = ("solver", "gone")  # as its server was configured then
    gone = await shop.call(say("hi"), headers=headers, model="gone", says=None)
    assert gone.status == 404 and "gone" in gone.body["error"]["message"]
    assert (await shop.call(say("hi"), headers=headers)).episode == first.episode


async def test_what_a_killed_server_leaves_is_taken_up(open_shop: Any, restart_desk: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"), headers={"x-wingbeat-conversation": "a"})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    await shop.call(say("hi"), first.reply, say("more"), tools=[tool])
    scored = await shop.call(say("scored"))
    reply = await shop.feedback(scored.episode)
    files = ConversationFiles(shop.desk.run_dir / "collected")
    files.append(scored.episode, Opened("key-1", "shop", "", True, ("solver",), 0.0))  # killed before it was removed
    shop.desk.clock.now += 100
    desk = restart_desk(shop.desk)
    shop = open_shop(desk=desk)
    await shop.desk.collecting.restore()
    (conversation,) = shop.store.book
    assert (conversation.episode_id, conversation.name, conversation.num_turns) == (first.episode, "a", 2)
    assert conversation.last_used == pytest.approx(desk.clock.now - 100, abs=0.1), "it has waited since its last turn"
    assert files.read(scored.episode) is None
    assert await shop.feedback(scored.episode) == reply
    episode = await shop.store.load(conversation)
    assert list(episode.tools_by_digest.values()) == [[tool]]
    assert (await shop.feedback(first.episode, key=ADMIN)).num_turns == 2
    assert len(desk.solver.buffer) == 2, "both train"
    desk.check_writes()
    assert desk.ledger.verify() == []


async def test_turns_after_a_torn_one_are_kept_and_damage_is_told(open_shop: Any, restart_desk: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"), headers={"x-wingbeat-conversation": "a"})
    (path,) = (shop.desk.run_dir / "collected").iterdir()
    with path.open("ab") as file:
        file.write(b"\xff\x0f\0\0 an append that a kill cut off")
    for turns in (2, 3):
        shop = open_shop(desk=restart_desk(shop.desk))
        await shop.desk.collecting.restore()
        again = await shop.call(say(f"{turns}"), headers={"x-wingbeat-conversation": "a"})
        assert again.episode == first.episode
        assert len(shop.store.files.read(first.episode).turns) == turns
    assert "collected_lost" not in str(shop.desk.log), "nothing that was answered is lost"
    data = path.read_bytes()
    path.write_bytes(data[:-200] + bytes([data[-200] ^ 255]) + data[-199:])
    path.with_name("stray.turns").write_bytes(data[20:])
    shop = open_shop(desk=restart_desk(shop.desk))
    await shop.desk.collecting.restore()
    (conversation,) = shop.store.book
    assert conversation.num_turns == 2
    assert str(shop.desk.log).count("collected_lost") == 2


async def test_a_reply_that_a_kill_cut_off_counts_unless_it_is_asked_for_again(
    open_shop: Any, restart_desk: Any
) -> None:
    for asked_again in (False, True):
        shop = open_shop()
        first = await shop.call(say("hi"), headers={"x-wingbeat-conversation": "a"})
        last = await shop.call(say("hi"), first.reply, say("more"))
        shop = open_shop(desk=restart_desk(shop.desk))
        await shop.desk.collecting.restore()
        (conversation,) = shop.store.book
        episode = await shop.store.load(conversation)
        assert episode.in_doubt == {last.body["id"]}
        sizes = list[int]()
        for _ in range(2):  # it is let go from memory, and somebody looks at it
            shop.store.unload(conversation)
            sizes.append(conversation.num_bytes)
            assert (await shop.store.load(conversation)).in_doubt == episode.in_doubt
        assert sizes[0] == sizes[1], "who looks at it adds nothing to its file"
        if asked_again:
            await shop.call(say("hi"), first.reply, say("more"), says="no<|im_end|>")
        reply = await shop.feedback(first.episode)
        assert reply.num_turns == 2 + asked_again
        (view,) = shop.desk.ledger.episode(first.episode)
        assert view.record is not None
        superseded = load_graph(view.record.graph).superseded()
        assert superseded == ({last.body["id"]: "resampled"} if asked_again else {})


async def test_a_full_disk_costs_the_record_and_not_the_answer(open_shop: Any, monkeypatch: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"))

    def full(*_: Any) -> int:
        raise UnavailableError("cannot record a turn: no space left")

    with monkeypatch.context() as patched:
        patched.setattr(shop.store.files, "append", full)
        answers = [await shop.call(say("hi"), first.reply, say("more")), await shop.call(say("ho"))]
    assert [answer.status for answer in answers] == [200, 200]
    assert len(shop.store.book) == 0 and shop.result("unrecorded") == 2
    assert list((shop.desk.run_dir / "collected").iterdir()) == []


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_a_key_that_did_not_opt_in_never_trains(open_shop: Any, outcome: Outcome) -> None:
    """Whatever is said of it, and however it ends."""
    shop = open_shop()
    for number, message in enumerate(["finish", "abort", "timeout"]):
        quiet = await shop.call(say(message), key=QUIET, temperature=1.0)
        if message == "finish":
            await shop.feedback(quiet.episode, key=QUIET, outcome=outcome, rewards={"turns": {quiet.body["id"]: 1.0}})
        elif message == "abort" and outcome is not Outcome.AGENT:
            await shop.desk.collecting.ends.abort(shop.target(quiet.episode, key=QUIET), AbortRequest(outcome=outcome))
        else:
            shop.desk.clock.now += shop.desk.config.collect.feedback_s + number
            await shop.settle()
        (view,) = shop.desk.ledger.episode(quiet.episode)
        assert view.group.split is Split.EVAL and view.record.samples == () and view.samples == ()
        assert view.record.graph, "it can be inspected and exported"
    assert len(shop.desk.solver.buffer) == 0 and shop.desk.ledger.unconsumed("solver") == ()
    assert shop.result("trained", "quiet") == 0


async def test_production_is_sampled_as_it_asks_unless_configured_otherwise(open_shop: Any) -> None:
    for temperature, wanted in (("client", 0.25), ("policy", 1.0)):
        shop = open_shop(collect={"temperature": temperature})
        await shop.call(say("hi"), temperature=0.25, seed=7)
        assert shop.engine.of(Generate)[-1].temperature == wanted
        await shop.call(say("hi"), temperature=0.25, key=QUIET)
        assert shop.engine.of(Generate)[-1].temperature == 0.25, "a key that does not train is left alone"


async def test_versions_of_a_lost_lineage_count_as_what_survives(open_shop: Any) -> None:
    shop = open_shop(max_staleness=3)
    first = await shop.call(say("hi"))
    (conversation,) = shop.store.loaded
    shop.desk.solver.version = 5
    await shop.call(say("hi"), first.reply, say("more"))
    shop.desk.solver.roll_back(base_lineage=0, base_step=2, reason="a test").result(10)
    assert set(conversation.episode.lineages.values()) == {0}
    await shop.feedback(first.episode)
    (group,) = shop.desk.solver.buffer.clear()
    assert group.floor_version == 0
    assert max(int(sample.versions_T.max()) for m in group.members for sample in m.samples) == 2


async def test_deletion_leaves_no_text(open_shop: Any) -> None:
    shop = open_shop(groups_per_step=4)
    secret = "a very secret sentence"
    kept = await shop.call(say("kept"))
    open_one = await shop.call(say(secret))
    ended = await shop.call(say(secret), headers={"x-wingbeat-conversation": secret})
    await shop.feedback(ended.episode, message=secret)
    await shop.feedback(kept.episode)
    assert len(shop.desk.solver.buffer) == 2
    for episode in (open_one.episode, ended.episode):
        await shop.desk.collecting.delete(shop.target(episode))
    await shop.desk.collecting.delete(shop.target(ended.episode))
    assert len(shop.desk.solver.buffer) == 1
    assert [group.group_id for group in shop.desk.ledger.unconsumed("solver")] == [f"collected:{kept.episode}"]
    assert shop.desk.ledger.verify() == []
    folder: Path = shop.desk.run_dir
    assert secret.encode() not in everything_in(folder)
    assert secret not in str(shop.desk.log)
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        graphs = db.execute("SELECT graph FROM episodes WHERE episode_id = ?", (ended.episode,)).fetchall()
    assert graphs == [(None,)]


async def test_what_a_key_does_not_record_is_in_memory_only_while_it_is_answered(open_shop: Any) -> None:
    shop = open_shop()
    await shop.call(say("a secret"), key=SILENT)
    deleted = await shop.call(say("hi"), headers={"idempotency-key": "once"})
    for key in (SILENT, SHOP):
        if key == SHOP:
            await shop.desk.collecting.delete(shop.target(deleted.episode))
        (run,) = shop.desk.collecting.seen_by(KEYS[digest(key)]).order
        assert run.episode.graph.num_turns == 0
    anew = await shop.call(say("hi"), headers={"idempotency-key": "once"})
    assert anew.body["id"] != deleted.body["id"], "a deleted answer is given to nobody"
    assert shop.desk.registry.replays.num_bytes < 2 * len(orjson.dumps(anew.body)) + 1000


async def test_a_call_that_failed_is_not_kept_in_memory_by_its_error(open_shop: Any) -> None:
    shop = open_shop()

    async def broken(episode: Any, prepared: Prepared) -> Any:
        raise UnavailableError(f"no answer to {len(prepared.turn_ids)}")

    shop.desk.gateway.complete = broken
    assert (await shop.call(say("a secret"), key=SILENT, says=None)).status == 503
    (run,) = shop.desk.collecting.seen_by(KEYS[digest(SILENT)]).order
    assert run.failed
    await asyncio.sleep(0)
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is Prepared]  # isinstance asks proxies


async def test_what_is_being_closed_can_be_deleted_and_aborted(open_shop: Any) -> None:
    shop = open_shop()
    collecting = shop.desk.collecting
    for deletes in (True, False):
        first = await shop.call(say("hi"))
        shop.desk.clock.now += shop.desk.config.collect.feedback_s + 1
        collecting.sweep()
        async with asyncio.timeout(10):
            while first.episode not in collecting.ends.pending:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
        target = shop.target(first.episode)
        await (collecting.delete(target) if deletes else collecting.ends.abort(target, AbortRequest()))
        (view,) = shop.desk.ledger.episode(first.episode)
        assert bool(view.record.graph) is not deletes


async def test_what_is_deleted_while_it_is_read_does_not_come_back(open_shop: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"))
    (conversation,) = shop.store.loaded
    shop.store.unload(conversation)
    for ends_before_the_read in (True, False):
        reading = asyncio.create_task(shop.store.load(conversation))
        await asyncio.sleep(0)
        if ends_before_the_read:
            await shop.desk.collecting.delete(shop.target(first.episode))
        assert await reading is None
    assert conversation.episode is None and shop.store.loaded == () and shop.result("lost") == 0
    assert list((shop.desk.run_dir / "collected").iterdir()) == []


async def test_a_call_is_answered_that_feedback_overtook_while_it_was_prepared(open_shop: Any) -> None:
    shop = open_shop()
    first = await shop.call(say("hi"))
    (conversation,) = shop.store.loaded
    episode, prepare = conversation.episode, shop.app._collected._gateway.prepare
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return prepare(*arguments, **options)

    shop.app._collected._gateway.prepare = slowly
    async with episode.graph_lock:  # so that a thread prepares it
        call = asyncio.create_task(shop.call(say("hi"), first.reply, say("more")))
        await asyncio.sleep(0.01)
    await asyncio.to_thread(begun.wait, 10)
    await shop.feedback(first.episode)
    go_on.set()
    second = await call
    assert (second.status, second.episode) == (200, first.episode)
    (view,) = shop.desk.ledger.episode(first.episode)
    assert view.record.num_turns == 1 and episode.graph.num_turns == 0


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_damaged_file_gives_what_is_before_the_damage(tmp_path: Path) -> None:
    files = ConversationFiles(tmp_path / "collected")
    files.prepare()
    opened = Opened("key", "shop", "name", True, ("solver",), 1.0)
    pieces = [
        opened,
        Taken(b"one", 2.0, 0, b"m"),
        Marks(("a",), ()),
        Taken(b"two", 3.0, 1, undelivered=("a",)),
        Marks(("a", "b"), ()),
    ]
    for piece in pieces:
        files.append("ep-c-1", piece)
    (path,) = (tmp_path / "collected").iterdir()
    whole = path.read_bytes()
    seen = {(2, 2)}
    for length in range(0, len(whole) + 1, 5):
        path.write_bytes(whole[:length])
        found = files.read("ep-c-1")
        assert found is None or found.opened == opened
        seen.add((-1, 0) if found is None else (len(found.turns), len(found.marks.undelivered)))
    assert seen == {(-1, 0), (0, 0), (1, 0), (1, 1), (2, 1), (2, 2)}
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        found = files.read("ep-c-1")
        assert found is None or all(turn in pieces for turn in found.turns)
