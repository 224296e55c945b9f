"""``wingbeat resources``: what is wrong is said before anything is lent."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from wingbeat.cli.main import app

LENT = "--resources.kinds=['subprocess']"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of this folder, no variable, no signal handler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("JUDGE_KEY", "WINGBEAT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--advertise", "tools.example:8322"], "--advertise: expected http://HOST:PORT"),
        (["a.toml", "b.toml"], "expected one configuration file, got a.toml, b.toml"),
        (["--host", "0.0.0.0", LENT], "resources.host = '0.0.0.0'"),
        (["--resources.kinds=['fridge']"], "resources.kinds"),
        (["--resources.leases_per_client=9999"], "total_leases"),
        (
            [LENT, "--resources.urls=['https://h/v1']", "--resources.key_variables={JUDGE_KEY = ['https://h/v1']}"],
            "resources.key_variables: expected a key in the environment variable JUDGE_KEY, found nothing",
        ),
        (["--resources.key_variables={JUDGE_KEY = ['https://h/v1']}"], "JUDGE_KEY is for https://h/v1, which is none"),
    ],
)
def test_what_is_wrong_is_said_before_it_serves(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["resources", "--port", "0", *arguments])
    assert (done.exit_code, words in " ".join(done.output.split())) == (2, True), done.output
