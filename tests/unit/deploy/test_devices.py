from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from wingbeat.deploy.devices import VARIABLE, assign_devices, visible_devices


def test_the_variable_says_what_is_visible_and_else_the_device_files(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_devices({}, folder=tmp_path) == ("2", "10")
    assert visible_devices({VARIABLE: "GPU-1f, GPU-2e"}, folder=tmp_path) == ("GPU-1f", "GPU-2e")
    assert visible_devices({VARIABLE: ""}, folder=tmp_path) == ()
    assert visible_devices({VARIABLE: "-1"}, folder=tmp_path) == ()


def test_workers_get_devices_of_their_own_and_share_the_least_used_ones_when_there_are_too_few() -> None:
    assert assign_devices({"trainer": 2, "engine-0": 1, "engine-1": 1}, ["a", "b", "c", "d"]) == {
        "trainer": ("a", "b"),
        "engine-0": ("c",),
        "engine-1": ("d",),
    }
    assert assign_devices({"trainer": 1, "engine-0": 1, "engine-1": 1}, ["a", "b"])["engine-1"] == ("a",)
    assert assign_devices({"trainer": 3, "on-the-cpu": 0}, ["a"]) == {"trainer": ("a",), "on-the-cpu": ()}


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 4), max_size=6),
    st.lists(st.integers(0, 99).map(str), unique=True, max_size=8),
)
def test_each_gets_what_it_wants_as_far_as_there_is_and_use_is_even(wanted: dict[str, int], devices: list[str]) -> None:
    assigned = assign_devices(wanted, devices)
    users = dict.fromkeys(devices, 0)
    for worker, count in wanted.items():
        assert len(set(assigned[worker])) == len(assigned[worker]) == min(count, len(devices))
        for device in assigned[worker]:
            users[device] += 1
    assert not users or max(users.values()) - min(users.values()) <= 1
