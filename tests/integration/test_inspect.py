"""``wingbeat inspect``: the trace viewer and the merge report, on episodes of a real server."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import pytest
from harness import QUESTION, Api, cli

from bench.scripted_server import ScriptedServer, scripted_server
from bench.scripts import ScriptedCall

SYSTEM = [{"role": "system", "content": "be brief"}]
AGAIN = {"role": "user", "content": "and now ?"}


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
    rows = [line.split() for line in shown.stdout.splitlines() if " sampled " in line]
    assert rows and {row[5] for row in rows} == {"train"}


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
    assert " sampled " in shown
    await api.finish(episode)


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
