"""Operators by name: the built-in ones, and users' own by import path or file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from pydantic import ValidationError

from wingbeat.core.config import Config, OperatorConfig
from wingbeat.core.errors import ConfigError, WingbeatError
from wingbeat.dataflow.operators.base import Operator, OperatorContext, OperatorOptions
from wingbeat.dataflow.operators.chain import Fault, Link, OperatorChain
from wingbeat.dataflow.operators.curriculum import CurriculumSolved, DifficultyTarget, Greso
from wingbeat.dataflow.operators.filters import (
    Deduplicate,
    DynamicSampling,
    FailureFilter,
    GroupFloor,
    LengthFilter,
    RewardFilter,
    ZeroVarianceFilter,
)
from wingbeat.dataflow.operators.replay import Replay
from wingbeat.dataflow.operators.shaping import OverlongShaping, RewardClip, RewardScale, RewardShaping
from wingbeat.dataflow.operators.variance import VarianceRule

BUILT_IN: Mapping[str, type[Operator[Any]]] = MappingProxyType(
    {
        "failure_filter": FailureFilter,
        "length_filter": LengthFilter,
        "reward_filter": RewardFilter,
        "zero_variance_filter": ZeroVarianceFilter,
        "dynamic_sampling": DynamicSampling,
        "group_floor": GroupFloor,
        "deduplicate": Deduplicate,
        "overlong_shaping": OverlongShaping,
        "reward_clip": RewardClip,
        "reward_scale": RewardScale,
        "reward_shaping": RewardShaping,
        "curriculum_solved": CurriculumSolved,
        "difficulty_target": DifficultyTarget,
        "greso": Greso,
        "replay": Replay,
    }
)
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {"mix": "tasks are mixed where they are dealt: set `[tasks] ratios`, the shares of the sources"}
)
"""Names that people try, and what does it here."""
HOOKS = ("should_issue", "observe", "on_episode", "on_group", "on_version", "compose")
"""The methods that make an operator do something; the others only tell of it."""


def build_chain(
    config: Config,
    policy: str,
    *,
    on_fault: Callable[[Fault], None] = lambda fault: None,
    config_dir: Path | None = None,
) -> OperatorChain:
    """The configured operators that apply to a policy, in order; none for a frozen one.

    ``config_dir`` is what paths of operators are relative to.  Raises ConfigError for an operator or
    option that is unknown, does not load or does not fit the run.
    """
    links: list[Link] = []
    if config.policies[policy].trainable:
        for place, entry in enumerate(config.dataflow.operators):
            if entry.policies is None or policy in entry.policies:
                links.append(_link(config, policy, place, taken={link.label for link in links}, config_dir=config_dir))
    return OperatorChain(policy, links, max_staleness=config.dataflow.max_staleness, on_fault=on_fault)


def check_operators(config: Config, config_dir: Path | None = None) -> None:
    """Refuse what :func:`build_chain` would refuse, and operators for policies that do not train.

    Raises ConfigError.
    """
    trained = [name for name, policy in config.policies.items() if policy.trainable]
    for place, entry in enumerate(config.dataflow.operators):
        wrong = [name for name in entry.policies or () if name not in trained]
        if wrong:
            raise ConfigError(
                f"{_where(place, entry)}: `policies` names {wrong[0]!r}, which is no policy that trains;"
                f"{_near(wrong[0], trained)} there {'is' if len(trained) == 1 else 'are'} {', '.join(trained)}"
            )
        if entry.policies == []:
            raise ConfigError(f"{_where(place, entry)}: `policies` is empty; leave it out for all that train")
    for policy in trained:
        build_chain(config, policy, config_dir=config_dir)


def absolute_use(use: str, config_dir: Path) -> str:
    """The same operator with the path of its file absolute, so that a run resumes from any folder."""
    source, _, name = use.rpartition(":")
    return f"{(config_dir / source).absolute()}:{name}" if source.endswith(".py") else use


def _link(config: Config, policy: str, place: int, *, taken: set[str], config_dir: Path | None) -> Link:
    entry = config.dataflow.operators[place]
    where = _where(place, entry)
    try:
        kind = _load(entry.use, config_dir)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    label = _label(entry.use, kind, taken)
    options = _options(kind, entry, where)
    trainer, dataflow = config.policies[policy].trainer, config.dataflow
    context = OperatorContext(
        label=label,
        policy=policy,
        seed=config.run.seed,
        group_size=dataflow.group_size,
        groups_per_step=dataflow.groups_per_step,
        max_staleness=dataflow.max_staleness,
        variance=VarianceRule(credit=trainer.credit, gamma=trainer.gamma),
    )
    try:
        operator = kind(options, context)
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where} does not fit this run: {said}") from error
    return Link(label, operator, on_error=entry.on_error, fingerprint=_fingerprint(kind, entry))


def _where(place: int, entry: OperatorConfig) -> str:
    return f"dataflow.operators[{place}] ({entry.use})"


def _label(use: str, kind: type[Operator[Any]], taken: set[str]) -> str:
    name = kind.__name__ if ":" in use else use
    return next(
        candidate
        for candidate in (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
        if candidate not in taken
    )


def _load(use: str, config_dir: Path | None) -> type[Operator[Any]]:
    """The class that ``use`` names.  Raises ConfigError."""
    source, colon, name = use.rpartition(":")
    if not colon:
        if use in BUILT_IN:
            return BUILT_IN[use]
        if use in ELSEWHERE:
            raise ConfigError(f"there is no operator {use!r}: {ELSEWHERE[use]}")
        raise ConfigError(
            f"unknown operator {use!r};{_near(use, BUILT_IN)} built in are {', '.join(BUILT_IN)}; one of your own is"
            " `module:Class` or `path/to/file.py:Class`"
        )
    module = _load_file(Path(config_dir or ".") / source) if source.endswith(".py") else _load_module(source)
    kind: object = getattr(module, name, None)
    if kind is None:
        known = [key for key, value in vars(module).items() if _is_operator(value)]
        raise ConfigError(f"{source} has no class {name!r};{_near(name, known)} it has {', '.join(known) or 'none'}")
    if not _is_operator(kind):
        raise ConfigError(f"{use} must be a class that extends wingbeat.dataflow.operators.Operator, got {kind!r}")
    assert isinstance(kind, type)
    _check_hooks(use, kind)
    return kind


def _check_hooks(use: str, kind: type[Operator[Any]]) -> None:
    """Raises ConfigError for an operator that would do nothing: most likely a hook's name is misspelt."""
    if any(getattr(kind, hook) is not getattr(Operator, hook) for hook in HOOKS):
        return
    own = [name for name in dir(kind) if not name.startswith("__") and not hasattr(Operator, name)]
    pairs = ((name, difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.6)) for name in own)
    meant = next((f" did you mean {near[0]!r} where it has {name!r}?" for name, near in pairs if near), "")
    raise ConfigError(f"{use} overrides no hook, so it would do nothing;{meant} hooks are {', '.join(HOOKS)}")


