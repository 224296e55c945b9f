"""Which code an agent is: a digest of its file and of what it imports from its own folder.

The digest names what *runs*, not what lies on disk by now, so files are hashed as they are loaded.  They are also
compiled anew each time: Python's cache goes by size and by seconds, and an edit within one second would run old code.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path
from types import CodeType

_INSTALLED = frozenset(
    Path(path).resolve() for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))
)
"""Folders of packages: they are none of an agent's code wherever they lie."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})

_loaded: dict[Path, str] = {}
"""SHA-256 of every file that was loaded here, in hexadecimal digits."""
_mains: set[Path] = set()
"""Files that were loaded for themselves, each of which is one agent's (or a task file)."""
_roots: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Code:
    """What an agent's code was when it was loaded."""

    digest: str
    """SHA-256 over the sorted pairs of relative path and SHA-256 of the content; 64 hexadecimal digits."""
    files: tuple[Path, ...]


class RecordingLoader(SourceFileLoader):
    """Loads a Python file from its source and remembers which source that was."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the file; faults of it are remembered, too, so that it can be watched until it is mended."""
        path = self.get_filename(fullname)
        data = self.get_data(path)
        _loaded[Path(path).parent.resolve() / Path(path).name] = hashlib.sha256(data).hexdigest()
        return self.source_to_code(data, path)


def record_imports(main: Path) -> None:
    """From now on, remember what is imported from the folder of this file, and below."""
    root = main.parent
    _mains.add(main)
    if root in _roots:
        return
    _roots.add(root)
    hook = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES),
        (RecordingLoader, SOURCE_SUFFIXES),
        (SourcelessFileLoader, BYTECODE_SUFFIXES),
    )

    def find_below(folder: str) -> FileFinder:
        if not _is_own(Path(folder or ".").resolve(), root):
            raise ImportError(f"{folder} is not of the agent", path=folder)
        found = hook(folder)
        assert isinstance(found, FileFinder)
        return found

    sys.path_hooks.insert(0, find_below)
    for folder in [known for known in sys.path_importer_cache if _is_own(Path(known or ".").resolve(), root)]:
        del sys.path_importer_cache[folder]


def _is_own(folder: Path, root: Path) -> bool:
    """Whether a folder is part of an agent's code, rather than an environment that lies below the agent."""
    if not folder.is_relative_to(root) or _PACKAGES.intersection(folder.parts):
        return False
    return not any(folder.is_relative_to(installed) for installed in _INSTALLED)


def loaded_code(main: Path, name: str = "") -> Code:
    """The code of an agent that was just loaded; ``name`` is the function that was chosen in its file."""
    root = main.parent
    own = {
        path: sha256
        for path, sha256 in _loaded.items()
        if path.is_relative_to(root) and (path == main or path not in _mains)
    }
    return Code(_digest(own, root, name), tuple(sorted(own)))


def code_on_disk(files: Iterable[Path], main: Path, name: str = "") -> str:
    """The digest that these files would have if they were loaded now.  Raises OSError where one cannot be read."""
    found = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return _digest(found, main.parent, name)


def _digest(files: Mapping[Path, str], root: Path, name: str) -> str:
    lines = sorted(f"{path.relative_to(root).as_posix()}\0{sha256}\n" for path, sha256 in files.items())
    return hashlib.sha256("".join([*lines, name]).encode()).hexdigest()


def split_agent(agent: str) -> tuple[Path, str]:
    """File and function of ``FILE.py`` or ``FILE.py:NAME``."""
    file, _, name = agent.partition(".py:")
    return Path(f"{file}.py" if name else file), name
