"""One tool call and an answer, as every dialect's SDK is told them, and what the episode must have become."""

from __future__ import annotations

from typing import Any

from harness import Api, Begun, read_graph

from bench.scripted_server import ScriptedServer
from bench.scripts import AnyScript, in_order
from wingbeat.core.types import Provenance
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.timelines import build_samples

CALL = '<tool_call>\n{"name": "add", "arguments": {"b":3,  "a": 2, "note":"é"}}\n</tool_call>'
FIRST = f"Let me add: é\n{CALL}"
THOUGHT = f"<think>\nI should add.\n</think>\n\n{FIRST}"
LAST = "The answer is 5"


async def begin(server: ScriptedServer, api: Api, script: AnyScript, **fields: Any) -> Begun:
    server.engine.script = script if callable(script) else in_order(script)
    return await api.begin(**fields)


async def graph_of(server: ScriptedServer, api: Api, episode: Begun) -> EpisodeGraph:
    """The finished episode's graph."""
    assert (await api.finish(episode)).status == 200
    return read_graph(server, episode.id, episode.attempt)  # pyright: ignore[reportArgumentType]


def check_one_timeline(graph: EpisodeGraph, *, num_turns: int = 2) -> None:
    """Every turn extends exactly what was sampled before, and every sampled token trains once."""
    assert graph.num_turns == num_turns
    earlier = None
    for turn in graph.turns:
        assert turn.fork_reason == ""
        assert turn.parent_id == (earlier.turn_id if earlier else None)
        if earlier:
            prompt = graph.prompt_ids(turn).tolist()
            assert prompt[: len(prompt) - len(turn.segment)] == graph.full_ids(earlier).tolist()
            assert {provenance for provenance, _ in turn.segment_runs} <= {Provenance.RENDERED, Provenance.FORCED}
        earlier = turn
    ((sample,),) = build_samples(graph, policy="solver", episode_id=graph.episode_id).values()
    assert sum(sample.sampled) == graph.num_sampled_tokens
