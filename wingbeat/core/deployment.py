"""How many engines a server is wanted to have: control writes it down, whoever keeps the processes reads it."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wingbeat.core.errors import SetupError
from wingbeat.core.files import write_atomically

NAME = "deployment.json"
MAX_ENGINES = 4096


class Wanted(BaseModel):
    """What the server's processes are to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: int = Field(ge=0, le=MAX_ENGINES, description="Engine processes that the server itself starts.")
    configured: int = Field(
        description="`engine.count` when this was asked for: a run that is continued with another one has that."
    )


def read_wanted(run_dir: Path, *, configured: int) -> Wanted | None:
    """What was last asked for; None where nobody has asked since ``engine.count`` became ``configured``, which counts.

    Raises SetupError where the file cannot be read, or is not what :func:`write_wanted` writes.
    """
    path = run_dir / NAME
    try:
        wanted = Wanted.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise SetupError(f"{path} is damaged ({error.error_count()} faults): delete it, and scale again") from error
    return wanted if wanted.configured == configured else None


class Requests:
    """Gives each request once, for whoever keeps the processes."""

    def __init__(self, run_dir: Path, *, configured: int) -> None:
        self._run_dir = run_dir
        self._configured = configured
        self._seen: tuple[int, int] | None = None

    def new(self) -> Wanted | None:
        """The last request, unless it was given or found damaged before.  Raises SetupError as :func:`read_wanted`."""
        try:
            found = os.stat(self._run_dir / NAME)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SetupError(f"{self._run_dir / NAME} cannot be read: {error}") from error
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp == self._seen:
            return None
        self._seen = stamp
        return read_wanted(self._run_dir, configured=self._configured)


def write_wanted(run_dir: Path, wanted: Wanted) -> None:
    """Raises UnavailableError where the disk does not take it."""
    write_atomically(run_dir / NAME, wanted.model_dump_json().encode())
