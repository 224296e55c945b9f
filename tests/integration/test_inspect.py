"""``wingbeat inspect``: the trace viewer and the merge report, on episodes of a real server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from harness import QUESTION, Api, cli

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripts import Reply, ScriptedCall

SYSTEM = [{"role": "system", "content": "be brief"}]
AGAIN = {"role": "user", "content": "and now ?"}


def masks(shown: str) -> set[str]:
    """The masks of the sampled tokens."""
    return {line.split()[5] for line in shown.splitlines() if re.match(r" +\d+ +\d+ sampled ", line)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(tmp_path_factory.mktemp("inspect"), lambda call: f"reply {call.turn}") as running:
        yield running


@pytest.fixture
async def api(server: ScriptedServer) -> AsyncIterator[Api]:
    async with Api(server) as client:
        yield client


async def test_the_viewer_shows_tokens_and_why_the_prompt_was_rendered_anew(server: ScriptedServer, api: Api):
    episode = await api.begin()
    first = (await api.chat(episode, messages=QUESTION)).body["choices"][0]["message"]
    await api.chat(episode, messages=[*QUESTION, first, AGAIN])
    await api.chat(episode, messages=[*QUESTION, {**first, "content": "rewritten"}, AGAIN])
    assert (await api.finish(episode)).status == 200

    shown = cli("inspect", str(server.run_dir), episode.id)
    assert shown.returncode == 0, shown.stderr
    assert "token graph of 3 turns" in shown.stdout
    flat = re.sub(r"[\s│└├─]+", " ", shown.stdout)
    assert "fork: message 1 differs: content ('reply 0' -> 'rewritten')" in flat
    assert masks(shown.stdout) == {"train"}


async def test_names_that_look_like_markup_are_shown_as_they_are(server: ScriptedServer, api: Api):
    episode = await api.begin(label="[/label]", group={"id": "[/a] b/c?", "size": 1})
    assert (await api.chat(episode, model="solver:[/agent]")).status == 200
    assert (await api.finish(episode, metrics={"[/metric]": 1.0})).status == 200
    for more in ([episode.id], [], ["--merge-report"]):
        shown = cli("inspect", str(server.run_dir), *more)
        assert shown.returncode == 0, shown.stderr
        if more == [episode.id]:
            assert all(name in shown.stdout for name in ("[/label]", "solver:[/agent]", "[/metric]"))


async def test_long_prompts_are_cut_in_the_middle_unless_asked_for(server: ScriptedServer, api: Api):
    episode = await api.begin()
    await api.chat(episode, messages=[{"role": "user", "content": "words " * 60}])
    assert (await api.finish(episode)).status == 200
    short, full = (cli("inspect", str(server.run_dir), episode.id, *more).stdout for more in ((), ("--full",)))
    assert "more (--full shows them)" in short
    assert len(full.splitlines()) > len(short.splitlines()) + 50


async def test_an_unfinished_episode_is_shown_from_its_captured_turns(server: ScriptedServer, api: Api):
    episode = await api.begin()
    await api.chat(episode, messages=QUESTION)
    shown = cli("inspect", str(server.run_dir), episode.id).stdout
    assert "1 turns were captured so far" in shown
    assert "mask ?: trains if the episode finishes" in shown
    assert masks(shown) == {"?"}
    listed = cli("inspect", str(server.run_dir)).stdout
    assert f"  {episode.id} attempt 1: running\n" in listed
    await api.finish(episode)


async def test_episodes_are_exported_while_the_server_runs(server: ScriptedServer, api: Api, tmp_path: Path):
    done, running = await api.begin(label="exported"), await api.begin(label="exported")
    for episode in (done, running):
        await api.chat(episode, messages=QUESTION)
    assert (await api.finish(done)).status == 200
    exported = cli("export", str(server.run_dir), "--episodes", str(tmp_path / "out.jsonl"), "--messages")
    assert exported.returncode == 0, exported.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {row["episode_id"]: row for row in rows if row["label"] == "exported"}
    assert (found[done.id]["state"], found[running.id]["state"]) == ("finished", "running")
    for row in found.values():
        (turn,) = row["turns"]
        assert [message["content"] for message in turn["messages"]] == [QUESTION[0]["content"], "reply 0"]
    assert "verified: no contradictions" in cli("inspect", str(server.run_dir), "--ledger").stdout
    await api.finish(running)


async def test_the_merge_report_counts_rows_timelines_trees_and_forks(server: ScriptedServer, api: Api):
    def script(call: ScriptedCall) -> str:
        return f"reply {call.turn}"

    server.engine.script = script
    for _ in range(2):
        episode = await api.begin()
        messages = list(QUESTION)
        for _ in range(3):
            reply = (await api.chat(episode, messages=messages)).body["choices"][0]["message"]
            messages += [reply, AGAIN]
        await api.chat(episode, messages=[*SYSTEM, *messages])
        assert (await api.finish(episode)).status == 200
    shown = cli("inspect", str(server.run_dir), "--merge-report")
    assert shown.returncode == 0, shown.stderr
    assert "message N differs: role" in shown.stdout
    rows, merged, tree = (int(n) for n in re.findall(r"│ (\d{3,})", shown.stdout)[:3])
    assert rows > merged > tree


def test_the_report_is_of_a_run_and_not_of_an_episode(server: ScriptedServer):
    refused = cli("inspect", str(server.run_dir), "some-episode", "--merge-report")
    assert refused.returncode == 2
    assert "leave the episode out" in refused.stderr


def test_what_is_no_run_directory_is_told_with_those_below(server: ScriptedServer, tmp_path: Path):
    refused = cli("inspect", str(server.run_dir.parent))
    assert refused.returncode == 2
    assert f"name one of {server.run_dir}" in refused.stderr
    assert "no folder" in cli("inspect", str(tmp_path / "nowhere")).stderr
    assert "no ledger.sqlite" in cli("inspect", str(tmp_path)).stderr


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A trainable policy and a frozen one."""
    settings = {"policies.judge.trainable": False, "policies.solver.trainable": True}
    folder = tmp_path_factory.mktemp("judged")
    with scripted_server(folder, lambda call: f"reply {call.turn}", settings=settings) as running:
        yield running


