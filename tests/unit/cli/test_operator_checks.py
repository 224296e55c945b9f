"""A dry run refuses operators that the run would refuse, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from wingbeat.cli.main import app
from wingbeat.core.config import load_config

pytestmark = pytest.mark.unit

CONFIG = """
[policies.solver]
model = "builtin:calculator"

[dataflow]
operators = [
    {{ use = "length_filter", max_tokens = 64 }},
    {{ use = "{use}" }},
]
"""
MINE = """
from wingbeat.dataflow.operators import Operator, OperatorOptions

class Mine(Operator[OperatorOptions]):
    def observe(self, group):
        pass
"""


@pytest.mark.parametrize("command", ["train", "serve"])
@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("gresso", "unknown operator 'gresso'; did you mean 'greso'?"),
        ("overlong_shaping", "option `max_tokens` is missing"),
        ("mine.py:Yours", "has no class 'Yours'"),
        ("yours.py:Mine", "got no such file"),
    ],
)
def test_operators_are_checked(tmp_path: Path, command: str, use: str, says: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(use=use))
    (tmp_path / "mine.py").write_text(MINE)
    done = CliRunner().invoke(app, [command, str(path), "--dry-run"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: dataflow.operators[1] ({use}): ")
    assert says in done.stderr


def test_operators_beside_the_configuration_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(use="mine.py:Mine"))
    (tmp_path / "mine.py").write_text(MINE)
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    again = tmp_path / "again.toml"
    again.write_text(done.output)
    assert load_config(again) == load_config(path)
