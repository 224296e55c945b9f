"""Whether a server that somebody else started serves a policy as one of ours would.

What differs silently would be seen in no error: another precision, logprobs of something else, the sampling defaults of
a model's folder.  So a running server says with what it was started, and all that does not fit is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.core.errors import SetupError
from wingbeat.core.model_files import fingerprint
from wingbeat.engines.vllm.flags import MAX_LOGPROBS, ServerSpec

WITHOUT_LIMIT = -1
"""As ``--max-logprobs``."""


def check_running(
    address: str, *, root: str, about: Mapping[str, Any], spec: ServerSpec, needs_base: bool = False
) -> None:
    """``root``: the model that it serves; ``about``: as its workers tell it; ``spec``: of a server of our own.

    ``needs_base``: the folder's own weights are served, or adapted, and none come in their place.  Raises SetupError.
    """
    if not _is_same_model(root, spec.model):
        raise SetupError(
            f"expected the server at {address} to serve the model in {spec.model}, got {root}: start it with"
            f" --model {spec.model}"
        )
    try:
        flags, loaded = about["flags"], str(about["loaded"])
        faults = [*_other_values(flags, spec), *_too_small(flags, spec)]
    except KeyError:
        raise SetupError(f"the server at {address} was started by another release of Wingbeat: start it anew") from None
    if faults:
        raise SetupError(
            f"the server at {address} was not started as the policy needs it: {'; '.join(faults)}. Start it as"
            " docs/howto/vllm.md says"
        )
    if needs_base and loaded:
        raise SetupError(
            f"the server at {address} holds weights that were trained before (checksum {loaded[:16]}) in place of those"
            f" in {spec.model}: start it anew"
        )


def _other_values(flags: Mapping[str, Any], spec: ServerSpec) -> list[str]:
    wanted = {
        "--dtype": spec.dtype,
        "--generation-config": "vllm",
        "--structured-outputs-config": "guidance",
        "--speculative-config": "none",
    }
    return [f"expected {name} {value}, got {flags[name]}" for name, value in wanted.items() if flags[name] != value]


def _too_small(flags: Mapping[str, Any], spec: ServerSpec) -> list[str]:
    wanted = {"--max-logprobs": MAX_LOGPROBS}
    if spec.adapters:
        wanted |= {"--max-loras": spec.adapters, "--max-lora-rank": spec.adapter_rank}
    return [
        f"expected {name} {least} or more, got {flags[name]}"
        for name, least in wanted.items()
        if flags[name] < least and (name, flags[name]) != ("--max-logprobs", WITHOUT_LIMIT)
    ]


def _is_same_model(root: str, folder: Path) -> bool:
    served = Path(root)
    if served.is_dir() and served.samefile(folder):
        return True
    return served.is_dir() and fingerprint(served) == fingerprint(folder)
