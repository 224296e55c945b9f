"""Settings of the whole suite: which tests are the unit part, one torch thread, no hypothesis deadline."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
UNIT_FOLDERS = (TESTS / "unit", TESTS / "architecture")
ALONE_FOLDER = TESTS / "integration"
"""Where `make test` looks for them: to collect all others first would take longer than some of them."""

FROZEN_AT = pytest.StashKey[int]()

# Before torch is loaded, and inherited by child processes: two threads on two busy cores are far slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ledgers of what tests start, and of the processes that they start: not those of whoever runs the tests.
if "WINGBEAT_STATE_DIR" not in os.environ:
    os.environ["WINGBEAT_STATE_DIR"] = tempfile.mkdtemp(prefix="wingbeat-tests-")
    atexit.register(shutil.rmtree, os.environ["WINGBEAT_STATE_DIR"], ignore_errors=True)

# On a busy machine a deadline measures the neighbours.
settings.register_profile("wingbeat", deadline=None)
settings.load_profile("wingbeat")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, and keep what was collected from it for good.

    Torch and five thousand tests are a million objects that stay to the end.  Looking through them again and again
    takes half of the collection's time, and much of that of any test that makes cycles.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The same after a module whose tests made so much that the collector looked through everything.

    What is left then, libraries that they were the first to load and fixtures of the session, is there to stay.
    """
    try:
        return (yield)
    finally:
        is_last = nextitem is not None and nextitem.path != item.path
        if is_last and _collections() > item.session.stash.get(FROZEN_AT, 0):
            gc.collect()
            gc.freeze()
            item.session.stash[FROZEN_AT] = _collections()


def _collections() -> int:
    """Of the oldest generation."""
    return gc.get_stats()[-1]["collections"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the unit part, so that ``-m unit`` and ``-m "not unit"`` together are exactly the suite.

    First of all such hooks: ``-m`` itself selects in another one.
    """
    for item in items:
        if item.get_closest_marker("alone") is not None and not item.path.is_relative_to(ALONE_FOLDER):
            raise pytest.UsageError(f"{item.nodeid}: `make test` runs what is marked alone in {ALONE_FOLDER} only")
        if item.get_closest_marker("slow") is None and any(item.path.is_relative_to(f) for f in UNIT_FOLDERS):
            item.add_marker(pytest.mark.unit)
