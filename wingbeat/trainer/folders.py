"""What a Hugging Face model folder must hold.  Loads no torch, so that starting a run can check it cheaply.

A folder put together by hand is wrong in ways that show late: a token without an embedding fails in the middle of
training (on a GPU without naming itself), an end-of-turn id that no logit has is never sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from wingbeat.core.errors import ModelSourceError

_SHOWN = 3


def checked_folder(folder: Path) -> Path:
    """``folder``, if it has what every reader needs.  Raises ModelSourceError."""
    present = {file.name for file in folder.iterdir()}
    missing = [name for name in ("config.json", "tokenizer.json") if name not in present]
    if not present & {"model.safetensors", "model.safetensors.index.json"}:
        missing.append("model.safetensors")
    if missing:
        found = ", ".join(sorted(present)[:8]) or "nothing"
        fix = "export it with save_pretrained of a model and a fast tokenizer"
        if any(name.endswith(".gguf") for name in present):
            fix = "give the path of the .gguf file itself"
        raise ModelSourceError(f"expected {', '.join(missing)} in the model folder {folder}, got {found}: {fix}")
    _check_shards(folder)
    try:
        config = json.loads((folder / "config.json").read_bytes())
        described = isinstance(config, dict) and isinstance(config.get("model_type"), str)
    except ValueError:
        config, described = {}, False
    if not described:
        raise ModelSourceError(
            f"expected a JSON object with model_type in {folder / 'config.json'}, got something else: "
            "copy the model's own config.json there"
        )
    _check_vocabulary(folder, config=cast(Mapping[str, Any], config))
    return folder


def _check_shards(folder: Path) -> None:
    """An index may name files of any kind anywhere: only safetensors beside it are read, and all of them must be there.

    Raises ModelSourceError.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelSourceError(
            f"expected a table `weight_map` in {index}, got none: copy the model's own there"
        ) from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelSourceError(
                f"{index} names {shard!r:.100}; expected .safetensors files beside it: nothing else is loaded, since"
                " other formats of weights can hold programs"
            )
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise ModelSourceError(
            f"expected in {folder} the {len(shards)} files of weights that {index.name} names, got {len(missing)} too"
            f" few: {_listed(missing)}; fetch the model again, whole"
        )


def _check_vocabulary(folder: Path, *, config: Mapping[str, Any]) -> None:
    """Raises ModelSourceError where the tokenizer has tokens that the model has no embedding for."""
    text_config = config.get("text_config")
    settings = cast(Mapping[str, Any], text_config) if isinstance(text_config, dict) else config
    size = settings.get("vocab_size", config.get("vocab_size"))
    if not isinstance(size, int):
        return
    for name, value in _ends(folder, config):
        if value >= size:
            raise ModelSourceError(
                f"expected eos_token_id below {size}, the number of embeddings (vocab_size in config.json), got {value}"
                f" in {folder / name}: no token has that number, so no reply would end by it. Take config.json,"
                " generation_config.json and the tokenizer from one and the same model"
            )
    outside = _tokens_from(folder, size)
    if outside:
        raise ModelSourceError(
            f"expected in {folder / 'tokenizer.json'} no token beyond the {size} embeddings of the model (vocab_size in"
            f" config.json), got {len(outside)}: {_listed(outside)}. Tokenizer and weights are of different models, or"
            " tokens were added and the embeddings not resized (resize_token_embeddings, then save_pretrained)"
        )


def _ends(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Ids that end a reply, and the file that says so."""
    found: list[tuple[str, int]] = []
    for name, settings in (
        ("config.json", config),
        ("generation_config.json", _object(folder, "generation_config.json")),
    ):
        value = settings.get("eos_token_id")
        values = cast(list[object], value) if isinstance(value, list) else [value]
        found += [(name, item) for item in values if isinstance(item, int)]
    return found


def _tokens_from(folder: Path, size: int) -> list[str]:
    """Tokens whose id is ``size`` or above.

    Special tokens that nothing writes are no fault: the Gemma 3 family shares one tokenizer, whose last token stands
    for images that its text models know nothing of.
    """
    tokenizer = _object(folder, "tokenizer.json")
    model = tokenizer.get("model")
    vocabulary: object = cast(Mapping[str, Any], model).get("vocab") if isinstance(model, dict) else None
    found: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        words = cast(Mapping[str, object], vocabulary)
        found = {token: number for token, number in words.items() if isinstance(number, int) and number >= size}
    elif isinstance(vocabulary, list):  # Unigram: [token, score], numbered by place
        pairs = enumerate(cast(list[object], vocabulary))
        found = {str(pair[0]): number for number, pair in pairs if number >= size and isinstance(pair, list) and pair}
    written = _written(folder)
    added = tokenizer.get("added_tokens")
    tokens = cast(list[object], added) if isinstance(added, list) else []
    for token in (cast(Mapping[str, Any], token) for token in tokens if isinstance(token, dict)):
        content, number = str(token.get("content")), token.get("id")
        if isinstance(number, int) and number >= size and not (token.get("special") and content not in written):
            found[content] = number
    return sorted(found, key=found.__getitem__)


def _written(folder: Path) -> str:
    """All that is put into prompts, or ends replies: chat templates, begin and end of text."""
    settings = _object(folder, "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    texts = [template.read_text(encoding="utf-8", errors="replace")] if template.is_file() else []
    return "\n".join([*texts, *(json.dumps(settings.get(key)) for key in ("chat_template", "bos_token", "eos_token"))])


def _object(folder: Path, name: str) -> Mapping[str, Any]:
    """Of a file; empty where there is none, or something else: its own reader says so."""
    try:
        found = json.loads((folder / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else {}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
