"""Files of a box, opened step by step from its folder, so that nothing can be swapped on the way.

Part of the program inside a box (``sandbox_init``): nothing but the standard library, and as little of it as will do.
"""

from __future__ import annotations

import errno
import os
import stat

MAX_LINKS = 40
MAX_NAMES_BYTES = 8_000_000
"""Of one folder's names in a reply: a box must not fill its owner's memory."""
MAX_DEPTH = 400
"""Folders within folders that a reset takes apart."""


class Refused(ValueError):
    """The caller's fault: a path that leaves the folder, or is nothing that can be read."""


def open_beneath(root: int, path: str, flags: int, *, at: str, make_folders: bool = False) -> int:
    """Open what ``path`` names below the folder ``root``, whose own path is ``at``; symbolic links may lead inside.

    ``make_folders`` makes every missing name on it, the last one too.
    Raises Refused if it leaves the folder, else OSError as ``open`` does.
    """
    held = [os.dup(root)]
    todo = _steps(path, at)
    links = 0
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if len(held) == 1:
                    raise Refused(f"{path!r} leaves the working folder {at}")
                os.close(held.pop())
                continue
            try:
                step = flags | os.O_NOFOLLOW if not todo else os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
                held.append(os.open(name, step, 0o644, dir_fd=held[-1]))
            except OSError as error:
                if error.errno == errno.ENOENT and make_folders:
                    os.mkdir(name, 0o755, dir_fd=held[-1])
                    todo.append(name)
                    continue
                target = _target(name, held[-1]) if error.errno in (errno.ELOOP, errno.ENOTDIR) else None
                if target is None:
                    raise
                links += 1
                if links > MAX_LINKS:
                    raise
                if target.startswith("/"):
                    while len(held) > 1:
                        os.close(held.pop())
                todo.extend(_steps(target, at))
        if len(held) > 1:
            return held.pop()
        return os.open(".", flags, dir_fd=held[-1])
    finally:
        for fd in held:
            os.close(fd)


def _steps(path: str, at: str) -> list[str]:
    """The names on a path, last first."""
    if "\0" in path:
        raise Refused("a path cannot hold a zero byte")
    if path.startswith("/"):
        if path != at and not path.startswith(at.rstrip("/") + "/"):
            raise Refused(f"{path!r} is outside the working folder {at}")
        path = path[len(at) :]
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _target(name: str, folder: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def read_file(root: int, path: str, *, at: str, max_bytes: int) -> bytes:
    """A regular file's bytes.  Never waits: pipes and devices are refused."""
    fd = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, at=at)
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path!r} is no regular file")
        if found.st_size > max_bytes:
            raise Refused(f"{path!r} has {found.st_size} bytes, expected at most {max_bytes}")
        parts: list[bytes] = []
        left = max_bytes + 1
        while left > 0:
            part = os.read(fd, min(left, 1 << 20))
            if not part:
                return b"".join(parts)
            parts.append(part)
            left -= len(part)
        raise Refused(f"{path!r} has grown beyond {max_bytes} bytes")
    finally:
        os.close(fd)


def write_file(root: int, path: str, data: bytes, *, at: str) -> None:
    """Make or replace a regular file; its mode stays.  Whoever reads it meanwhile sees the old one or the new one."""
    _steps(path, at)
    mode, folder, name = 0o644, path, ""
    for _ in range(MAX_LINKS):
        folder, _, name = folder.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        inside = open_beneath(root, folder or ".", os.O_PATH | os.O_DIRECTORY, at=at, make_folders=True)
        target = _target(name, inside)
        if target is None:
            break
        os.close(inside)
        folder = target if target.startswith("/") else f"{folder}/{target}" if folder else target
    else:
        raise OSError(errno.ELOOP, "too many symbolic links", path)
    try:
        try:
            found = os.stat(name, dir_fd=inside, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a folder", path)
            if not stat.S_ISREG(found.st_mode):
                raise Refused(f"{path!r} is no regular file")
            mode = stat.S_IMODE(found.st_mode)
        _replace(inside, name, data, mode)
    finally:
        os.close(inside)


def _replace(folder: int, name: str, data: bytes, mode: int) -> None:
    temporary = f".{os.urandom(9).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise


def list_folder(root: int, path: str, *, at: str) -> list[str]:
    """The names in a folder, sorted; folders end with a slash."""
    fd = open_beneath(root, path, os.O_RDONLY | os.O_DIRECTORY, at=at)
    names: list[str] = []
    size = 0
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                names.append(entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name)
                size += len(names[-1]) + 1
                if size > MAX_NAMES_BYTES:
                    raise Refused(f"{path!r} holds more than {MAX_NAMES_BYTES} bytes of names")
    finally:
        os.close(fd)
    return sorted(names)


def is_full(folders: dict[str, int]) -> bool:
    """Whether one of these places has no room left."""
    for path in folders:
        room = os.statvfs(path)
        if room.f_bavail * room.f_bsize < 4096 * 2 or (room.f_files and room.f_favail == 0):
            return True
    return False


def strip(folder: int) -> None:
    """Take off what was hung on a folder: names with values, and access lists, which new files would inherit."""
    try:
        names = os.listxattr(folder)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return
        raise
    for name in names:
        if name.startswith(("user.", "system.posix_acl_")):
            os.removexattr(folder, name)


def wipe(folder: int, *, depth: int = 0) -> None:
    """Empty a folder; other file systems in it stay untouched, with the folders that lead to them."""
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, f"folders lie more than {MAX_DEPTH} deep")
    device = os.fstat(folder).st_dev
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            if found.st_dev == device:
                os.unlink(name, dir_fd=folder)
            continue
        if found.st_dev != device:
            continue
        if found.st_mode & 0o700 != 0o700:
            os.chmod(name, 0o700, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            wipe(inner, depth=depth + 1)
        finally:
            os.close(inner)
        try:
            os.rmdir(name, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise
