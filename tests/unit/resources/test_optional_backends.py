"""Kinds whose library is not installed say which extra brings it."""

from __future__ import annotations

import sys

import pytest

from wingbeat.core.errors import DependencyMissing
from wingbeat.resources.backends import default_backends


@pytest.mark.parametrize("kind", ["docker", "kubernetes", "ray"])
def test_a_missing_library_is_told_with_its_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"wingbeat.resources.backends.{kind}")]:
        monkeypatch.delitem(sys.modules, name)  # with its parts, which another test may have loaded
    monkeypatch.setitem(sys.modules, kind, None)  # what python makes of a module that is not there
    with pytest.raises(DependencyMissing, match=rf"wingbeat\[{kind}\]"):
        default_backends()[kind]
