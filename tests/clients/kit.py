"""What the tests of unmodified clients share: one server, episodes on it, clients as processes of their own.

The server is a real one; only its model is scripted, so that every episode's token graph is known in advance.
Clients run in a virtual environment of their own (`make test-integration` makes it), in which nothing of ours is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scripted_server import ScriptedServer
from bench.scripts import Reply, ScriptedCall
from wingbeat.core.types import FinishReason, Provenance
from wingbeat.dataflow.ledger_reader import open_read_only
from wingbeat.dataflow.records import EpisodeRecord
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Turn, load_graph

HERE = Path(__file__).parent
CLIENT_S = 120.0
"""How long a client may take on a busy machine."""

WIRES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}
"""How the ids of each dialect's responses begin; a mode's first word names its dialect."""

REASONING = "I should add."
ARGUMENTS = '{"b":3,  "a": 2, "note":"é"}'
"""Spaced and ordered as no client would write it again: re-tokenised, it could not be the same tokens."""
CALL = f"<think>\n{REASONING}\n</think>\n\nLet me add: é\n\n<tool_call>\n" + (
    '{"name": "add", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
)
ANSWER = "The sum is 5."
TWO_TURNS = (CALL, ANSWER)
TEXTS = (" I call add(2, 3).", f" {ANSWER}")
"""Two turns without a chat template."""


class Script:
    """What the model says, by episode."""

    def __init__(self) -> None:
        self.replies: dict[str, Sequence[str]] = {}

    def __call__(self, call: ScriptedCall) -> Reply:
        replies = self.replies[call.cache_key]
        if call.turn >= len(replies):
            return Reply(f"script: expected {len(replies)} calls, this is one more", FinishReason.ERROR)
        return Reply(replies[call.turn], delay_s=0.001)


@dataclass(frozen=True, slots=True)
class Told:
    """What a client told at its end."""

    answer: str
    num_texts: int
    """How many pieces of text a streaming client saw."""
    log: str


@dataclass(slots=True)
class Finished:
    """A finished episode, as the ledger and the engine have it."""

    graph: EpisodeGraph
    record: EpisodeRecord
    calls: list[ScriptedCall]
    template: ChatTemplate

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.graph.turns

    def sampled_text(self, turn: Turn) -> str:
        return self.template.decode(turn.sampled.tolist())

    @property
    def num_timelines(self) -> int:
        parents = {turn.parent_id for turn in self.turns}
        return sum(turn.turn_id not in parents for turn in self.turns)

    def check_truth(self, mode: str, replies: Sequence[str]) -> None:
        """What holds for every episode, forks or not: prompts are what was generated on, each token trains once."""
        assert all(turn.turn_id.startswith(WIRES[mode.partition("-")[0]]) for turn in self.turns)
        assert len(self.turns) == len(self.calls) == len(replies)
        for turn, call, reply in zip(self.turns, self.calls, replies, strict=True):
            prompt = self.graph.prompt_ids(turn)
            assert call.num_prompt_tokens == turn.prompt_length == len(prompt)
            assert call.prompt == self.template.decode(prompt.tolist())
            assert self.sampled_text(turn) == reply + self.template.eot_text or self.sampled_text(turn) == reply
            assert turn.num_missing_logprobs == 0
            assert {provenance for provenance, _ in turn.segment_runs} <= {Provenance.RENDERED, Provenance.FORCED}
        trained = [turn_id for parts in self.record.samples for s in parts.samples for turn_id in s.turn_ids]
        assert sorted(trained) == sorted(turn.turn_id for turn in self.turns)
        num_trained = sum(sum(s.sampled) for parts in self.record.samples for s in parts.samples)
        assert num_trained == sum(turn.num_sampled for turn in self.turns)
        assert sum(len(parts.samples) for parts in self.record.samples) == self.num_timelines

    def check_continued(self) -> None:
        """One timeline: every prompt begins with all tokens of the turn before, as they were sampled."""
        assert [turn.fork_reason for turn in self.turns] == [""] * len(self.turns)
        assert [turn.parent_id for turn in self.turns] == [None, *[turn.turn_id for turn in self.turns[:-1]]]
        assert self.num_timelines == 1
        for before, turn in zip(self.turns, self.turns[1:], strict=False):
            whole = self.graph.full_ids(before).tolist()
            assert self.graph.prompt_ids(turn).tolist()[: len(whole)] == whole

    def check_forked(self, *reasons: str) -> None:
        """Every turn is a timeline of its own; ``reasons`` begin those recorded, from the second turn on."""
        assert [turn.parent_id for turn in self.turns] == [None] * len(self.turns)
        assert self.num_timelines == len(self.turns)
        found = [turn.fork_reason for turn in self.turns]
        assert len(found) == len(reasons) + 1
        assert found[0] == ""
        for reason, expected in zip(found[1:], reasons, strict=True):
            assert reason.startswith(expected), found


@dataclass(slots=True)
class Clients:
    """Runs clients on episodes of one server."""

    server: ScriptedServer
    script: Script
    python: Path
    """The client environment's interpreter."""
    folder: Path
    """For what clients write."""
    template: ChatTemplate
    _number: int = field(default=0, init=False)

    def check_continued(
        self,
        agent: str,
        mode: str,
        *,
        replies: Sequence[str] = TWO_TURNS,
        answer: str = ANSWER,
        key_in_url: bool = False,
    ) -> Finished:
        """Run an agent whose episode must be one timeline; a mode ends in ``-stream`` where it streams."""
        told, episode = self.episode(agent, mode, replies=replies, key_in_url=key_in_url)
        assert told.answer == answer
        episode.check_truth(mode, replies)
        episode.check_continued()
        streams = mode.endswith("-stream")
        assert {call.stream for call in episode.calls} == {streams}
        if streams:
            assert told.num_texts > 2 * len(replies), "the text came in one piece"
        return episode

    def check_forked(self, agent: str, mode: str, *reasons: str, replies: Sequence[str] = TWO_TURNS) -> Finished:
        """Run an agent each of whose turns must be a timeline of its own, for these reasons."""
        told, episode = self.episode(agent, mode, replies=replies)
        assert told.answer == ANSWER
        episode.check_truth(mode, replies)
        episode.check_forked(*reasons)
        if mode.endswith("-stream"):
            assert told.num_texts > 2 * len(replies), "the text came in one piece"
        return episode

    def episode(
        self, agent: str, mode: str, *, replies: Sequence[str], key_in_url: bool = False
    ) -> tuple[Told, Finished]:
        """Run one agent script as one training episode, and finish it.

        ``key_in_url``: the client is given no key; its base URL names the episode.
        """
        begun = self._post(
            "/api/episodes",
            {
                "idempotency_key": uuid.uuid4().hex,
                "task": {"source": "clients", "id": f"{agent}-{mode}", "payload": {}},
                "policies": ["solver"],
                "group": {"id": uuid.uuid4().hex, "size": 1},
            },
        )
        episode_id, key = begun["episode_id"], begun["api_key"]
        self.script.replies[episode_id] = replies
        where = (f"{self.server.url}/s/{key}/v1", "none") if key_in_url else (begun["base_url"], key)
        told = self.run(agent, mode, *where, begun["policies"][0])
        finished = self._post(f"/api/episodes/{episode_id}/finish", {"rewards": 1.0}, key=key)
        assert finished["num_turns"] == len(replies), told.log
        calls = [call for call in self.server.engine.calls if call.cache_key == episode_id]
        with open_read_only(self.server.run_dir / "ledger.sqlite") as ledger:
            (view,) = ledger.episode(episode_id)
        assert view.record is not None
        self._check_server()
        return told, Finished(load_graph(view.record.graph), view.record, calls, self.template)

    def run(self, agent: str, *arguments: str) -> Told:
        """Run ``agents/AGENT.py`` to its end; it must succeed and must not have tried to leave this machine."""
        self._number += 1
        folder = self.folder / f"{self._number:03}-{agent}"
        folder.mkdir()
        done = subprocess.run(
            [str(self.python), str(HERE / "agents" / f"{agent}.py"), *arguments],
            cwd=folder,
            env=client_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
        assert left_the_machine(folder) == ""
        assert done.returncode == 0, f"{done.stdout}\nThe server's log ends with:\n{self._server_log()}"
        told = json.loads(done.stdout.rstrip().rpartition("\n")[2])
        return Told(str(told["answer"]), told["num_texts"], done.stdout)

    def _check_server(self) -> None:
        """No client had to ask twice, no reply got lost, and nothing broke unseen."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        counts = {name: float(value) for name, _, value in (li.rpartition(" ") for li in lines if li[:1] != "#")}
        bad = ("wingbeat_replays_total", "wingbeat_malformed_tool_calls_total", "wingbeat_untrainable_tokens_total")
        assert {name: count for name, count in counts.items() if name.startswith(bad) and count} == {}
        assert "Traceback" not in self._server_log()

    def _server_log(self) -> str:
        return (self.server.run_dir / "control.log").read_text(encoding="utf-8")[-4000:]

    def _post(self, path: str, body: dict[str, Any], *, key: str = "") -> dict[str, Any]:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        request = urllib.request.Request(self.server.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)


def client_environment(folder: Path) -> dict[str, str]:
    """A bare environment with every client's own switches for telemetry and downloads set to off."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(HERE / "offline"),
        "PYTHONUNBUFFERED": "1",
        "OFFLINE_LOG": str(folder / "left.log"),
        "OPENAI_API_KEY": "none",  # with a key, tracing that is not switched off would go out
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "mini"),
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }


def left_the_machine(folder: Path) -> str:
    """What a client tried to reach, and from where; "" where it tried nothing."""
    log = folder / "left.log"
    return log.read_text(encoding="utf-8") if log.exists() else ""


def find_python() -> Path:
    """The interpreter of the clients' environment; without it the tests fail."""
    root = Path(os.environ.get("CLIENTS_VENV", HERE.parents[1] / ".venv-clients")).absolute()
    python = root / "bin" / "python"
    assert shutil.which(python), f"no client environment in {root}: run `make test-integration`, which makes it"
    return python
