"""From an episode's token graph to training samples.

A timeline is a root-to-leaf path. Turns that several timelines share are context in all of them, but
each sampled token trains exactly once: in the first timeline, by the age of its leaf, that holds it.

    a ── b ── c     timelines a-b-c and a-d; a, b and c train in the first, only d in the second.
     └── d

Some sampled tokens never train: those without a usable logprob, greedy ones (temperature 0: nothing was
drawn), and those of superseded turns (see :mod:`wingbeat.tracking.superseded`), unless these are asked for.
:func:`count_untrainable` counts them by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from wingbeat.core.samples import TrainingSample
from wingbeat.tracking.graph import EpisodeGraph
from wingbeat.tracking.turns import Turn


def build_samples(
    graph: EpisodeGraph, *, policy: str, episode_id: str, train_superseded: bool = False
) -> dict[str, tuple[TrainingSample, ...]]:
    """The samples of ``policy`` by agent; agents whose turns hold nothing trainable have none (and no key).

    A sample has one temperature. A timeline whose turns were sampled at several gives one sample for
    each, with the same tokens and disjoint masks.
    """
    trained: set[str] = set()
    samples: dict[str, list[TrainingSample]] = {}
    for path in timelines(graph, policy=policy, without=() if train_superseded else graph.superseded()):
        fresh = [turn for turn in path if turn.turn_id not in trained]
        trained.update(turn.turn_id for turn in fresh)
        leaf = path[-1]
        by_temperature: dict[float, set[str]] = {}
        for turn in fresh:
            if turn.temperature > 0 and turn.trainable_T.any():
                by_temperature.setdefault(turn.temperature, set()).add(turn.turn_id)
        for number, (temperature, turn_ids) in enumerate(by_temperature.items()):
            sample_id = f"{episode_id}:{leaf.turn_id}" + (f":{number}" if number else "")
            sample = _sample(sample_id, path=path, training=turn_ids, temperature=temperature)
            samples.setdefault(leaf.agent, []).append(sample)
    return {agent: tuple(found) for agent, found in samples.items()}


def timelines(graph: EpisodeGraph, *, policy: str, without: Collection[str] = ()) -> Iterator[tuple[Turn, ...]]:
    """The root-to-leaf paths of a policy's turns, in the order in which their leaves were committed.

    ``without``: ids of turns that are left out, none of which may have a child.
    """
    kept = [turn for turn in graph.turns if turn.turn_id not in without]
    parents = {turn.parent_id for turn in kept}
    for turn in kept:
        if turn.policy == policy and turn.turn_id not in parents:
            yield graph.path(turn)


def count_untrainable(graph: EpisodeGraph, *, policy: str, train_superseded: bool = False) -> dict[str, int]:
    """Sampled tokens of a policy that no sample trains, by reason; reasons without tokens are left out.

    Each token has one reason: that of its superseded turn comes first.
    """
    superseded = {} if train_superseded else graph.superseded()
    counts: Counter[str] = Counter()
    for turn in graph.turns:
        if turn.policy != policy:
            continue
        if turn.turn_id in superseded:
            counts[f"superseded: {superseded[turn.turn_id]}"] += turn.num_sampled
        elif turn.temperature > 0:
            counts["missing_logprob"] += turn.num_missing_logprobs
        else:
            counts["greedy"] += turn.num_sampled
    return {reason: count for reason, count in sorted(counts.items()) if count}


def _sample(sample_id: str, *, path: Sequence[Turn], training: set[str], temperature: float) -> TrainingSample:
    """One timeline in which the turns of ``training`` train."""
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    supports: list[NDArray[np.int32]] = []
    table: dict[bytes, int] = {}
    starts: list[int] = []
    for turn in path:
        if turn.turn_id in training:
            starts.append(turn.prompt_length)
        trains_T = turn.trainable_T if turn.turn_id in training else np.zeros(turn.num_sampled, np.bool_)
        prompt_length = len(turn.segment)
        tokens += [turn.segment, turn.sampled]
        masks += [np.zeros(prompt_length, np.bool_), trains_T]
        logprobs += [np.zeros(prompt_length, np.float32), np.where(trains_T, turn.logprobs, np.float32(0))]
        versions += [np.full(prompt_length, -1, np.int32), np.where(trains_T, turn.versions_T, np.int32(-1))]
        supports += [np.full(prompt_length, -1, np.int32), _supports_T(turn, trains_T, table=table)]
    return TrainingSample.build(
        sample_id,
        token_ids=np.concatenate(tokens),
        sampled=np.concatenate(masks).astype(np.uint8),
        sampling_logprobs=np.concatenate(logprobs),
        versions=np.concatenate(versions),
        temperature=temperature,
        turn_ids=tuple(turn.turn_id for turn in path if turn.turn_id in training),
        turn_starts=tuple(starts),
        support_table=tuple(table),
        support_index=np.concatenate(supports) if table else None,
    )


def _supports_T(turn: Turn, trains_T: NDArray[np.bool_], *, table: dict[bytes, int]) -> NDArray[np.int32]:
    """[T] each trained token's place in the sample's ``table``, which grows by the blobs that are used; else -1."""
    index_T = np.full(turn.num_sampled, -1, np.int32)
    if turn.support_table:
        used_T = trains_T & (turn.support_index >= 0)
        places = np.full(len(turn.support_table), -1, np.int32)
        for place in sorted(set[int](turn.support_index[used_T].tolist())):
            places[place] = table.setdefault(turn.support_table[place], len(table))
        index_T[used_T] = places[turn.support_index[used_T]]
    return index_T
