"""Loading a user's Python file (agents, tasks), with faults told as one line about that file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from wingbeat.client.code import RecordingLoader, record_imports
from wingbeat.core.errors import DependencyMissing, SetupError


def load_python_file(path: Path, *, what: str) -> ModuleType:
    """Import a file as a module; ``what`` ("agent", "tasks") names its role in messages.

    The file's folder joins ``sys.path``, as when Python runs a script, so that it may import its
    neighbours.  The same file loads once.  Raises SetupError, DependencyMissing.
    """
    path = path.resolve()
    if not path.is_file():
        raise SetupError(f"expected the {what} file {path}, got no such file")
    name = f"wingbeat_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    if path.suffix != ".py":
        raise SetupError(f"expected the {what} file to be a Python file (.py), got {path}")
    record_imports(path)
    spec = importlib.util.spec_from_file_location(name, path, loader=RecordingLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loaded = False
    try:
        spec.loader.exec_module(module)
        loaded = True
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            f"{path} imports {error.name!r}, which is not installed here; try `pip install {error.name}`"
        ) from error
    except SetupError:
        raise
    except (Exception, SystemExit) as error:
        raise SetupError(f"{path} fails when imported: {_where(error, path)}") from error
    finally:
        if not loaded:
            del sys.modules[name]
    return module


def missing_files(error: BaseException, root: Path) -> tuple[Path, ...]:
    """Where below ``root`` the module could be whose absence caused this error; () for other errors."""
    cause = error.__cause__
    if not isinstance(cause, ModuleNotFoundError) or not cause.name:
        return ()
    place = root.joinpath(*cause.name.split("."))
    return place.with_name(f"{place.name}.py"), place / "__init__.py"


def _where(error: BaseException, path: Path) -> str:
    """``NameError: ... (line 3)``: the last line of the file that the error passed through."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{said} (line {lines[-1]})" if lines else said
