"""What the gateway adds to a model call, against LiteLLM's proxy: ``python -m bench.gateway [--quick] [--no-litellm]``.

One mock engine answers at once; what is measured is the way to it.  The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.conversations import LATER_TURNS, Conversation
from bench.gateway_report import WARM_UP, Cell, Figures, report
from bench.gateway_targets import Session, Target, litellm_target, our_targets
from bench.http_load import Answer, Connection, http_request
from bench.machine import cpu_seconds

CONVERSATIONS = {4: 8, 400: 2}
"""How many different conversations there are, by size in KB."""
FIRST_TURNS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a round: so many turns of every session."""

    stream: bool
    turns: int


@dataclass(frozen=True, slots=True)
class Round:
    """What every way serves in its turn: sessions are begun, their first turns taken, then the parts are timed."""

    kb: int
    concurrency: int
    episodes: int
    """Per worker, one after the other."""
    parts: tuple[Part, ...]
    repeat: int
    seconds: float = 4.0
    """A part starts no request after so long."""


WHOLE, STREAMED = (Part(False, LATER_TURNS),), (Part(True, LATER_TURNS),)
BOTH = (Part(False, LATER_TURNS // 2), Part(True, LATER_TURNS - LATER_TURNS // 2))


def plan(*, quick: bool, repeats: int) -> list[Round]:
    """All rounds, the same for every way.

    First turns of long prompts are expensive to take, so their sessions serve both kinds of answers.
    """
    rounds: list[Round] = []
    for repeat in range(repeats):
        for parts, times in ((WHOLE, 2 if quick else 5), (STREAMED, 1 if quick else 2)):
            rounds += [Round(4, 1, 6, parts, repeat) for _ in range(times)]
            rounds.append(Round(4, 32, 2 if quick else 4, parts, repeat, seconds=1.5 if quick else 3.0))
    rounds.append(Round(400, 1, 3 if quick else 12, BOTH, 0))
    if not quick:
        rounds += [Round(4, 256, 2, parts, 0) for parts in (WHOLE, STREAMED)]
        rounds += [Round(400, concurrency, 1, BOTH, 0) for concurrency in (32, 256)]
    return rounds


class Bench:
    """Serves rounds; ``results`` and ``first_turns`` gather what they took."""

    def __init__(self) -> None:
        self.results: defaultdict[tuple[Cell, str, int], Figures] = defaultdict(Figures)
        self.first_turns: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        """Seconds by size and way, few at a time."""
        self._conversations = {
            kb: [Conversation.write(kb * 1024, seed=100 + i) for i in range(n)] for kb, n in CONVERSATIONS.items()
        }

    async def serve(self, target: Target, job: Round) -> None:
        """One round of one way."""
        async with connections(target.port, job.concurrency) as lines:
            held = await self._begin(target, job, lines[:FIRST_TURNS_AT_ONCE])
            for part in job.parts:
                await self._timed(target, job, part, lines, held)
            if job.repeat == WARM_UP:
                for session, _ in held:
                    target.check_kept(session)
            for session, _ in held:
                await target.end(lines[0], session)

    async def _begin(
        self, target: Target, job: Round, lines: Sequence[Connection]
    ) -> list[tuple[Session, Conversation]]:
        """Sessions that stand at their second turn."""
        waiting = list(range(job.concurrency * job.episodes))
        choices = self._conversations[job.kb]
        held: list[tuple[Session, Conversation]] = []

        async def work(line: Connection) -> None:
            while waiting:
                conversation = choices[waiting.pop() % len(choices)]
                session = await target.begin(line)
                held.append((session, conversation))
                if session.turn == 0:
                    answer = await ask(line, session, conversation, stream=False)
                    check(target, session, conversation, answer, stream=False)
                    session.turn = 1
                    self.first_turns[job.kb, target.name].append(answer.total_s)

        await asyncio.gather(*(work(line) for line in lines))
        return held

    async def _timed(
        self,
        target: Target,
        job: Round,
        part: Part,
        lines: Sequence[Connection],
        held: Sequence[tuple[Session, Conversation]],
    ) -> None:
        figures = self.results[Cell(job.kb, job.concurrency, part.stream), target.name, job.repeat]
        cpu, load_cpu, started = _cpu(target), time.process_time(), time.perf_counter()
        deadline = started + job.seconds

        async def work(index: int, line: Connection) -> None:
            for session, conversation in held[index :: len(lines)]:
                for _ in range(part.turns):
                    if time.perf_counter() > deadline:
                        return
                    answer = await ask(line, session, conversation, stream=part.stream)
                    if target.name == "ours" or answer.status == 200:
                        check(target, session, conversation, answer, stream=part.stream)
                        figures.latencies.append(answer.total_s)
                        figures.first_bytes.append(answer.first_s)
                    else:
                        figures.errors += 1
                    session.turn += 1

        await asyncio.gather(*(work(index, line) for index, line in enumerate(lines)))
        figures.elapsed_s += time.perf_counter() - started
        figures.load_cpu_s += time.process_time() - load_cpu
        figures.cpu_s += _cpu(target) - cpu


def _cpu(target: Target) -> float:
    return 0.0 if target.pid is None else cpu_seconds(target.pid)


async def ask(line: Connection, session: Session, conversation: Conversation, *, stream: bool) -> Answer:
    bodies = conversation.streamed if stream else conversation.bodies
    return await line.send(http_request("POST", "/v1/chat/completions", bodies[session.turn], headers=session.headers))


def check(target: Target, session: Session, conversation: Conversation, answer: Answer, *, stream: bool) -> None:
    """A fast wrong answer is worth nothing."""
    wanted = b"data: [DONE]" if stream else conversation.expected[session.turn]
    if answer.status != 200 or wanted not in answer.body:
        raise RuntimeError(f"{target.name} turn {session.turn}: status {answer.status}, {answer.body[-2000:]!r}")


@contextlib.asynccontextmanager
async def connections(port: int, count: int) -> AsyncGenerator[list[Connection]]:
    opened = [await Connection.open(port) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


async def measure(targets: Sequence[Target], rounds: Sequence[Round]) -> Bench:
    """Every round on every way in turn."""
    bench = Bench()
    for target in targets:  # caches, connections, lazy imports
        await bench.serve(target, Round(4, 8, 1, BOTH, WARM_UP))
    for number, job in enumerate(rounds):
        started = time.perf_counter()
        for target in targets:
            await bench.serve(target, job)
        spent = time.perf_counter() - started
        sys.stderr.write(f"{number + 1}/{len(rounds)} {job.kb} KB at {job.concurrency}: {spent:.1f} s\n")
    return bench


@contextlib.contextmanager
def all_targets(folder: Path, *, litellm: bool) -> Iterator[list[Target]]:
    with contextlib.ExitStack() as stack:
        direct, ours = stack.enter_context(our_targets(folder))
        targets: list[Target] = [direct, ours]
        if litellm:
            targets.append(stack.enter_context(litellm_target(folder, direct)))
        yield targets


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute")
    parser.add_argument("--no-litellm", action="store_true", help="leave LiteLLM out, and the ratio with it")
    parser.add_argument("--repeats", type=int, default=5, help="of which the best counts")
    given = parser.parse_args()
    started = time.perf_counter()
    rounds = plan(quick=given.quick, repeats=2 if given.quick else given.repeats)
    with (
        tempfile.TemporaryDirectory(prefix="wingbeat-bench-") as folder,
        all_targets(Path(folder), litellm=not given.no_litellm) as targets,
    ):
        bench = uvloop.run(measure(targets, rounds))
    summary = report(bench.results, bench.first_turns, quick=given.quick, elapsed_s=time.perf_counter() - started)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
