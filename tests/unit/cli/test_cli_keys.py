"""``wingbeat keys`` on a key file; over HTTP it is tested against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wingbeat.cli.keys import parse_duration
from wingbeat.cli.main import app
from wingbeat.core.errors import RequestError

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    result = RUNNER.invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_key_is_printed_once_and_its_story_beside_it(folder: Path) -> None:
    code, key, told = run("create", "client", "--name", "laptop", "--expires", "30d")
    assert code == 0 and key.startswith("wb-client-") and len(key.split()) == 1
    assert "client key (laptop), valid until 20" in told and "not shown again" in told and key.strip() not in told
    assert told.strip().endswith(" WINGBEAT_KEY:")
    assert run("create", "worker", "--file", "other.json")[2].strip().endswith("WINGBEAT_WORKER_KEY:")
    assert (folder / "runs" / "keys.json").is_file()
    code, listed, _ = run("list", "--json")
    (one,) = json.loads(listed)
    assert (one["role"], one["name"], one["state"]) == ("client", "laptop", "active")
    assert one["expires_s"] - one["created_s"] == pytest.approx(30 * 86400)
    assert one["id"] in run("list")[1]
    code, said, _ = run("revoke", one["id"])
    assert code == 0 and said.startswith(f"revoked {one['id']}: client key (laptop)")
    assert json.loads(run("list", "--json")[1])[0]["state"] == "revoked"


def test_the_file_is_the_options_or_the_configurations(folder: Path) -> None:
    run("create", "admin", "--file", "mine/k.json")
    assert (folder / "mine" / "k.json").is_file()
    (folder / "project").mkdir()
    config = folder / "project" / "config.toml"
    config.write_text('[policies.solver]\nmodel = "m"\n[server]\nkeys_file = "secret/keys.json"\n')
    run("create", "admin", "--config", str(config))
    assert (folder / "project" / "secret" / "keys.json").is_file(), "relative to the configuration"
    (folder / "config.toml").write_text('[policies.solver]\nmodel = "m"\n[run]\ndir = "there"\n')
    run("create", "admin")
    assert (folder / "there" / "keys.json").is_file(), "run.dir starts at the working directory"
    (folder / "config.toml").write_text('[resources]\nport = 9999\n[run]\ndir = "lent"\n')
    run("create", "client")
    assert (folder / "lent" / "keys.json").is_file(), "the file of a resources server alone"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("create", "client", "--expires", "soon"), "such as 45m, 12h, 30d or 8w"),
        (("create", "client", "--train"), "are of collect keys"),
        (("create", "collect", "--train", "--no-record"), "cannot train"),
        (("create", "client", "--name", "a" * 65, "--server", "http://127.0.0.1:9"), "`name`: "),
        (("create", "client", "--name", "a" * 65), "`name`: "),
        (("revoke", "key-000000000000"), "no key 'key-000000000000'"),
        (("revoke", "../x", "--server", "http://127.0.0.1:9"), "expected the id of a key"),
        (("list", "--config", "none.toml"), "no configuration file"),
    ],
)
def test_faults_end_with_one_line(arguments: tuple[str, ...], told: str) -> None:
    code, out, error = run(*arguments)
    assert code != 0 and out == "" and told in error and len(error.strip().splitlines()) == 1


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90s", "1.5m", "2h", "30d", "8w")] == [90, 90, 7200, 2592000, 4838400]
    for text in ("", "3", "0d", "-1d", "1y", "1 d", "1e9d", "9999999999d"):
        with pytest.raises(RequestError):
            parse_duration(text)


def test_the_list_fits_a_narrow_terminal(folder: Path) -> None:
    run("create", "collect", "--name", "a shop with a name", "--train", "--policy", "solver", "--expires", "30d")
    run("create", "collect", "--no-record")
    shown = run("list")[1]
    words = " ".join("".join(char if char.isprintable() and char not in "│┃" else " " for char in shown).split())
    assert max(map(len, shown.splitlines())) <= 80 and not any(line.endswith("…") for line in shown.splitlines())
    assert "collect:" in words and "train," in words and "record" in words and shown.splitlines()[0].endswith("┓")
