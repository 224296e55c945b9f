"""Reads from a Hugging Face folder what rendering needs, without transformers.

Where a fact can stand in several files, the order is that of transformers: ``chat_template.jinja``
before ``tokenizer_config.json`` before the older ``chat_template.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from wingbeat.core.errors import ModelSourceError, SetupError

TURN_ENDERS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|eot|>",
)
"""Special tokens that end a turn by their name, whatever a folder declares (many declare only the end of text)."""

TOOL_TEMPLATE = "tool_use"
"""Folders with several named templates call the one for requests with tools so."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The facts of a folder."""

    tokenizer: Tokenizer
    templates: Mapping[str, str]
    """Source by name: ``default`` and perhaps ``tool_use``."""
    special_tokens: Mapping[str, str]
    """``bos_token`` and so on: the variables that templates may print."""
    special_ids: Mapping[int, str]
    """Tokens that carry no text of their own."""
    stop_ids: frozenset[int]
    """Ids after which generation ends."""
    add_bos: bool
    """The tokenizer wants its BOS before every fresh text."""


def read_model_folder(folder: Path, *, template: str | None) -> ModelFolder:
    """Read ``folder``; ``template`` (source text) replaces the folder's own.

    Raises ModelSourceError where files are missing or broken, SetupError where there is no template.
    """
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    added = tokenizer.get_added_tokens_decoder()
    return ModelFolder(
        tokenizer=tokenizer,
        templates={"default": template} if template is not None else _read_templates(folder, config=config),
        special_tokens=special_tokens,
        special_ids={index: token.content for index, token in added.items() if token.special},
        stop_ids=_stop_ids(folder, tokenizer=tokenizer, special_tokens=special_tokens),
        add_bos=_adds_bos(tokenizer, config=config, bos=special_tokens.get("bos_token")),
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(
            f"cannot read {path}: {error}; the folder needs a tokenizer.json (a fast tokenizer)"
        ) from error
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelSourceError(f"{path} is no valid tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return cast(dict[str, Any], value)


def _read_templates(folder: Path, *, config: Mapping[str, Any]) -> dict[str, str]:
    found = _named_templates(_read_json(folder / "chat_template.json").get("chat_template"))
    found = _named_templates(config.get("chat_template")) or found
    files = {"default": folder / "chat_template.jinja"}
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        files |= {path.stem: path for path in sorted(extra.glob("*.jinja"))}
    try:
        found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()} or found
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(f"cannot read the chat templates of {folder}: {error}") from error
    if "default" not in found:
        raise SetupError(
            f"{folder} has no chat template: set policies.NAME.chat_template to the path of a Jinja template"
        )
    return {name: source for name, source in found.items() if name in ("default", TOOL_TEMPLATE)}


def _named_templates(value: object) -> dict[str, str]:
    """One template, or a list of ``{name, template}``."""
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        return {}
    entries = [cast(dict[str, Any], entry) for entry in cast(list[object], value) if isinstance(entry, dict)]
    return {str(entry["name"]): str(entry["template"]) for entry in entries if {"name", "template"} <= entry.keys()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        content = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _stop_ids(folder: Path, *, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> frozenset[int]:
    """All ids that end a turn.

    Ids from generation_config.json and config.json count only where they are added tokens: small models
    often carry the default id of their configuration class, which is an ordinary word of their vocabulary.
    """
    added = tokenizer.get_added_tokens_decoder()
    stops = {index for index, token in added.items() if token.special and token.content in TURN_ENDERS}
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        values = cast(list[object], value) if isinstance(value, list) else [value]
        stops |= {item for item in values if isinstance(item, int) and item in added}
    eos = special_tokens.get("eos_token")
    if eos is not None:
        index = tokenizer.token_to_id(eos)
        if index is None:
            raise ModelSourceError(f"eos_token {eos!r} of {folder} is not in its tokenizer.json")
        stops.add(index)
    return frozenset(stops)


def _adds_bos(tokenizer: Tokenizer, *, config: Mapping[str, Any], bos: str | None) -> bool:
    """The explicit setting, else what the tokenizer's own post-processor does to a text."""
    bos_id = tokenizer.token_to_id(bos) if bos is not None else None
    if bos_id is None:
        return False
    setting = config.get("add_bos_token")
    if isinstance(setting, bool):
        return setting
    return tokenizer.encode("").ids[:1] == [bos_id]
