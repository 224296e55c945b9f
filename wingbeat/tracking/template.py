"""Messages to tokens and back, with the model's own chat template and tokenizer.

Control needs neither torch nor transformers for this: ``tokenizers`` encodes, Jinja renders. What a
template means by "end of a turn" is not declared anywhere, so it is found by rendering a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from wingbeat.core.errors import RequestError, SetupError
from wingbeat.tracking.formats import (
    HARMONY_CALL,
    HARMONY_END,
    HARMONY_RETURN,
    MARKERS,
    OWN_MARKERS,
    THINK,
    ToolFormat,
    find_tool_format,
)
from wingbeat.tracking.jinja_environment import compile_template
from wingbeat.tracking.messages import Message, Role
from wingbeat.tracking.model_folder import TOOL_TEMPLATE, TURN_ENDERS, ModelFolder, read_model_folder
from wingbeat.tracking.probes import PROBE, TemplateForm, check_messages, find_traits

__all__ = ["ChatTemplate", "ToolFormat"]


class ChatTemplate:
    """The renderer of one policy. Immutable after construction; safe to share.

    ``num_tokens``: the tokenizer's highest id + 1, added tokens included.
    ``eos_token_ids``: ids after which generation ends, ascending.
    ``eos_texts``: their texts.
    ``eot_text``: what the template writes after an assistant's words ("" where it marks no end).
    ``turn_end_ids``: sampled tokens that stand for ``eot_text``; other stops end the text, not the turn.
    ``turn_end_texts``: their texts.
    ``tool_format``: the family's way of calling tools.
    ``markers``: special tokens that structure a reply, kept in its text.
    ``traits``: what the template can show, and in which form.
    ``shows_tools``: tools of a request reach the prompt.
    ``opens_reasoning``: the generation prompt itself ends with ``<think>``.
    """

    def __init__(self, facts: ModelFolder, *, now: Callable[[], datetime] = datetime.now) -> None:
        self._tokenizer = facts.tokenizer
        self.num_tokens = max(facts.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._templates = {name: compile_template(source, now=now) for name, source in facts.templates.items()}
        self._special_tokens = dict(facts.special_tokens)
        self._special_ids = dict(facts.special_ids)
        self._bos_id = self._tokenizer.token_to_id(facts.special_tokens["bos_token"]) if facts.add_bos else None
        self.tool_format = find_tool_format(
            facts.templates.values(), has_token=lambda text: self._tokenizer.token_to_id(text) is not None
        )
        self.markers = MARKERS | OWN_MARKERS[self.tool_format]
        self.traits = find_traits(self._render)
        self._form = self.traits.form
        self.shows_tools = self.traits.shows_tools
        stops = self._find_stops(facts.stop_ids)
        self.eot_text = self._find_end_of_turn(stops)
        self.turn_end_ids = self._find_turn_end_ids(stops)
        self.turn_end_texts = self._texts(self.turn_end_ids)
        self._stops = self._find_stops(stops | self.turn_end_ids)
        self.eos_token_ids = tuple(sorted(self._stops))
        self.eos_texts = self._texts(self.eos_token_ids)
        if not self.eos_token_ids:
            raise SetupError(
                "no end-of-turn token found, so generation would never stop: set eos_token in tokenizer_config.json"
            )
        self.opens_reasoning = self._probe("user", add_generation_prompt=True).rstrip().endswith(THINK[0])

    @classmethod
    def load(
        cls, folder: Path, *, template: str | None = None, now: Callable[[], datetime] = datetime.now
    ) -> ChatTemplate:
        """From a Hugging Face folder; ``template`` (Jinja source) replaces the folder's own.

        Raises SetupError (ModelSourceError for broken files): what is missing and how to fix it.
        """
        return cls(read_model_folder(folder, template=template), now=now)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as prompt text. Raises RequestError where the template refuses it."""
        return self._render(messages, self._form, tools, add_generation_prompt=add_generation_prompt)

    def _render(
        self,
        messages: Sequence[Message],
        form: TemplateForm,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        compiled = self._templates.get(TOOL_TEMPLATE) if tools else None
        try:
            return (compiled or self._templates["default"]).render(
                self._special_tokens,
                messages=form.spell(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text: special tokens in it count, none are added.

        The batch call lets other threads run meanwhile (the single one does not) and skips offsets.
        """
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a fresh prompt: as ``encode``, after the BOS if the tokenizer wants one and none is there."""
        ids = self.encode(text)
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of tokens; bytes that do not yet make a character become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)

    def plain_text(self, token_ids: Sequence[int]) -> str:
        """What sampled tokens say: without the one that ended the text, and without other special tokens."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self._stops else token_ids
        return self.decode(self.drop_special(ids, keep=frozenset()))

    def check(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Raises RequestError, naming the field, where the template cannot show what the request holds."""
        if tools and not self.shows_tools:
            raise RequestError(
                "the chat template of this policy does not show tools to the model: leave `tools` out, or set"
                " policies.NAME.chat_template to a template that prints them",
                param="tools",
            )
        if not self.traits.shows_all:
            check_messages(messages, self.traits)

    def drop_special(self, token_ids: Iterable[int], *, keep: frozenset[str]) -> list[int]:
        """The tokens without special ones, except those whose text is in ``keep``."""
        special = self._special_ids
        return [token for token in token_ids if token not in special or special[token] in keep]

    def is_special(self, token_id: int) -> bool:
        """Whether this token carries no text of its own."""
        return token_id in self._special_ids

    def _probe(self, *roles: Role, add_generation_prompt: bool) -> str:
        messages = [Message(role, PROBE + role) for role in roles]
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except RequestError as error:
            raise SetupError(f"the chat template cannot render a plain {' and '.join(roles)} turn: {error}") from error

    def _find_stops(self, declared: frozenset[int]) -> frozenset[int]:
        """Ids after which generation ends; harmony ends messages, not replies, with one of the usual enders."""
        if not self._is_harmony:
            return declared
        return (declared | self._ids((HARMONY_RETURN, HARMONY_CALL))) - self._ids((HARMONY_END,))

    def _find_end_of_turn(self, stop_ids: frozenset[int]) -> str:
        """What follows an assistant's words: the first stop token there, else the first special token."""
        text = self._probe("user", "assistant", add_generation_prompt=False)
        _, found, after = text.partition(PROBE + "assistant")
        if not found:
            raise SetupError("the chat template prints no assistant content: set policies.NAME.chat_template")
        for candidates in (self._texts(stop_ids), tuple(self._special_ids.values())):
            places = {after.find(token): token for token in candidates if token in after}
            if places:
                return places[min(places)]
        return ""

    def _find_turn_end_ids(self, stops: frozenset[int]) -> frozenset[int]:
        ends = {index for index in stops if self._special_ids.get(index) in TURN_ENDERS}
        ends |= self._ids((self.eot_text,))
        if self._is_harmony:
            ends |= self._ids((HARMONY_END, HARMONY_RETURN, HARMONY_CALL))
        return frozenset(ends)

    @property
    def _is_harmony(self) -> bool:
        return self.tool_format is ToolFormat.HARMONY

    def _ids(self, texts: Iterable[str]) -> frozenset[int]:
        found = (self._tokenizer.token_to_id(text) for text in texts if text)
        return frozenset(index for index in found if index is not None)

    def _texts(self, token_ids: Iterable[int]) -> tuple[str, ...]:
        return tuple(text for index in sorted(token_ids) if (text := self._tokenizer.id_to_token(index)) is not None)
