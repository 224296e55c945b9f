"""By which means limits hold: control groups of both versions found in made-up trees, and the signs of a stop."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wingbeat.core.errors import ConfigError
from wingbeat.core.process_facts import boot_id, start_time
from wingbeat.resources import DockerSpec, SandboxSpec, SubprocessSpec, UnsupportedField
from wingbeat.resources.backends.container_spec import check_box
from wingbeat.resources.backends.limits import MIB, Plan, check_place, plan_limits, stopped_by
from wingbeat.resources.backends.limits_cgroups import Counters, Group, GroupLimits, sweep
from wingbeat.resources.backends.limits_homes import Homes, find_homes
from wingbeat.resources.backends.sandbox_process import Handle

NONE = Homes(0, reason="nothing is mounted")


def proc(tmp_path: Path, *, mounts: list[str], groups: list[str]) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "mountinfo").write_text("\n".join(mounts))
    (folder / "cgroup").write_text("\n".join(groups))
    return folder


def mount(at: Path, kind: str, options: str, root: str = "/") -> str:
    return f"30 24 0:26 {root} {at} rw,nosuid shared:4 - {kind} cgroup rw,{options}"


def test_version_1_is_found_below_the_group_that_this_process_is_in(tmp_path: Path) -> None:
    for path in ("memory/outer/own", "pids", "cpu,cpuacct"):
        (tmp_path / path).mkdir(parents=True)
    homes = find_homes(
        proc=proc(
            tmp_path,
            mounts=[
                mount(tmp_path / "memory", "cgroup", "memory"),
                mount(tmp_path / "pids", "cgroup", "pids", root="/docker/abc"),
                mount(tmp_path / "cpu,cpuacct", "cgroup", "cpu,cpuacct"),
                mount(tmp_path / "unified", "cgroup2", "nsdelegate"),
            ],
            groups=["4:memory:/outer/own", "3:pids:/docker/abc", "2:cpu,cpuacct:/", "0::/"],
        )
    )
    assert homes.version == 1
    assert homes.folders == {
        "memory": tmp_path / "memory" / "outer" / "own",
        "pids": tmp_path / "pids",
        "cpu": tmp_path / "cpu,cpuacct",
        "cpuacct": tmp_path / "cpu,cpuacct",
    }
    assert list(tmp_path.glob("*/wingbeat-*")) == []


def v2_tree(tmp_path: Path) -> Path:
    top = tmp_path / "cgroup"
    own = top / "user.slice" / "app.slice" / "run.scope"
    own.mkdir(parents=True)
    for folder in (top, own.parents[1], own.parent, own):
        (folder / "cgroup.controllers").write_text("memory pids")
        (folder / "cgroup.subtree_control").write_text("memory pids" if folder != own else "")
    (own / "cgroup.subtree_control").unlink()  # holds processes: the kernel refuses to divide it
    (own / "cgroup.subtree_control").mkdir()
    return top


def test_version_2_takes_the_nearest_group_that_may_be_divided(tmp_path: Path) -> None:
    top = v2_tree(tmp_path)
    homes = find_homes(
        proc=proc(tmp_path, mounts=[mount(top, "cgroup2", "rw")], groups=["0::/user.slice/app.slice/run.scope"])
    )
    assert homes.version == 2
    place = top / "user.slice" / "app.slice"
    assert homes.folders == {"memory": place, "pids": place, "cpuacct": place}
    assert "cpu" not in homes


def test_nothing_mounted_says_so(tmp_path: Path) -> None:
    homes = find_homes(proc=proc(tmp_path, mounts=[], groups=["0::/"]))
    assert homes.version == 0
    assert "no control groups are mounted" in homes.reason


def test_a_place_that_does_not_exist_says_why(tmp_path: Path) -> None:
    missing = mount(tmp_path / "missing", "cgroup", "memory")
    homes = find_homes(proc=proc(tmp_path, mounts=[missing], groups=["1:memory:/"]))
    assert homes.folders == {}
    assert "no such file" in homes.reason


def test_version_2_limits_are_written(tmp_path: Path) -> None:
    homes = Homes(2, dict.fromkeys(("memory", "pids", "cpu", "cpuacct"), tmp_path))
    limits = GroupLimits(memory_bytes=64 * MIB, pids=10, cpus=1.5, counts_cpu=True)
    # A made-up tree has no files in a new group, so they are made as the kernel would.
    group = Group([tmp_path / "group"], 2)
    group.folders[0].mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (group.folders[0] / name).write_text("max")
    group._limit(limits)
    written = {path.name: path.read_text() for path in group.folders[0].iterdir()}
    assert written == {"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "10", "cpu.max": "150000 100000"}
    assert limits.controllers == ("memory", "pids", "cpu", "cpuacct")
    assert homes.version == 2


def test_counters_of_both_versions(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, files in (
        (one, {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "cpuacct.usage": "1500000000\n"}),
        (two, {"memory.events": "low 0\noom 5\noom_kill 3\n", "cpu.stat": "usage_usec 1500000\nuser_usec 1\n"}),
    ):
        folder.mkdir()
        for name, text in {**files, "pids.events": "max 7\n"}.items():
            (folder / name).write_text(text)
    expected = Counters(memory_kills=3, pids_refused=7, cpu_s=1.5)
    assert Group([one], 1).counters() == expected
    assert Group([two], 2).counters() == expected
    assert Group([tmp_path / "gone"], 2).counters() == Counters()


def test_only_groups_of_dead_owners_are_swept(tmp_path: Path) -> None:
    namespace = os.stat("/proc/self/ns/pid").st_ino
    own = f"{os.getpid()}-{start_time(os.getpid())}"
    names = {
        f"wingbeat-{namespace}-{own}-1": False,
        f"wingbeat-{namespace}-{os.getpid()}-1-1": True,  # the id was taken over by another process
        f"wingbeat-{namespace + 1}-{os.getpid()}-1-1": False,  # of another process namespace
        "wingbeat-something": False,
        "other": False,
    }
    for name in names:
        (tmp_path / name).mkdir()
    assert sweep(Homes(2, {"memory": tmp_path, "pids": tmp_path})) == 1
    assert {path.name for path in tmp_path.iterdir()} == {name for name, goes in names.items() if not goes}


@pytest.mark.parametrize("field", ["cpus", "memory_mb", "cpu_s"])
def test_without_control_groups_limits_of_a_whole_box_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedField, match="nothing is mounted") as caught:
        plan_limits(SandboxSpec.model_validate({field: 1}), NONE, pids=None)
    assert caught.value.field == field


def test_without_control_groups_single_processes_are_limited() -> None:
    spec = SandboxSpec(process_memory_mb=64, pids=10, file_mb=2)
    plan = plan_limits(spec, NONE, pids=10)
    assert plan.group.controllers == ()
    assert plan.numbers == (-1, 2 * MIB, 64 * MIB, 11)


def test_without_control_groups_or_users_of_its_own_a_number_of_processes_is_refused() -> None:
    with pytest.raises(UnsupportedField, match="other processes of this user") as caught:
        plan_limits(
            SubprocessSpec(network=True, pids=10), NONE, pids=10, uncounted="it counts other processes of this user"
        )
    assert caught.value.field == "pids"


def test_a_container_bounds_its_memory_as_a_whole_only() -> None:
    with pytest.raises(UnsupportedField, match="memory_mb holds for all") as caught:
        check_box(DockerSpec(image="x", process_memory_mb=64))
    assert caught.value.field == "process_memory_mb"


def test_control_groups_are_used_where_they_are(tmp_path: Path) -> None:
    homes = Homes(2, dict.fromkeys(("memory", "pids", "cpu", "cpuacct"), tmp_path))
    spec = SandboxSpec(memory_mb=64, process_memory_mb=32, pids=10, cpus=0.5, cpu_s=2)
    plan = plan_limits(spec, homes, pids=10)
    assert plan.group == GroupLimits(memory_bytes=64 * MIB, pids=10, cpus=0.5, counts_cpu=True, holds_together=True)
    assert plan.numbers == (2, -1, 32 * MIB, -1)


@pytest.mark.parametrize(
    ("exit_code", "stderr", "is_full", "after", "limit"),
    [
        (0, b"MemoryError", True, Counters(memory_kills=1), None),
        (1, b"", False, Counters(), None),
        (-9, b"", False, Counters(memory_kills=1), "memory"),
        (1, b"", False, Counters(pids_refused=2), "pids"),
        (-24, b"", False, Counters(), "cpu"),
        (152, b"", False, Counters(), "cpu"),
        (-25, b"", False, Counters(), "file"),
        (1, b"OSError: [Errno 27] File too large", False, Counters(), "file"),
        (1, b"", True, Counters(), "disk"),
        (1, b"dd: No space left on device", False, Counters(), "disk"),
        (1, b"MemoryError", False, Counters(), "memory"),
        (2, b"sh: 1: Cannot fork", False, Counters(), "pids"),
    ],
)
def test_the_limit_is_named(exit_code: int, stderr: bytes, is_full: bool, after: Counters, limit: str | None) -> None:
    plan = Plan(GroupLimits(), memory_bytes=MIB, processes=10, file_bytes=MIB, cpu_s=1)
    found = stopped_by(plan, exit_code=exit_code, stderr=stderr, is_full=is_full, before=Counters(), after=after)
    assert found == limit


def test_what_happened_before_stops_nothing() -> None:
    plan = Plan(GroupLimits())
    same = Counters(memory_kills=1, pids_refused=1)
    assert stopped_by(plan, exit_code=1, stderr=b"", is_full=False, before=same, after=same) is None


@pytest.mark.parametrize("path", ["/", "/usr/x", "/etc", "/proc/1", "/dev/shm", "/tmp", "/a/../etc", "/a/", "/a//b"])
def test_a_working_folder_over_the_system_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="workdir"):
        check_place(SandboxSpec(), path, "workdir")


def test_a_mount_may_add_to_usr_but_hide_nothing_else() -> None:
    check_place(SandboxSpec(), "/usr/local/tools", "mounts")
    check_place(SandboxSpec(), "/work/data", "mounts")
    with pytest.raises(ConfigError, match="mounts"):
        check_place(SandboxSpec(), "/etc/passwd", "mounts")


def test_a_handle_names_one_process_of_one_start_of_the_machine() -> None:
    pid = os.getpid()
    began = start_time(pid)
    assert began is not None
    handle = Handle(pid=pid, began=began, boot=boot_id(), groups=("/a", "/b"), version=2, folder="/c")
    assert Handle.parse(str(handle)) == handle
    assert handle.is_alive
    assert not Handle(pid=pid, began=began - 1, boot=boot_id()).is_alive
    assert not Handle(pid=pid, began=began, boot="another").is_alive
    for text in ("{}", "nonsense", "pid 1 start 1", "pid 1 start 1 {}", 'pid 1 start x {"boot": "b", "groups": []}'):
        with pytest.raises(ValueError):
            Handle.parse(text)
