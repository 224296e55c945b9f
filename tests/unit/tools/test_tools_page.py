"""The examples of docs/howto/tools.md run as they stand there, one after another."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "tools.md"


@pytest.mark.slow
def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    module = ModuleType("tools_page")
    monkeypatch.setitem(sys.modules, "tools_page", module)
    blocks = re.findall(r"^```python\n(.*?)^```$", _text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    for number, block in enumerate(blocks):
        exec(compile(block, f"tools.md block {number}", "exec"), vars(module))


def _text() -> str:
    return PAGE.read_text(encoding="utf-8")
