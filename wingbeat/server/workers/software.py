"""Whether a worker runs what the server runs.

Another worker protocol is refused always.  Another release of Wingbeat or of torch may sample with other kernels and
other defaults: what comes of that is seen in ``mismatch_kl``, and ``engine.version_mismatch`` says whether it is
tolerated.  Builds of one release for different devices are no difference.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata

from wingbeat import __version__

COMPARED = ("wingbeat", "torch")
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def own_software() -> dict[str, str]:
    """Versions beside which workers are held; without torch where the server has none."""
    found = {"wingbeat": __version__, "python": platform.python_version()}
    try:
        found["torch"] = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return found
    return found


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """What is of another release (major or minor number), as ``torch 2.12.1, the server has 2.13.0``."""
    return [
        f"{name} {theirs[name]}, the server has {ours[name]}"
        for name in COMPARED
        if name in theirs and name in ours and _release(theirs[name]) != _release(ours[name])
    ]


def _release(version: str) -> str:
    match = _RELEASE.match(version)
    return version if match is None else match[0]
