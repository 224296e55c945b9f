"""How fast finished episodes become durable, and what they take: ``python -m bench.ledger [--quick]``.

The baseline makes the same writes, but waits for each before the next: one commit, so one sync of the disk, per
write.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from bench.machine import describe_machine
from bench.recorded import POLICY, merged_batch, num_tokens, num_trained, record_group, write_tokenizer
from wingbeat.core.types import Outcome, Split, Task
from wingbeat.dataflow.ledger import Ledger
from wingbeat.dataflow.ledger_views import RunMeta
from wingbeat.dataflow.records import BeginRecord, EpisodeRecord, GroupSpec
from wingbeat.tracking import ChatTemplate
from wingbeat.tracking.serialize import dump_graph

GROUP_SIZE = 8
DISTINCT = 64
"""Recorded episodes; a run repeats them under new ids, and each is compressed by itself."""
EPISODES, QUICK_EPISODES = 2000, 64
IN_FLIGHT = 64
"""Episodes whose finish may be unacknowledged at once; so many agents wait for an answer."""
RATE_BAR = 500.0
DESCRIPTION = (
    "Finished episodes per second of wall clock, from the first write until the last finish is durable (SQLite WAL, "
    "synchronous = FULL), each {tokens:.0f} tokens in {turns} turns with messages and logprobs, {sampled:.0f} of them "
    "sampled. Each episode is written as in a run: its group of 8 is recorded, it begins, it finishes, the group "
    "closes. grouped: at most {in_flight} finishes wait at once, and writes share commits; one_by_one: every write is "
    "waited for before the next. The ways take turns, each in a new ledger; the best of the repeats counts. "
    "bytes_per_episode: size of the closed ledger; bytes_uncompressed: samples and token graph before compression."
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One way's run over a new ledger."""

    episodes_per_s: float
    bytes_per_episode: float


def recorded_episodes(folder: Path) -> tuple[list[EpisodeRecord], dict[str, float]]:
    """Records to repeat under new ids, and what they hold on average."""
    write_tokenizer(folder)
    template = ChatTemplate.load(folder)
    graphs = [
        graph
        for seed in range(DISTINCT // GROUP_SIZE)
        for graph in record_group("single", episodes=GROUP_SIZE, seed=seed, template=template)
    ]
    batch = merged_batch(graphs)
    records = [
        EpisodeRecord(
            episode_id=samples.episode_id,
            attempt=1,
            group_id="",
            outcome=Outcome.AGENT,
            finish_digest="0" * 64,
            rewards={POLICY: samples.reward},
            samples=(samples,),
            graph=dump_graph(graph),
            num_turns=graph.num_turns,
        )
        for graph, samples in zip(graphs, batch.episodes, strict=True)
    ]
    raw = sum(len(msgspec.msgpack.encode(record.samples)) + len(record.graph) for record in records)
    return records, {
        "tokens": num_tokens(batch) / len(records),
        "sampled": num_trained(batch) / len(records),
        "turns": records[0].num_turns,
        "bytes_uncompressed": raw / len(records),
    }


def renamed(records: list[EpisodeRecord], *, count: int) -> Iterator[EpisodeRecord]:
    """The recorded episodes again and again, in groups, each under an id of its own."""
    for number in range(count):
        record = records[number % len(records)]
        group_id, episode_id = f"g{number // GROUP_SIZE}", f"g{number // GROUP_SIZE}-{number % GROUP_SIZE}"
        samples = tuple(msgspec.structs.replace(s, episode_id=episode_id, group_id=group_id) for s in record.samples)
        yield replace(record, episode_id=episode_id, group_id=group_id, samples=samples)


def write_episode(ledger: Ledger, record: EpisodeRecord, *, settle: Callable[[Future[Any]], Any]) -> Future[bool]:
    """All writes of one episode, each passed to ``settle`` before the next; its finish."""
    place = int(record.episode_id.rpartition("-")[2])
    if place == 0:
        ids = [f"{record.group_id}-{member}" for member in range(GROUP_SIZE)]
        task = Task("bench", record.group_id, {"question": "how long does it take ?"})
        spec = GroupSpec(record.group_id, task, Split.TRAIN, GROUP_SIZE, (POLICY,), floor_version={POLICY: 0})
        settle(ledger.record_group(spec, episode_ids=ids))
    settle(ledger.record_begin(BeginRecord(record.episode_id, 1, group_id=record.group_id)))
    finish = ledger.record_finish(record)
    settle(finish)
    if place == GROUP_SIZE - 1:
        settle(ledger.close_group(record.group_id))
    return finish


def measure(records: list[EpisodeRecord], *, count: int, in_flight: int, parent: Path) -> Measured:
    """Write ``count`` episodes to a new ledger; ``in_flight`` 0 waits for every write."""
    episodes = list(renamed(records, count=count))
    settle = Future[Any].done if in_flight else Future[Any].result
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        path = Path(folder) / "ledger.sqlite"
        with Ledger.open(path, run=RunMeta("bench", seed=0)) as ledger:
            waiting: deque[Future[bool]] = deque()
            started = time.perf_counter()
            for record in episodes:
                waiting.append(write_episode(ledger, record, settle=settle))
                if len(waiting) > in_flight:
                    waiting.popleft().result()
            while waiting:
                waiting.popleft().result()
            taken = time.perf_counter() - started
            problems, attempts = ledger.verify(), ledger.summary().attempts
        if problems or attempts != {"finished:agent": count}:
            raise RuntimeError(f"expected {count} finished attempts without problems, got {attempts}: {problems}")
        return Measured(count / taken, whole_size(path) / count)


def whole_size(path: Path) -> int:
    """Of a closed ledger, with all of its write-ahead log moved into it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


def run(*, quick: bool, repeats: int, parent: Path) -> dict[str, Any]:
    count = QUICK_EPISODES if quick else EPISODES
    ways = {"grouped": (IN_FLIGHT, count), "one_by_one": (0, max(GROUP_SIZE, count // 4))}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        records, facts = recorded_episodes(Path(folder))
    found: dict[str, list[Measured]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, (in_flight, number) in ways.items():
            found[way].append(measure(records, count=number, in_flight=in_flight, parent=parent))
            sys.stderr.write(f"{way}: {found[way][-1].episodes_per_s:.0f} episodes/s\n")
    best = {way: max(runs, key=lambda run: run.episodes_per_s) for way, runs in found.items()}
    rate, baseline = best["grouped"].episodes_per_s, best["one_by_one"].episodes_per_s
    return {
        "description": DESCRIPTION.format(
            tokens=facts["tokens"], turns=facts["turns"], sampled=facts["sampled"], in_flight=IN_FLIGHT
        ),
        "episodes_per_s": round(rate, 1),
        "bytes_per_episode": round(best["grouped"].bytes_per_episode),
        "bytes_uncompressed": round(facts["bytes_uncompressed"]),
        "tokens_per_episode": round(facts["tokens"]),
        "episodes_per_s_one_by_one": round(baseline, 1),
        "ratio_over_one_by_one": round(rate / baseline, 3),
        "bars": {f"episodes_per_s >= {RATE_BAR:.0f}": rate >= RATE_BAR},
        "quick": quick,
        "repeats": repeats,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "machine": {**describe_machine(), "sqlite": sqlite3.sqlite_version},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ledger", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: few episodes, measured once")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each; the best counts")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a folder of the disk to measure")
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    summary = run(quick=quick, repeats=1 if quick else arguments.repeats, parent=arguments.dir)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
