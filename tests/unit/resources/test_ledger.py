"""What a pool notes on disk, and what becomes of it when its process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_backend import FakeBackend, fake

from wingbeat.core.errors import SetupError
from wingbeat.resources import Budgets, Reaped, ResourceFailed, Resources, pool_instances, reap, state_folder
from wingbeat.resources.ledger import Ledger, Owner, left_in


def lines(folder: Path) -> list[dict[str, object]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def forge(folder: Path, *, entries: list[tuple[str, str]], **owner: object) -> Path:
    """The ledger of another process."""
    folder.mkdir(parents=True, exist_ok=True)
    me = Owner.this_process()
    said = {"host": me.host, "boot": me.boot, "space": me.space, "pid": me.pid, "start": me.start, **owner}
    path = folder / f"forged-{len(list(folder.iterdir()))}.jsonl"
    started = [json.dumps({"started": list(entry)}) for entry in entries]
    path.write_text("\n".join([json.dumps({"owner": said}), *started]) + "\n")
    return path


DEAD = {"pid": 2**22 - 1, "start": "1"}


async def test_what_is_alive_is_noted_and_what_ended_is_not_left(tmp_path: Path) -> None:
    folder, backend = tmp_path / "state", FakeBackend()
    async with Resources(Budgets(), backends={"fake": backend}, ledger=folder) as pool:
        assert not folder.exists(), "nothing is written before something is started"
        async with pool.lease(fake()):
            owner, started = lines(folder)
            assert owner["owner"]["pid"] == os.getpid()  # pyright: ignore[reportIndexIssue]
            assert started == {"started": ["fake", "thing 0"]}
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            (path,) = folder.iterdir()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(folder.iterdir()) == []


async def test_the_living_are_left_alone(tmp_path: Path) -> None:
    backend, other = FakeBackend(), FakeBackend()
    async with Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path) as pool, pool.lease(fake()):
        assert await reap(tmp_path, backends={"fake": other}) == Reaped()
        neighbours = Resources(Budgets(), backends={"fake": other}, ledger=tmp_path)
        async with neighbours, neighbours.lease(fake()):
            assert await reap(tmp_path, backends={"fake": other}) == Reaped()
        assert (other.reaped, backend.reaped) == ([], [])


async def test_what_the_dead_left_is_ended_once(tmp_path: Path) -> None:
    forge(tmp_path, entries=[("fake", "thing 7"), ("fake", "thing 8")], **DEAD)
    backend = FakeBackend()
    backend.alive["thing 7"] = None  # pyright: ignore[reportArgumentType]
    async with Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path):
        pass
    assert backend.reaped == ["thing 7", "thing 8"]
    assert await reap(tmp_path, backends={"fake": backend}) == Reaped()
    assert os.listdir(tmp_path) == []


async def test_what_cannot_be_ended_now_is_tried_again(tmp_path: Path) -> None:
    class Away(FakeBackend):
        async def reap(self, handle: str) -> bool:
            raise ResourceFailed("the daemon is away")

    forge(tmp_path, entries=[("fake", "thing 7"), ("unknown", "x")], **DEAD)
    assert await reap(tmp_path, backends={"fake": Away()}) == Reaped(left=(("fake", "thing 7"), ("unknown", "x")))
    assert await reap(tmp_path, backends={"fake": FakeBackend()}) == Reaped(
        gone=(("fake", "thing 7"),), left=(("unknown", "x"),)
    )


@pytest.mark.parametrize(
    ("owner", "reaped"),
    [
        ({}, ()),  # alive: this process, though it does not hold the lock
        ({"start": "1"}, (("fake", "pid 7"), ("fake", "c0ffee"))),  # its number belongs to another by now
        ({"host": "elsewhere", **DEAD}, ()),
        ({"boot": "before", **DEAD}, (("fake", "pid 7"), ("fake", "c0ffee"))),
        ({"space": "pid:[1]", **DEAD}, (("fake", "c0ffee"),)),  # process numbers of another container mean others here
    ],
    ids=["alive", "number-reused", "other-host", "rebooted", "other-container"],
)
async def test_who_is_dead(owner: dict[str, object], reaped: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    forge(tmp_path, entries=[("fake", "pid 7"), ("fake", "c0ffee")], **owner)
    assert (await reap(tmp_path, backends={"fake": FakeBackend()})).gone == reaped


async def test_two_reapers_never_have_the_same_ledger(tmp_path: Path) -> None:
    forge(tmp_path, entries=[("fake", "thing 7")], **DEAD)
    (first,) = left_in(tmp_path)
    assert list(left_in(tmp_path)) == []
    first.ended(("fake", "thing 7"))
    first.close()
    assert list(left_in(tmp_path)) == []


async def test_a_line_cut_off_by_the_death_is_not_believed(tmp_path: Path) -> None:
    path = forge(tmp_path, entries=[("fake", "thing 7")], **DEAD)
    with path.open("a") as file:
        file.write('{"ended": ["fake", "thi')
    backend = FakeBackend()
    await reap(tmp_path, backends={"fake": backend})
    assert backend.reaped == ["thing 7"]


def test_a_long_life_does_not_make_a_long_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.started("fake", "stays")
    for number in range(5000):
        ledger.started("fake", f"thing {number}")
        ledger.ended("fake", f"thing {number}")
    told = lines(tmp_path)
    assert len(told) < 5000
    assert {"started": ["fake", "stays"]} in told
    ledger.ended("fake", "stays")
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(SetupError, match="expected a folder, got a link"):
        Ledger(tmp_path / "link").started("fake", "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="WINGBEAT_STATE_DIR"):
        Ledger(tmp_path / "file" / "below").started("fake", "x")
    (tmp_path / "open").mkdir(mode=0o755)
    Ledger(tmp_path / "open").started("fake", "x")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700


def test_where_the_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINGBEAT_STATE_DIR", "/mine")
    assert state_folder() == Path("/mine/resources")
    monkeypatch.delenv("WINGBEAT_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/wingbeat/resources")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local/state/wingbeat/resources"


OWNER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_backend import FakeBackend, fake
from wingbeat.resources import Budgets, Resources

async def main():
    async with Resources(Budgets(), backends={"fake": FakeBackend()}, ledger=Path(sys.argv[2])) as pool:
        async with pool.lease(fake()), pool.lease(fake()):
            sys.stdout.write("held\\n")
            sys.stdout.flush()
            await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_process_that_is_killed_has_its_things_ended_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(Path(__file__).parent), str(tmp_path)]
    backend = FakeBackend()

    async def reap_now() -> Reaped:
        return await reap(tmp_path, backends={"fake": backend})

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        assert asyncio.run(reap_now()) == Reaped(), "it lives"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert asyncio.run(reap_now()) == Reaped(gone=(("fake", "thing 0"), ("fake", "thing 1")))
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_keep_its_parents_ledger_alive(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.started("fake", "thing")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has looked
        os._exit(0)
    os.close(read)
    os.close(ledger._file)  # as the death of the parent does
    try:
        assert left_in(tmp_path) is not None
        path = next(tmp_path.glob("*.jsonl"))
        text = path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**22 - 1}')
        path.write_text(text)
        (left,) = left_in(tmp_path)
        assert left.entries == (("fake", "thing"),)
        left.close()
    finally:
        os.close(write)
        os.waitpid(child, 0)
        ledger._file = -1


async def test_a_pool_that_closes_does_not_wait_for_what_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(FakeBackend):
        async def reap(self, handle: str) -> bool:
            await asyncio.Event().wait()
            return True

    monkeypatch.setattr(pool_instances, "UNWANTED_S", 0.01)
    forge(tmp_path, entries=[("fake", "thing 7")], **DEAD)
    pool = Resources(Budgets(), backends={"fake": Hanging()}, ledger=tmp_path)
    async with asyncio.timeout(5), pool, pool.lease(fake()):
        pass
    assert (await reap(tmp_path, backends={"fake": FakeBackend()})).gone == (("fake", "thing 7"),)
