"""Environments by name: those of this package, of installed packages, and of a user's own module or file.

A name is one of::

    calculator, gym:FrozenLake-v1          of this package; what follows the colon is the environment's to read
    NAME, NAME:VARIANT                     of an installed package (entry points of the group `wingbeat.environments`)
    package.module:Class, FILE.py:Class    a class or function of the options, importable here

so that a new environment needs no change here.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from wingbeat.client.user_code import load_python_file
from wingbeat.core.errors import ConfigError, DependencyMissing, SetupError
from wingbeat.core.ports import Environment, PlayedEnvironment
from wingbeat.environments.kinds import Kind, without_variant

GROUP = "wingbeat.environments"
"""Entry points with which an installed package names its environments: a :class:`Kind`, or a callable of options."""

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "calculator": "wingbeat.environments.calculator_environment:KIND",
        "code-repair": "wingbeat.environments.code_repair:KIND",
        "game": "wingbeat.environments.game:KIND",
        "gymnasium": "wingbeat.environments.toy_text:KIND",
        "reasoning-gym": "wingbeat.environments.reasoning_gym:KIND",
        "retrieval": "wingbeat.environments.retrieval:KIND",
        "textarena": "wingbeat.environments.textarena_games:KIND",
        "verifiers": "wingbeat.environments.verifiers_tasks:KIND",
    }
)
"""Name -> where its :class:`Kind` is."""

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def environment_names() -> tuple[str, ...]:
    """What ``tasks.environment`` may begin with, but for import paths: built-in and installed names."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))}))


def make_environment(spec: str, options: Mapping[str, Any] | None = None, *, folder: Path | None = None) -> Environment:
    """The environment that a name like ``calculator`` or ``my_package.tasks:Chess`` stands for.

    ``folder`` is where a relative ``FILE.py:Class`` starts (None: the working directory).  Raises ConfigError for an
    unknown name or option, DependencyMissing if its library is not installed.
    """
    kind, variant = find_kind(spec, folder=folder)
    try:
        made: Any = kind.make(variant, options or {})
    except SetupError:
        raise
    except Exception as error:
        raise ConfigError(f"the environment {spec} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Environment):
        raise ConfigError(
            f"expected {spec} to make an environment (`name`, `tasks(split)`, `score(task, answer)`), got {made!r}"
        )
    return made


def make_played(
    spec: str, options: Mapping[str, Any] | None = None, *, folder: Path | None = None
) -> PlayedEnvironment:
    """An environment that brings its own agent.

    Raises as :func:`make_environment`, and ConfigError if it has none.
    """
    made = make_environment(spec, options, folder=folder)
    if not isinstance(made, PlayedEnvironment):
        raise ConfigError(
            f"the environment {spec} has no agent of its own (`async def play(self, episode)`): name a file with an"
            " @wingbeat.agent function in place of `builtin`"
        )
    return made


def find_kind(spec: str, *, folder: Path | None = None) -> tuple[Kind, str]:
    """What a name stands for, and its variant.  Raises ConfigError, DependencyMissing."""
    name, _, variant = spec.partition(":")
    if name in BUILT_IN:
        return _as_kind(_imported(BUILT_IN[name]), spec), variant
    point = _entry_point(name)
    if point is not None:
        return _as_kind(_loaded(point), spec), variant
    if variant and (name.endswith(".py") or _PATH.fullmatch(name)):
        return _as_kind(_user_object(name, variant, spec, folder), spec), ""
    raise ConfigError(_unknown(spec, name))


def absolute_spec(spec: str, folder: Path) -> str:
    """The same name, with a ``FILE.py`` made absolute."""
    name, separator, variant = spec.partition(".py:")
    if not separator or spec.partition(":")[0] in environment_names():
        return spec
    return f"{(folder / name).expanduser().absolute()}{separator}{variant}"


def _entry_point(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=GROUP, name=name)), None)


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise DependencyMissing(
            f"the environment {point.name} needs {error.name!r}: pip install {error.name}"
        ) from error
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the environment {point.name} ({point.value}) cannot be loaded: {error}") from error


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _user_object(module: str, name: str, spec: str, folder: Path | None) -> Any:
    """What a user's module or file calls so."""
    if module.endswith(".py"):
        found = load_python_file((folder or Path.cwd()) / Path(module).expanduser(), what="environment")
    else:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise DependencyMissing(f"{module} imports {error.name!r}, which is not installed here") from error
            raise ConfigError(f"{_unknown(spec, module)}; nor is there a module {error.name!r}") from error
        except Exception as error:
            raise ConfigError(f"{module} fails when imported: {type(error).__name__}: {error}") from error
    if not hasattr(found, name):
        raise ConfigError(f"{module} has no {name!r}: expected a class or function of the options, as in MODULE:NAME")
    return getattr(found, name)


def _as_kind(found: Any, spec: str) -> Kind:
    if isinstance(found, Kind):
        return found
    if not callable(found):
        raise ConfigError(f"expected {spec} to be a class or function of the options, got {found!r}")

    make: Any = found  # what it returns is checked when it is called
    summary = (found.__doc__ or "").strip().partition("\n")[0]
    return Kind(
        without_variant(spec.partition(":")[0], make),
        summary=summary,
        preset=getattr(found, "preset", MappingProxyType({})),
    )


def _unknown(spec: str, name: str) -> str:
    known = environment_names()
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"expected an environment out of {', '.join(known)}, or MODULE:CLASS, or FILE.py:CLASS, got {spec!r}{hint}"