def _is_operator(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Operator) and value is not Operator


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import {error.name!r}: install the package that has it, or name a file as `path/to/file.py:Class`"
        ) from error
    except Exception as error:
        raise ConfigError(f"{name} fails when imported: {type(error).__name__}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    """Import a file as a module of its own; its neighbours are importable, as for a script."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"expected the operator's file {path}, got no such file")
    name = f"wingbeat_operator_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"expected a Python file, got {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path} fails when imported: {type(error).__name__}: {error}") from error
    return module


def _options(kind: type[Operator[Any]], entry: OperatorConfig, where: str) -> OperatorOptions:
    """Validated options, or a ConfigError that names what is wrong and what there is."""
    try:
        return kind.options_type.model_validate(entry.options)
    except ValidationError as error:
        known = list(kind.options_type.model_fields)
        faults = "; ".join(_explain(dict(fault), known) for fault in error.errors())
        raise ConfigError(f"{where}: {faults}") from error
    except WingbeatError as error:
        raise ConfigError(f"{where}: {error.message}") from error


def _explain(fault: dict[str, Any], known: list[str]) -> str:
    name = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        has = f"it has {', '.join(known)}" if known else "it has none"
        return f"unknown option `{name}`;{_near(name, known)} {has}"
    if fault["type"] == "missing":
        return f"option `{name}` is missing"
    said = str(fault["msg"]).removeprefix("Value error, ")
    return f"option `{name}`: {said} (got {fault['input']!r})" if name else said


def _near(name: str, known: Mapping[str, Any] | list[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" did you mean {near[0]!r}?" if near else ""


def _fingerprint(kind: type[Operator[Any]], entry: OperatorConfig) -> str:
    """Changes with the operator's module and options."""
    code = Path(inspect.getfile(kind)).read_bytes()
    return hashlib.sha256(code + repr(sorted(entry.options.items())).encode()).hexdigest()[:16]