async def test_a_report_without_a_trained_token_says_why(judged: ScriptedServer):
    async with Api(judged) as api:
        assert "no training episode has finished" in cli("inspect", str(judged.run_dir), "--merge-report").stdout
        episode = await api.begin(policies=["solver", "judge"])
        await api.chat(episode, model="judge")
        assert (await api.finish(episode, rewards={"policies": {"solver": 1.0}})).status == 200
        shown = cli("inspect", str(judged.run_dir), "--merge-report").stdout
        assert "1 training episode finished; none has a token that trains: 1 turns are of judge" in shown
        await finish_undelivered(judged, api)
        shown = cli("inspect", str(judged.run_dir), "--merge-report").stdout
        assert "2 training episodes finished; none has a token that trains" in shown
        assert re.search(r"\d+ tokens of solver are superseded: undelivered; 1 turns are of judge, which", shown)


async def test_episodes_without_a_trained_token_count_in_the_report(server: ScriptedServer, api: Api):
    def lost() -> int:
        shown = cli("inspect", str(server.run_dir), "--merge-report").stdout
        return sum(int(n) for n in re.findall(r"superseded: undelivered +│ (\d+)", shown))

    before = lost()
    await finish_undelivered(server, api)
    assert lost() > before


async def finish_undelivered(server: ScriptedServer, api: Api) -> None:
    """An episode whose agent did not wait for its only answer."""
    turns = 'wingbeat_turns_total{policy="solver"}'
    served = (await api.metrics()).get(turns, 0.0)
    episode = await api.begin()
    server.engine.script = lambda call: Reply("late", delay_s=0.5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(api.chat(episode), 0.2)
    await api.until_metric(turns, served + 1)
    server.engine.script = lambda call: f"reply {call.turn}"
    assert (await api.finish(episode)).status == 200


async def test_unfinished_episodes_of_a_stopped_server_do_not_promise_to_train(judged: ScriptedServer):
    async with Api(judged) as api:
        episode = await api.begin(policies=["solver", "judge"], label="x" * 60)
        await api.chat(episode, model="judge")
        assert masks(cli("inspect", str(judged.run_dir), episode.id).stdout) == {"out"}
        await api.chat(episode, model="solver")
        assert masks(cli("inspect", str(judged.run_dir), episode.id).stdout) == {"out", "?"}
    judged.stop()
    shown = cli("inspect", str(judged.run_dir), episode.id).stdout
    assert "attempt 1: running when the server stopped" in shown
    assert "it can no longer finish: none of it trains" in shown
    assert masks(shown) == {"out"}
    listed = cli("inspect", str(judged.run_dir)).stdout
    assert f"  {episode.id} attempt 1: running when the server stopped\n" in listed


async def test_ids_are_whole_where_no_terminal_shows_them(server: ScriptedServer, api: Api):
    episode = await api.begin(label="x" * 90)
    await api.chat(episode, messages=QUESTION)
    assert (await api.finish(episode)).status == 200
    shown = cli("inspect", str(server.run_dir), episode.id).stdout
    assert f", label {'x' * 90}\n" in shown
    assert re.search(rf"└── chatcmpl-{episode.id}-\S+ solver: \+\d+ prompt, \d+ sampled, stop", shown)
