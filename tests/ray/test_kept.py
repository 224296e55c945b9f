"""What the driver makes of an actor that lives, dies or never was, with Ray's calls scripted: no cluster is started."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, OutOfMemoryError, RayError

from wingbeat.core import deaths
from wingbeat.core.config import Config
from wingbeat.core.deaths import MAX_DEATHS
from wingbeat.core.errors import SetupError
from wingbeat.deploy.children import ChildSpec, ChildState
from wingbeat.deploy.devices import Needs
from wingbeat.deploy.processes import Kept
from wingbeat.deploy.ray import kept as kept_module
from wingbeat.deploy.ray.cluster import Node, check_host, check_lending, check_own, room_words
from wingbeat.deploy.ray.keeper import Order, Report, log_file
from wingbeat.deploy.ray.kept import RayKept
from wingbeat.deploy.ray.place import RayPlace

State = ChildState
HERE = Node("here", "10.0.0.1", {"CPU": 4.0, "GPU": 1.0})
RUNNING = Report(State.RUNNING, "", 7, node=HERE.id, address=HERE.address)


class Died(ActorDiedError):
    """As Ray tells it; ``init_failed``: a fault of our own code, with its trace."""

    def __init__(self, words: str, *, init_failed: bool = False) -> None:
        super().__init__()
        self._words = words
        self._actor_init_failed = init_failed

    def __str__(self) -> str:
        return self._words


class Script:
    """A cluster in which each report is the next of ``reports``, the last one again and again."""

    def __init__(self, *reports: Report | Exception) -> None:
        self.reports = list(reports)
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.options: list[dict[str, Any]] = []
        self.orders: list[Order] = []
        self.told_to_stop = 0
        self.stop_fault: Exception | None = None
        self.given_back: list[Script] = []
        self.killed = 0
        self.report, self.stop = (self._method(one) for one in (self._report, self._stop))

    def _method(self, call: Callable[[], Any]) -> Any:
        return type("Method", (), {"remote": staticmethod(call)})

    def placement_group(self, bundles: Any, **how: Any) -> Script:
        return self

    def ready(self) -> Any:
        return self.has_room.wait()

    def remote(self, *orders: Order) -> Script:
        self.orders += orders
        return self

    def with_options(self, **options: Any) -> Script:
        self.options.append(options)
        return self

    async def _report(self) -> Report:
        one = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        if isinstance(one, Exception):
            raise one
        return one

    def kill(self, actor: Script) -> None:
        self.killed += 1

    async def _stop(self) -> None:
        self.told_to_stop += 1
        if self.stop_fault is not None:
            raise self.stop_fault


@pytest.fixture
def states() -> list[ChildState]:
    return []


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch, states: list[ChildState]) -> Callable[..., RayKept]:
    def make(script: Script, **more: Any) -> RayKept:
        monkeypatch.setattr(kept_module, "POLL_S", 0.0)
        monkeypatch.setattr(deaths, "BACKOFF_S", (0.0,) * MAX_DEATHS)
        monkeypatch.setattr(kept_module, "placement_group", script.placement_group)
        monkeypatch.setattr(kept_module, "remove_placement_group", script.given_back.append)
        monkeypatch.setattr(kept_module, "live_nodes", lambda: [HERE])
        actor_class = type("ActorClass", (), {"options": staticmethod(script.with_options)})
        monkeypatch.setattr(ray, "remote", lambda kind: actor_class)
        monkeypatch.setattr(ray, "kill", script.kill)
        spec = ChildSpec("engine-0", ["python"], {"WINGBEAT_KEY": "secret"}, Path("log"))
        bundle = more.pop("bundle", {"CPU": 1.0})
        return RayKept(spec, bundle, on_change=lambda kept: states.append(kept.state), **more)

    return make


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a state has no event
            await asyncio.sleep(0)


async def test_every_state_may_follow_every_other_between_two_looks(
    keep: Callable[..., RayKept], states: list[ChildState]
) -> None:
    """A process that died and is being started again is seen as starting, right after running."""
    fresh = Report(State.STARTING, "", None)
    kept = keep(
        Script(RUNNING, fresh, RUNNING, Report(State.BACKOFF, "", None), fresh, Report(State.STOPPED, "", None))
    )
    await kept.run()
    assert states == [
        *(State.RUNNING, State.BACKOFF, State.STARTING, State.RUNNING, State.BACKOFF, State.STARTING, State.STOPPED),
    ]


async def test_a_node_that_does_not_answer_is_waited_for_and_a_slow_start_is_no_loss(
    keep: Callable[..., RayKept], states: list[ChildState], caplog: pytest.LogCaptureFixture
) -> None:
    away = ActorUnavailableError("away", None)
    script = Script(TimeoutError(), RUNNING, away, away, RUNNING, Report(State.STOPPED, "", None))
    await keep(script).run()
    assert states == [State.RUNNING, State.BACKOFF, State.STARTING, State.RUNNING, State.STOPPED]
    assert len(script.options) == 1 and len(script.given_back) == 1
    assert caplog.text.count("engine-0 is lost") == 1


async def test_an_actor_that_cannot_be_is_given_up_in_its_own_words(keep: Callable[..., RayKept]) -> None:
    """As on nodes without wingbeat: the class cannot be imported there, ever."""
    script = Script(Died("Traceback\n" + "x" * 5000 + "\nNo module named 'wingbeat'", init_failed=True))
    kept = keep(script)
    await kept.run()
    assert kept.state is State.FAILED and kept.error.endswith("No module named 'wingbeat'") and len(kept.error) < 1000
    assert len(script.options) == len(script.given_back) == script.killed == MAX_DEATHS, "each time maybe elsewhere"


async def test_a_keeper_that_the_memory_monitor_kills_again_and_again_is_given_up_with_the_end_of_its_log(
    keep: Callable[..., RayKept], states: list[ChildState], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("loading 70 GB\n")
    alive = Report(State.RUNNING, "", 7, node=HERE.id, address=HERE.address, log=log)
    killed = Died("low on memory " + "and so on " * 500)
    script = Script(*[alive, killed] * MAX_DEATHS)
    kept = keep(script)
    await kept.run()
    assert [one["max_restarts"] for one in script.options] == [0] * MAX_DEATHS, "Ray would never end"
    assert states.count(State.BACKOFF) == MAX_DEATHS and states[-1] is State.FAILED
    assert f"its keeper died {MAX_DEATHS} times within 120 s, at last so: low on memory" in kept.error
    assert kept.error.endswith("the end of its log: loading 70 GB") and len(kept.error) < 1000
    assert len(script.given_back) == 1, "nobody took its room meanwhile"
    assert caplog.text.count("engine-0 is lost") == MAX_DEATHS


async def test_a_log_of_another_machine_is_named(keep: Callable[..., RayKept]) -> None:
    there = Report(State.RUNNING, "", 7, node="there", address="10.0.0.2", log=Path("/tmp/none/engine-0.log"))
    kept = keep(Script(*[there, Died("killed")] * MAX_DEATHS))
    await kept.run()
    assert kept.error.endswith("its log: /tmp/none/engine-0.log on 10.0.0.2")


async def test_a_keeper_that_never_answers_again_is_replaced(
    keep: Callable[..., RayKept], states: list[ChildState]
) -> None:
    """Frozen: its node lives, so Ray does nothing about it."""
    seconds = itertools.count(0.0, kept_module.SILENT_S / 2)
    away = ActorUnavailableError("away", None)
    script = Script(RUNNING, *[away] * 3, RUNNING, Report(State.STOPPED, "", None))
    await keep(script, clock=lambda: next(seconds)).run()
    assert len(script.options) == 2 and script.killed == 2
    assert states == [State.RUNNING, State.BACKOFF, State.STARTING, State.RUNNING, State.STOPPED]


@pytest.mark.parametrize(
    ("fault", "num_rooms"),
    [(ActorUnschedulableError("its group is gone"), 2), (OutOfMemoryError("the node was low on memory"), 1)],
)
async def test_what_befalls_its_keeper_does_not_end_it(
    keep: Callable[..., RayKept], fault: RayError, num_rooms: int
) -> None:
    script = Script(RUNNING, fault, RUNNING, Report(State.STOPPED, "", None))
    kept = keep(script)
    await kept.run()
    assert kept.state is State.STOPPED
    assert (len(script.options), len(script.given_back)) == (2, num_rooms)


async def test_what_died_on_its_node_is_told(keep: Callable[..., RayKept], caplog: pytest.LogCaptureFixture) -> None:
    again = Report(State.RUNNING, "", 8, restarts=1, node=HERE.id, address=HERE.address, log=Path("/x/engine-0.log"))
    await keep(Script(RUNNING, again, Report(State.STOPPED, "", None, restarts=1))).run()
    assert caplog.messages == ["engine-0 ended and was started again; its log: /x/engine-0.log on 10.0.0.1"]


async def test_an_actor_that_somebody_killed_is_replaced(
    keep: Callable[..., RayKept], states: list[ChildState]
) -> None:
    script = Script(RUNNING, Died("killed"), RUNNING, Report(State.STOPPED, "", None))
    await keep(script).run()
    assert len(script.options) == 2 and states[-1] is State.STOPPED


async def test_control_is_replaced_by_us_after_its_grace_or_stopped_within(keep: Callable[..., RayKept]) -> None:
    script = Script(RUNNING, Died("killed"))
    kept = keep(script, grace_s=600.0)
    running = asyncio.create_task(kept.run())
    await until(lambda: kept.state is State.BACKOFF)
    await kept.stop()
    await running
    assert len(script.options) == 1
    assert kept.state is State.STOPPED


async def test_the_grace_is_for_a_node_that_lives(keep: Callable[..., RayKept]) -> None:
    there = Report(State.RUNNING, "", 7, node="another one, which died")
    await asyncio.wait_for(
        keep(Script(there, Died("its node died"), Report(State.STOPPED, "", None)), grace_s=600.0).run(), 10
    )


async def test_another_fault_of_the_cluster_is_this_process_s_failure_only(keep: Callable[..., RayKept]) -> None:
    kept = keep(Script(RUNNING, RayError("the head is gone")))
    await kept.run()
    assert "6 times within 120 s" in kept.error
    assert kept.state is State.FAILED and "the head is gone" in kept.error


async def test_stopping_while_it_waits_for_room_gives_its_place_in_the_queue_back(keep: Callable[..., RayKept]) -> None:
    script = Script(RUNNING)
    script.has_room.clear()
    kept = keep(script)
    running = asyncio.create_task(kept.run())
    await asyncio.sleep(0.01)
    await kept.stop()
    assert script.given_back == [script] and not script.options
    await running
    assert kept.state is State.STOPPED


@pytest.mark.parametrize("fault", [None, ActorUnavailableError("away", None), Died("killed")])
async def test_stopping_ends_even_if_nobody_hears_it(keep: Callable[..., RayKept], fault: Exception | None) -> None:
    """The actor goes on to report that all is well: it was away for the one moment in which it was told."""
    script = Script(RUNNING)
    script.stop_fault = fault
    kept = keep(script)
    running = asyncio.create_task(kept.run())
    await until(lambda: kept.state is State.RUNNING)
    await asyncio.wait_for(kept.stop(), 10)
    await running
    assert kept.state is State.STOPPED and kept.pid is None
    assert script.told_to_stop == 1 and script.given_back == [script]


async def test_room_that_comes_with_the_stop_is_not_used(keep: Callable[..., RayKept]) -> None:
    script = Script(RUNNING)
    script.has_room.clear()
    kept = keep(script)
    running = asyncio.create_task(kept.run())
    await asyncio.sleep(0.01)
    script.has_room.set()
    stopping = asyncio.create_task(kept.stop())
    await asyncio.wait_for(asyncio.gather(running, stopping), 10)
    assert not script.options and script.given_back == [script]


async def test_a_cancelled_run_leaves_nothing_and_stopping_it_returns(keep: Callable[..., RayKept]) -> None:
    script = Script(RUNNING)
    kept = keep(script)
    running = asyncio.create_task(kept.run())
    await until(lambda: kept.state is State.RUNNING)
    running.cancel()
    await asyncio.wait_for(kept.stop(), 10)
    assert script.given_back == [script]


def test_keys_of_an_order_are_not_shown() -> None:
    order = Order("engine-0", ["-m", "x"], {"WINGBEAT_KEY": "secret"}, Path("log"))
    assert "secret" not in repr(order)


def test_a_log_that_cannot_be_written_where_the_run_is_goes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    here = tmp_path / "engine-0.log"
    assert log_file(here) == here
    elsewhere = [log_file(tmp_path / "no" / "such" / "engine-0.log") for _ in range(2)]
    assert not (tmp_path / "no").exists(), "the run directory is another node's"
    assert elsewhere[0] != elsewhere[1] and all(path.name == "engine-0.log" for path in elsewhere)
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in elsewhere)
    for path in elsewhere:
        path.parent.rmdir()


@pytest.mark.parametrize(
    ("has_devices", "insists", "gpus"), [(True, False, 2.0), (False, True, 2.0), (False, False, None)]
)
def test_gpus_are_asked_for_where_there_are_any_or_where_they_are_named(
    has_devices: bool, insists: bool, gpus: float | None
) -> None:
    on_ray = object.__new__(RayPlace)
    on_ray._has_devices = has_devices  # pyright: ignore[reportPrivateUsage] - the constructor asks a cluster
    spec = ChildSpec("engine-0", ["python"], {}, Path("log"))
    kept: Kept = on_ray.worker(spec, Needs(3, 2, ranks=2, insists=insists), on_change=lambda kept: None)
    assert isinstance(kept, RayKept)
    assert kept._bundle.get("GPU") == gpus and kept._bundle["CPU"] == 6  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("bundle", "seen"), [({"CPU": 1.0}, ""), ({"CPU": 1.0, "GPU": 1.0}, None)])
async def test_devices_that_it_did_not_ask_for_are_hidden(
    keep: Callable[..., RayKept], bundle: dict[str, float], seen: str | None
) -> None:
    script = Script(Report(State.STOPPED, "", None))
    await keep(script, bundle=bundle).run()
    assert script.orders[0].environment.get("CUDA_VISIBLE_DEVICES") == seen


def test_what_waits_for_room_says_what_it_asks_for_and_what_there_is() -> None:
    small = Node("small", "10.0.0.2", {"CPU": 2.0})
    words = room_words({"CPU": 4.0, "GPU": 1.0}, [HERE, small], {"CPU": 3.0, "memory": 1e9})
    assert words == (
        "a node with 4 CPU and 1 GPU free; 10.0.0.1 has 4 CPU and 1 GPU, 10.0.0.2 has 2 CPU;"
        " free on all together: 3 CPU"
    )
    assert "none is large enough even when it is empty" in room_words({"CPU": 4.0, "GPU": 2.0}, [HERE, small], {})
    assert "2 more; free" in room_words({"CPU": 1.0}, [small] * 10, {})


def test_a_node_without_room_for_control_is_refused() -> None:
    with pytest.raises(SetupError, match=r"control needs 1 CPU of this node, 10\.0\.0\.3, which has 0 CPU"):
        check_own(Node("head", "10.0.0.3", {"memory": 1e9}), {"CPU": 1.0})
    check_own(HERE, {"CPU": 1.0})


@pytest.mark.parametrize(
    ("host", "count", "is_refused"),
    [("127.0.0.1", 1, True), ("10.0.0.1", 1, True), ("0.0.0.0", 1, False), ("127.0.0.1", 0, False)],
)
def test_resources_servers_of_other_nodes_must_be_able_to_listen(host: str, count: int, is_refused: bool) -> None:
    policies = {"solver": {"model": "m"}}
    config = Config.model_validate({"policies": policies, "resources": {"host": host, "count": count}})
    check_lending(config, addresses={"10.0.0.1"})
    if not is_refused:
        check_lending(config, addresses={"10.0.0.1", "10.0.0.2"})
        return
    with pytest.raises(SetupError, match=r"resources\.host is .*: set it to 0\.0\.0\.0"):
        check_lending(config, addresses={"10.0.0.1", "10.0.0.2"})


@pytest.mark.parametrize(
    ("host", "others", "is_refused"),
    [
        ("0.0.0.0", (), True),
        ("::", ("10.0.0.2",), True),
        ("127.0.0.1", ("10.0.0.2",), True),
        ("127.0.0.1", (), False),
        ("10.0.0.1", ("10.0.0.2",), False),
    ],
)
def test_a_host_by_which_other_nodes_cannot_call_is_refused(
    host: str, others: tuple[str, ...], is_refused: bool
) -> None:
    addresses = {"10.0.0.1", *others}
    if not is_refused:
        check_host(host, own="10.0.0.1", addresses=addresses)
        return
    with pytest.raises(SetupError, match=r"set it to this node's address, 10\.0\.0\.1"):
        check_host(host, own="10.0.0.1", addresses=addresses)
