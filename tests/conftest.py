"""Settings of the whole suite: which tests are the unit part, one torch thread, no hypothesis deadline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
UNIT_FOLDERS = (TESTS / "unit", TESTS / "architecture")

# Before torch is loaded, and inherited by child processes: two threads on two busy cores are far slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a busy machine a deadline measures the neighbours.
settings.register_profile("wingbeat", deadline=None)
settings.load_profile("wingbeat")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the unit part, so that ``-m unit`` and ``-m "not unit"`` together are exactly the suite.

    First of all such hooks: ``-m`` itself selects in another one.
    """
    for item in items:
        if item.get_closest_marker("slow") is None and any(item.path.is_relative_to(f) for f in UNIT_FOLDERS):
            item.add_marker(pytest.mark.unit)
