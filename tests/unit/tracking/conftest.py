"""Model folders of several template families, made on the spot, and helpers to grow token graphs."""

# ruff: noqa: RUF001 (marks are spelled as models spell them)
from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from wingbeat.core.types import FinishReason
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, PromptPlan, Turn, parse_reply

TEMPLATES = Path(__file__).parent / "templates"
WORDS = ("he", "ll", "hell", "hello", "Ġw", "Ġwo", "as")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("a", "s"))
NOON = datetime(2026, 11, 29, 12)


@dataclass(frozen=True)
class Family:
    special: tuple[str, ...]
    plain: tuple[str, ...]
    """Added but not special, as tool markers are."""
    eos: str
    bos: str | None = None


QWEN_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
FAMILIES = {
    "chatml": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        eos="<|im_end|>",
    ),
    "thinking": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        eos="<|endoftext|>",
    ),
    "llama3": Family(
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        (),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma": Family(("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), (), eos="<eos>", bos="<bos>"),
    "gemma3": Family(("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), (), eos="<eos>", bos="<bos>"),
    "qwen25": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), QWEN_MARKS, eos="<|im_end|>"),
    "qwen3": Family(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), QWEN_MARKS, eos="<|im_end|>"),
    "mistral": Family(
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[ARGS]",
            "[CALL_ID]",
            "[THINK]",
            "[/THINK]",
        ),
        (),
        eos="</s>",
        bos="<s>",
    ),
    "deepseek": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "<｜tool▁sep｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gptoss": Family(
        (
            "<|endoftext|>",
            "<|return|>",
            "<|constrain|>",
            "<|channel|>",
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|call|>",
        ),
        (),
        eos="<|return|>",
    ),
}


def build_tokenizer(family: Family) -> Tokenizer:
    """A byte-level BPE with a few merges, so that re-tokenising text can give other tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys((*alphabet, *WORDS)))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    if family.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))]
        )
    return tokenizer


def write_folder(folder: Path, *, family: Family, template: str | None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(family).save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": family.eos, "pad_token": family.special[0]}
    if family.bos is not None:
        tokens["bos_token"] = family.bos
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **config}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    """``make_folder(path, name, template=..., **tokenizer_config)``."""

    def make(path: Path, name: str, *, template: str | None = None, **config: Any) -> Path:
        return write_folder(path, family=FAMILIES[name], template=template, **config)

    return make


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_folder(
            root / name, family=family, template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        )
        for name, family in FAMILIES.items()
    }


@pytest.fixture(scope="session")
def templates(folders: dict[str, Path]) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate.load(folder, now=lambda: NOON) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def chatml(templates: dict[str, ChatTemplate]) -> ChatTemplate:
    return templates["chatml"]


Say = Callable[..., Turn]


@pytest.fixture(scope="session")
def say() -> Say:
    """One model call: resolve, pretend that ``text`` (or ``token_ids``) was sampled, commit."""
    numbers = itertools.count()

    def call(
        graph: EpisodeGraph,
        template: ChatTemplate,
        messages: Sequence[Message],
        text: str = "",
        *,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        agent: str = "",
        policy: str = "solver",
        finish: FinishReason = FinishReason.STOP,
        **extra: Any,
    ) -> Turn:
        plan = graph.resolve(policy=policy, agent=agent, messages=messages, tools=tools, template=template, **extra)
        ids = list(token_ids) if token_ids is not None else template.encode(text)
        number = next(numbers)
        reply = parse_reply(template, ids, tools_given=bool(tools), new_id=lambda: f"call-{number}")
        return graph.commit(
            plan,
            turn_id=f"turn-{number}",
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[(3, len(ids))],
            temperature=1.0,
            finish_reason=finish,
            reply=reply.message,
        )

    return call


@pytest.fixture(scope="session")
def grow() -> Callable[..., Turn]:
    """Append a turn given by its tokens, without any template."""

    def call(
        graph: EpisodeGraph,
        turn_id: str,
        *,
        parent: Turn | None = None,
        segment: Sequence[int],
        sampled: Sequence[int],
        logprobs: Sequence[float | None] | None = None,
        versions: Sequence[tuple[int, int]] | None = None,
        temperature: float = 1.0,
        policy: str = "solver",
        agent: str = "",
        forced: int = 0,
    ) -> Turn:
        own = np.array(segment, np.int32)
        before = np.zeros(0, np.int32) if parent is None else graph.full_ids(parent)
        plan = PromptPlan(
            policy=policy,
            agent=agent,
            parent=parent,
            prompt_ids=np.concatenate([before, own]),
            segment=own,
            forced_count=forced,
            news=(Message("user", f"asks {turn_id}"),),
        )
        return graph.commit(
            plan,
            turn_id=turn_id,
            token_ids=sampled,
            logprobs=[-float(token) for token in sampled] if logprobs is None else logprobs,
            versions=[(0, len(sampled))] if versions is None else versions,
            temperature=temperature,
            finish_reason=FinishReason.STOP,
            reply=Message("assistant", f"answers {turn_id}"),
        )

    return call
