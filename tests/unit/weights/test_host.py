"""Host identity and where tensors pass through memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from wingbeat.weights.host import host_id, run_weights_dir


def test_a_host_keeps_its_id_until_it_boots_again(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    first = host_id(boot_id_path=boot)
    assert first == host_id(boot_id_path=boot)
    assert len(first) == 16
    boot.write_text("two\n")
    assert host_id(boot_id_path=boot) != first


def test_systems_without_boot_id_have_a_stable_id(tmp_path: Path) -> None:
    assert host_id(boot_id_path=tmp_path / "none") == host_id(boot_id_path=tmp_path / "none")


def test_all_processes_of_a_host_agree_and_need_no_torch() -> None:
    code = "import sys; from wingbeat.weights.host import host_id; print(host_id(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [host_id(), "False"]


def test_shared_memory_is_used_if_it_has_room(tmp_path: Path) -> None:
    run = tmp_path / "run"
    temporary = Path(tempfile.gettempdir())
    assert run_weights_dir(run, shared_memory=tmp_path).parent == tmp_path
    assert run_weights_dir(run, min_free_bytes=2**62, shared_memory=tmp_path).parent == temporary
    assert run_weights_dir(run, shared_memory=tmp_path / "none").parent == temporary


def test_a_run_has_one_folder_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    wanted = run_weights_dir(tmp_path / "run")
    assert run_weights_dir(str(tmp_path / "run" / "..") + "/link") == wanted
    assert run_weights_dir(tmp_path / "other") != wanted
    assert not wanted.exists()
