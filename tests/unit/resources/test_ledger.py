"""What a pool notes on disk, and what becomes of it when its process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_backend import FakeBackend, fake

from wingbeat.core.errors import SetupError
from wingbeat.resources import Budgets, Reaped, ResourceFailed, Resources, pool_tenants, reap, state_folder
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


def test_a_full_disk_loses_nothing_that_was_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    ledger.started("fake", "stays")
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    with pytest.raises(ResourceFailed, match="No space left"):
        ledger.started("fake", "must not live on")
    monkeypatch.setattr(os, "write", write)
    ledger.started("fake", "too")  # half a line before it would make it unreadable
    assert lines(tmp_path)[1:] == [{"started": ["fake", "stays"]}, {"started": ["fake", "too"]}]
    monkeypatch.setattr(os, "write", lambda file, data: 0)
    ledger.ended("fake", "too")  # is no failure of what has ended
    assert lines(tmp_path)[1:] == [{"started": ["fake", "stays"]}, {"started": ["fake", "too"]}]


async def test_a_full_disk_keeps_nothing_alive_that_the_dead_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, entries = FakeBackend(), [("fake", "thing 0"), ("fake", "thing 1")]
    forge(tmp_path, entries=entries, **DEAD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: 0)
        assert (await reap(tmp_path, backends={"fake": backend})).gone == tuple(entries)
    assert backend.reaped == ["thing 0", "thing 1"]


def test_a_ledger_that_cannot_be_begun_or_written_anew_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    ledger = Ledger(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        for _ in range(2):
            with pytest.raises(SetupError, match="No space left"):
                ledger.started("fake", "must not live on")
    assert list(tmp_path.iterdir()) == []
    ledger.started("fake", "stays")
    monkeypatch.setattr("wingbeat.resources.ledger.MAX_DEAD_LINES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        for number in range(3):
            ledger.started("fake", f"thing {number}")
            ledger.ended("fake", f"thing {number}")
    ledger.started("fake", "too")
    assert {"started": ["fake", "too"]} in lines(tmp_path), "in the file that others read"
    assert len(list(tmp_path.iterdir())) == 1


def test_who_has_ended_and_was_not_collected_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        forge(tmp_path, entries=[("fake", "pid 7")], pid=child.pid, start=start)
        assert list(left_in(tmp_path)) == []
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        (left,) = left_in(tmp_path)
        left.close()


async def test_notes_of_somebody_else_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they could have any process or container of this user's ended."""
    forge(tmp_path, entries=[("fake", "thing 7")], **DEAD)
    backend = FakeBackend()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(SetupError, match="belongs to user"):
        await reap(tmp_path, backends={"fake": backend})
    monkeypatch.setattr("wingbeat.resources.ledger._check_ours", lambda folder: folder.lstat())
    assert await reap(tmp_path, backends={"fake": backend}) == Reaped()
    async with Resources(Budgets(), backends={"fake": backend}, ledger=tmp_path):
        pass
    assert backend.reaped == []


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

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert state_folder() == Path(tempfile.gettempdir()) / f"wingbeat-{os.geteuid()}" / "resources"


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
    broken = [Ledger(tmp_path / "other") for _ in range(4)]  # in the child they cannot be closed
    for one in broken:
        one.started("fake", "thing")
        os.close(one._file)
    ledger = Ledger(tmp_path)
    ledger.started("fake", "thing")
    for one in broken:
        one._file = 2**20
    (read, write), (is_up, up) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(up, b"!")
        os.read(read, 1)  # until the parent has looked
        os._exit(0)
    os.close(read)
    assert os.read(is_up, 1) == b"!"  # what runs in a child at the fork has run
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
        for file in (write, is_up, up):
            os.close(file)
        os.waitpid(child, 0)
        for one in (ledger, *broken):
            one._file = -1


async def test_a_pool_that_closes_does_not_wait_for_what_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(FakeBackend):
        async def reap(self, handle: str) -> bool:
            await asyncio.Event().wait()
            return True

    monkeypatch.setattr(pool_tenants, "UNWANTED_S", 0.01)
    forge(tmp_path, entries=[("fake", "thing 7")], **DEAD)
    pool = Resources(Budgets(), backends={"fake": Hanging()}, ledger=tmp_path)
    async with asyncio.timeout(5), pool, pool.lease(fake()):
        pass
    assert (await reap(tmp_path, backends={"fake": FakeBackend()})).gone == (("fake", "thing 7"),)
