"""Built-in models are built once: later runs take them from the cache, whole or not at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import wingbeat
from wingbeat.core.errors import ConfigError, SetupError
from wingbeat.deploy import builtin_models
from wingbeat.deploy.builtin_models import CHECKSUMS, keep, model_digest, place_builtin, take

FILES = {"config.json": "{}", "model.safetensors": "weights"}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What a builder writes."""
    folder = tmp_path / "made"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_is_kept_is_taken_as_it_was_made(made: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "game-1"
    assert not take(kept, tmp_path / "early")
    keep(made, kept)
    keep(made, kept)  # by a run that was slower
    assert take(kept, tmp_path / "run")
    assert held(tmp_path / "run") == FILES
    assert [path.name for path in kept.parent.iterdir()] == ["game-1"], "nothing is left of the writing"


@pytest.mark.parametrize("name", ["model.safetensors", CHECKSUMS])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_model_is_told_and_removed(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    kept = tmp_path / "cache" / "game-1"
    keep(made, kept)
    if damage == "cut":
        (kept / name).write_text("w")
    else:
        (kept / name).unlink()
    assert not take(kept, tmp_path / "run")
    assert not kept.exists() and not (tmp_path / "run").exists()
    assert "is damaged and built again" in caplog.text


def test_a_run_that_cannot_be_written_leaves_what_is_kept(made: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "game-1"
    keep(made, kept)
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"cannot write a model into .*file"):
        take(kept, tmp_path / "file" / "run")
    assert take(kept, tmp_path / "run")


def test_a_cache_that_cannot_be_written_costs_time_only(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    keep(made, tmp_path / "file" / "game-1")
    assert "is not kept for later runs" in caplog.text and "WINGBEAT_CACHE" in caplog.text


def test_the_models_used_last_stay(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_models, "KEPT", 2)
    cache = tmp_path / "cache"
    for number in range(2):
        keep(made, cache / f"game-{number}")
        os.utime(cache / f"game-{number}", (number, number))
    assert take(cache / "game-0", tmp_path / "run")
    keep(made, cache / "game-2")
    assert sorted(path.name for path in cache.iterdir()) == ["game-0", "game-2"]


def test_a_digest_is_of_name_and_seed() -> None:
    digests = {model_digest(name, seed=seed) for name in ("game", "retrieval") for seed in (0, 1)}
    assert len(digests) == 4 and model_digest("game", seed=0) in digests


def test_a_digest_is_of_what_the_builders_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every file: the programs of code-repair are text."""
    for name in ("environments/a.py", "environments/programs/b.txt", "tools/c.py", "tools/__pycache__/c.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(wingbeat, "__file__", str(tmp_path / "__init__.py"))
    digests = [model_digest("game", seed=0)]
    for name in ("environments/programs/b.txt", "tools/c.py", "tools/__pycache__/c.pyc"):
        (tmp_path / name).write_text("other")
        digests.append(model_digest("game", seed=0))
    assert len(set(digests)) == 3 and digests[2] == digests[3]


async def test_a_run_gets_a_copy_of_its_own(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WINGBEAT_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "cache" / "builtin" / f"game-{model_digest('game', seed=3)[:16]}"
    keep(made, kept)
    notes: list[str] = []
    folder = tmp_path / "run" / "models" / "game"
    for _ in range(2):  # the second time it is there
        assert await place_builtin("game", seed=3, folder=folder, on_note=notes.append) == folder
    (kept / "config.json").write_text("other")
    assert held(folder) == FILES
    assert [path.name for path in folder.parent.iterdir()] == ["game"]
    assert notes == [f"the built-in model game was built before: taken from {kept}"]
    with pytest.raises(ConfigError, match="unknown built-in model 'chess'"), caplog.at_level(logging.ERROR):
        await place_builtin("chess", seed=3, folder=tmp_path / "chess", on_note=notes.append)
