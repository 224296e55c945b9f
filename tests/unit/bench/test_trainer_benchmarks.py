"""The trainer benchmarks measure what they say: the same trained tokens in every form, and a report of known keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.recorded import SHAPES, merged_batch, num_tokens, num_trained, record_group, turn_rows_batch, write_tokenizer
from bench.tree import MEMBERS, group_batch
from wingbeat.core.samples import EpisodeSamples, TrainingSample
from wingbeat.tracking import ChatTemplate

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    folder = tmp_path_factory.mktemp("recorded")
    write_tokenizer(folder)
    return ChatTemplate.load(folder)


def trained_edges(episode: EpisodeSamples) -> list[tuple[bytes, int, float]]:
    """Each trained token with all tokens before it and its logprob."""

    def of(sample: TrainingSample) -> list[tuple[bytes, int, float]]:
        ids, logprobs = sample.tokens_T, sample.sampling_logprobs_T
        places = np.flatnonzero(sample.sampled_T).tolist()
        return [(ids[:place].tobytes(), int(ids[place]), float(logprobs[place])) for place in places]

    return sorted(edge for sample in episode.samples for edge in of(sample))


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_timelines_train_the_same_tokens_after_the_same_tokens(shape: str, template: ChatTemplate) -> None:
    graphs = record_group(shape, episodes=2, seed=7, template=template)
    rows, merged = turn_rows_batch(graphs), merged_batch(graphs)
    assert num_trained(rows) == num_trained(merged) > 0
    assert num_tokens(rows) > 1.5 * num_tokens(merged)
    for one, other in zip(rows.episodes, merged.episodes, strict=True):
        assert (one.episode_id, one.agent, one.reward) == (other.episode_id, other.agent, other.reward)
        assert trained_edges(one) == trained_edges(other)


@pytest.mark.parametrize("shape", SHAPES)
def test_recording_is_deterministic(shape: str, template: ChatTemplate) -> None:
    first, second = (merged_batch(record_group(shape, episodes=1, seed=3, template=template)) for _ in range(2))
    assert first == second


def test_a_single_agent_is_one_timeline_of_ten_turns(template: ChatTemplate) -> None:
    (graph,) = record_group("single", episodes=1, seed=1, template=template)
    (episode,) = merged_batch([graph]).episodes
    assert graph.num_turns == 10
    assert [len(sample.turn_ids) for sample in episode.samples] == [10]


def test_a_team_is_one_timeline_for_each_agent(template: ChatTemplate) -> None:
    episodes = merged_batch(record_group("team", episodes=1, seed=1, template=template)).episodes
    assert {episode.agent: len(episode.samples) for episode in episodes} == {"planner": 1, "worker": 1, "critic": 1}


def test_forks_have_every_kind_of_fork(template: ChatTemplate) -> None:
    (graph,) = record_group("forks", episodes=1, seed=1, template=template)
    roots = [turn for turn in graph.turns if turn.parent_id is None]
    rewritten = [turn for turn in roots if "template rewrites history" in turn.fork_reason]
    assert len(roots) == 6, "the task, two sub-agents, the compacted context, and two questions after reasoning"
    assert len(rewritten) == 2
    parents = [turn.parent_id for turn in graph.turns if turn.parent_id is not None]
    assert len(parents) - len(set(parents)) == 1, "the retry"
    (lost,) = graph.superseded()
    assert num_trained(merged_batch([graph])) == graph.num_sampled_tokens - graph.turn(lost).num_sampled


def test_a_group_shares_its_whole_prompt_or_nothing() -> None:
    for shared in (True, False):
        tokens = [episode.samples[0].tokens_T for episode in group_batch(reply_tokens=4, shared=shared).episodes]
        assert {len(ids) for ids in tokens} == {36}
        assert len({ids[:32].tobytes() for ids in tokens}) == (1 if shared else MEMBERS)
        assert shared or len({int(ids[0]) for ids in tokens}) == MEMBERS


def quick_run(module: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True, timeout=280)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_merge_reports_every_shape() -> None:
    summary = quick_run("bench.merge")
    assert summary["shapes"].keys() == SHAPES.keys()
    for shape in summary["shapes"].values():
        assert shape.keys() >= {
            "tokens_rows", "tokens_merged", "tokens_tree", "time_rows_s", "time_merged_s", "time_tree_s",
            "speedup_merged", "speedup_tree", "grad_rel_err",
        }  # fmt: skip
        assert shape["tokens_rows"] > shape["tokens_merged"] > shape["tokens_tree"]
        assert shape["grad_rel_err"] <= 1e-5
        assert shape["grad_rel_err_float64"] <= 1e-12


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the resident set's peak from Linux")
def test_tree_reports_speed_memory_and_exactness() -> None:
    summary = quick_run("bench.tree")
    assert summary.keys() >= {"speedup_over_packed", "ratio_at_no_sharing"}
    assert summary["tokens"]["packed_at_once"] > 4 * summary["tokens"]["tree"]
    assert 0 < summary["peak_memory_ratio_depth_first"] < summary["peak_memory_ratio"] < 0.8
    assert summary["grad_rel_err"] <= 1e-5
    assert summary["grad_rel_err_float64"] <= 1e-12
