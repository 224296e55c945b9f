"""Paths that try to leave a box's folder: the code that opens them, on this side of any sandbox."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from wingbeat.resources.backends import sandbox_files


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def root(work: Path) -> Iterator[int]:
    fd = os.open(work, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def read(root: int, work: Path, path: str, max_bytes: int = 1000) -> bytes:
    return sandbox_files.read_file(root, path, at=str(work), max_bytes=max_bytes)


def write(root: int, work: Path, path: str, data: bytes) -> None:
    sandbox_files.write_file(root, path, data, at=str(work))


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc/passwd", "a\0b", "a/b/../../../secret"])
def test_a_path_that_leaves_is_refused(root: int, work: Path, path: str) -> None:
    (work / "a" / "b").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"folder|zero byte"):
        read(root, work, path)
    with pytest.raises(ValueError, match=r"folder|zero byte"):
        write(root, work, path, b"x")
    assert (work.parent / "secret").read_text() == "secret"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "a/../../secret", "{work}/../secret"])
def test_a_link_that_leaves_is_refused(root: int, work: Path, target: str) -> None:
    (work / "a").mkdir()
    (work / "link").symlink_to(target.format(work=work))
    (work / "up").symlink_to("..")
    with pytest.raises(ValueError, match="folder"):
        read(root, work, "link")
    with pytest.raises(ValueError, match="folder"):
        write(root, work, "link", b"x")
    with pytest.raises(ValueError, match="folder"):
        read(root, work, "up/secret")
    with pytest.raises(ValueError, match="folder"):
        sandbox_files.list_folder(root, "up", at=str(work))
    assert (work.parent / "secret").read_text() == "secret"


def test_links_inside_are_followed(root: int, work: Path) -> None:
    write(root, work, "real/file", b"one")
    (work / "folder").symlink_to("real")
    (work / "absolute").symlink_to(work / "real" / "file")
    (work / "real" / "back").symlink_to("../folder/file")
    assert read(root, work, "folder/file") == b"one"
    assert read(root, work, "absolute") == b"one"
    assert read(root, work, "real/back") == b"one"
    write(root, work, "real/back", b"two")
    assert (work / "real" / "file").read_bytes() == b"two"
    assert (work / "real" / "back").is_symlink()
    assert read(root, work, f"{work}/folder/../real/file") == b"two"


def test_a_circle_of_links_ends(root: int, work: Path) -> None:
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        read(root, work, "a")
    with pytest.raises(OSError, match="symbolic links"):
        write(root, work, "a", b"x")


def test_only_regular_files_are_read_and_nothing_waits(root: int, work: Path) -> None:
    os.mkfifo(work / "pipe")
    (work / "folder").mkdir()
    with pytest.raises(ValueError, match="no regular file"):
        read(root, work, "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        write(root, work, "pipe", b"x")
    for action in (lambda: read(root, work, "folder"), lambda: write(root, work, "folder", b"x")):
        with pytest.raises(IsADirectoryError):
            action()
    with pytest.raises(FileNotFoundError):
        read(root, work, "none")
    with pytest.raises(NotADirectoryError):
        read(root, work, "pipe/x")


def test_more_than_asked_for_is_not_read(root: int, work: Path) -> None:
    write(root, work, "file", b"12345")
    assert read(root, work, "file", 5) == b"12345"
    with pytest.raises(ValueError, match="expected at most 4"):
        read(root, work, "file", 4)


def test_replacing_keeps_the_mode_and_cuts_hard_links(root: int, work: Path) -> None:
    write(root, work, "tool", b"old")
    (work / "tool").chmod(0o755)
    os.link(work / "tool", work / "other")
    write(root, work, "tool", b"new")
    assert (work / "tool").stat().st_mode & 0o777 == 0o755
    assert (work / "other").read_bytes() == b"old"
    assert sorted(path.name for path in work.iterdir()) == ["other", "tool"]


def test_folders_are_listed_sorted_with_a_slash(root: int, work: Path) -> None:
    write(root, work, "b/x", b"")
    write(root, work, "a", b"")
    (work / "c").symlink_to("b")
    assert sandbox_files.list_folder(root, ".", at=str(work)) == ["a", "b/", "c"]
    assert sandbox_files.list_folder(root, "c", at=str(work)) == ["x"]
    with pytest.raises(NotADirectoryError):
        sandbox_files.list_folder(root, "a", at=str(work))


def test_a_folder_that_turns_into_a_link_meanwhile_leads_nowhere(root: int, work: Path) -> None:
    """The classical race: checked as a folder, opened as a link."""
    (work / "real").mkdir()
    (work / "real" / "secret").write_text("inside")
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            (work / "name").symlink_to("..")
            (work / "name").unlink()
            os.rename(work / "real", work / "name")
            os.rename(work / "name", work / "real")

    flipping = threading.Thread(target=flip)
    flipping.start()
    seen: set[str] = set()
    try:
        for _ in range(300):
            try:
                seen.add(read(root, work, "name/secret").decode())
            except (OSError, ValueError) as error:
                seen.add("ValueError" if isinstance(error, ValueError) else type(error).__name__)
    finally:
        stop.set()
        flipping.join()
    assert seen <= {"inside", "ValueError", "FileNotFoundError", "NotADirectoryError", "OSError"}


def test_wiping_takes_what_was_made_hard_to_remove(work: Path) -> None:
    deep = work
    for _ in range(30):
        deep = deep / "d"
        deep.mkdir()
    (work / "link").symlink_to(work.parent)
    os.mkfifo(work / "pipe")
    (work / "d").chmod(0o000)
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sandbox_files.wipe(fd)
    finally:
        os.close(fd)
    assert list(work.iterdir()) == []
    assert (work.parent / "secret").exists()


@pytest.mark.slow
def test_wiping_gives_up_on_what_is_too_deep(work: Path) -> None:
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    here = os.dup(fd)
    for _ in range(sandbox_files.MAX_DEPTH + 2):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with pytest.raises(OSError, match="deep"):
        sandbox_files.wipe(fd)
    os.close(fd)
