"""Control groups of version 2 on the kernel that runs the tests, wherever such a tree can be written.

Where version 1 holds the controllers of memory, processes and processors, what is left to version 2 is still real:
groups, how processes enter them, accounts of processor time, ``cgroup.events`` and ``cgroup.kill``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wingbeat.resources import ResourceFailed, SandboxSpec
from wingbeat.resources.backends.limits_cgroups import Group, GroupLimits, sweep
from wingbeat.resources.backends.limits_homes import CPUACCT, PIDS, Homes, find_homes
from wingbeat.resources.backends.sandbox import SandboxBackend
from wingbeat.resources.backends.sandbox_process import Handle


def _mount() -> str:
    """The line of a version 2 tree; "" where there is none in which a group can be made."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        if line.partition(" - ")[2].startswith("cgroup2 ") and os.access(line.split()[4], os.W_OK):
            probe = Path(line.split()[4], f"wingbeat-probe-{os.getpid()}")
            try:
                probe.mkdir()
                probe.rmdir()
            except OSError:
                continue
            return line
    return ""


MOUNT = _mount()
pytestmark = pytest.mark.skipif(not MOUNT, reason="no tree of control groups of version 2 can be written here")


@pytest.fixture
def tree() -> Iterator[Path]:
    """A group of the tests' own."""
    folder = Path(MOUNT.split()[4], f"wingbeat-tests-{os.getpid()}")
    folder.mkdir()
    yield folder
    folder.rmdir()


def _events(folder: Path) -> dict[str, str]:
    return dict(line.split() for line in (folder / "cgroup.events").read_text().splitlines())


ENTERING = """
import os, sys, time
os.write(int(sys.argv[1]), b"0")
if os.fork() == 0:
    while True:
        time.sleep(1000)
until = time.process_time() + 0.1
while time.process_time() < until:
    pass
print("burnt", flush=True)
time.sleep(1000)
"""


def test_a_process_that_enters_is_found_counted_and_ended_with_its_children(tree: Path) -> None:
    group = Group.make(Homes(2, {CPUACCT: tree}), GroupLimits(counts_cpu=True))
    (folder,) = group.folders
    assert _events(folder)["populated"] == "0"
    entries = group.open_entries()
    command = [sys.executable, "-I", "-S", "-c", ENTERING, str(entries[0])]
    with subprocess.Popen(command, pass_fds=entries, stdout=subprocess.PIPE) as process:
        os.close(entries[0])
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        assert len(group.processes()) == 2
        assert process.pid in group.processes()
        assert _events(folder)["populated"] == "1"
        assert 0.09 <= group.counters().cpu_s < 60
        assert not group.remove(), "the kernel holds it while processes are in it"
        assert group.end()
        assert process.wait() == -signal.SIGKILL
    assert not folder.exists()
    assert not group.end()


def test_a_bomb_that_is_faster_than_single_kills_is_ended(tree: Path) -> None:
    group = Group.make(Homes(2, {CPUACCT: tree}), GroupLimits(counts_cpu=True))
    entries = group.open_entries()
    bomb = """
import os, sys
os.write(int(sys.argv[1]), b"0")
print(flush=True)
while True:
    os.fork() and os._exit(0)
"""
    command = [sys.executable, "-I", "-S", "-c", bomb, str(entries[0])]
    with subprocess.Popen(command, pass_fds=entries, stdout=subprocess.PIPE) as process:
        os.close(entries[0])
        assert process.stdout is not None
        process.stdout.readline()
        assert group.end()
    assert not group.folders[0].exists()


def test_what_a_dead_owner_left_is_ended_with_its_group(tree: Path) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    folder = tree / f"wingbeat-{namespace}-{os.getpid()}-1-1"
    folder.mkdir()
    with subprocess.Popen(["sleep", "1000"]) as process:
        (folder / "cgroup.procs").write_text(str(process.pid))
        assert sweep(Homes(2, {CPUACCT: tree})) == 1
        assert process.wait() == -signal.SIGKILL
    assert not folder.exists()


def test_a_limit_that_the_kernel_does_not_have_leaves_nothing(tree: Path) -> None:
    if PIDS in (tree / "cgroup.controllers").read_text().split():
        pytest.skip("version 2 has the controller of processes here")
    with pytest.raises(ResourceFailed, match="no such limit"):
        Group.make(Homes(2, {PIDS: tree}), GroupLimits(pids=10))
    assert [path for path in tree.iterdir() if path.is_dir()] == []


def test_a_tree_without_the_controllers_says_so(tmp_path: Path) -> None:
    controllers = (Path(MOUNT.split()[4]) / "cgroup.controllers").read_text().split()
    if {"memory", "pids", "cpu"} & set(controllers):
        pytest.skip("version 2 has controllers here")
    (tmp_path / "mountinfo").write_text(MOUNT + "\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    homes = find_homes(proc=tmp_path)
    assert (homes.version, homes.folders) == (0, {})
    assert "has none of the controllers memory, pids, cpu" in homes.reason


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_a_sandbox_is_held_to_its_processor_time_and_leaves_no_group(tree: Path) -> None:
    """All of it: its processes enter by themselves, as another user where we are root."""
    names = os.listdir(tree)
    backend = SandboxBackend(homes=lambda: Homes(2, {CPUACCT: tree}))
    spec = SandboxSpec(cpu_s=0.3)
    backend.check(spec)
    instance = await backend.start(spec, started=lambda _: None)
    try:
        (group,) = Handle.parse(instance.handle).groups
        assert Path(group).parent == tree
        quick = await instance.value.run("grep ^0:: /proc/self/cgroup")
        assert quick.stdout.decode().strip().endswith(Path(group).name)
        busy = await instance.value.run("while :; do :; done", timeout_s=60)
        assert busy.stopped_by == "cpu"
    finally:
        await instance.close()
        await backend.close()
    assert os.listdir(tree) == names
