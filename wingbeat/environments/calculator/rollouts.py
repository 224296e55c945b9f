"""Plays calculator episodes in process: how warm-up measures the reward it stops at.

Reinforcement does not use this (its episodes arrive over HTTP); it is a small lock-step sampler
with the same loop: question, tool call, tool result, answer. Sampled tokens are kept as they are,
never re-tokenised; the next turn's prompt is those tokens plus the freshly rendered remainder.

Letters: B episodes, T tokens.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from wingbeat.environments.calculator.demonstrations import Message
from wingbeat.environments.calculator.tasks import CALC_TOOL, CalculatorTask, calc, score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(slots=True)
class Rollout:
    """One episode's tokens; `logprobs` is 0 and `sampled` False where a token was rendered."""

    task: CalculatorTask
    token_ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    reward: float = 0.0

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Extend the path by sampled tokens, or by rendered ones if there are no logprobs."""
        self.token_ids += token_ids
        self.sampled += [logprobs is not None] * len(token_ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(token_ids)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A policy to play episodes with; turns and tokens are limited as in the demo's agent."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    generator: torch.Generator = field(default_factory=torch.Generator)
    max_turns: int = 2
    max_turn_tokens: int = 16

    def play(self, tasks: Sequence[CalculatorTask]) -> list[Rollout]:
        """Play one episode of each task, in lock step, at temperature 1."""
        rollouts = [self._begin(task) for task in tasks]
        active = rollouts
        for turn in range(self.max_turns):
            texts = self._sample_turn(active)
            still_active: list[Rollout] = []
            for rollout, text in zip(active, texts, strict=True):
                expression = parse_call(text)
                if expression is None:
                    rollout.reward = score(rollout.task, text)
                elif turn + 1 < self.max_turns:
                    rollout.append(self._render_observation(observe(expression)))
                    still_active.append(rollout)
            active = still_active
            if not active:
                break
        return rollouts

    def _begin(self, task: CalculatorTask) -> Rollout:
        ids = render_ids(self.tokenizer, [{"role": "user", "content": task.question}], add_generation_prompt=True)
        return Rollout(task, ids, [False] * len(ids), [0.0] * len(ids))

    def _render_observation(self, observation: str) -> list[int]:
        body = f"<|im_start|>tool\n<tool_response>{observation}</tool_response><|im_end|>"
        return encode(self.tokenizer, f"\n{body}\n<|im_start|>assistant\n")

    def _sample_turn(self, rollouts: Sequence[Rollout]) -> list[str]:
        prompts = [rollout.token_ids for rollout in rollouts]
        token_ids_BT, logprobs_BT = self._decode(prompts)
        texts: list[str] = []
        for rollout, ids, logprobs in zip(rollouts, token_ids_BT.tolist(), logprobs_BT.tolist(), strict=True):
            eos = self.tokenizer.eos_token_id
            end = ids.index(eos) + 1 if eos in ids else len(ids)
            rollout.append(ids[:end], logprobs[:end])
            texts.append(str(self.tokenizer.decode(ids[:end], skip_special_tokens=True)))
        return texts

    @torch.inference_mode()
    def _decode(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample until every episode's turn ended; rows are padded after their end."""
        pad = self.tokenizer.pad_token_id
        width = max(map(len, prompts))
        input_BT = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids in prompts])
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        ended_B = torch.zeros(len(prompts), dtype=torch.bool)
        cache = DynamicCache(config=self.model.config)
        tokens, logprobs = [], []
        for _ in range(self.max_turn_tokens):
            logits_BV = self.model(
                input_ids=input_BT,
                attention_mask=mask_BT,
                position_ids=position_BT,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            logprobs_BV = logits_BV.float().log_softmax(-1)
            token_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=self.generator)
            tokens.append(token_B1)
            logprobs.append(logprobs_BV.gather(1, token_B1))
            ended_B |= token_B1[:, 0] == self.tokenizer.eos_token_id
            if bool(ended_B.all()):
                break
            input_BT, position_BT = token_B1, position_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, torch.ones_like(token_B1)], dim=1)
        return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)


def render_ids(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> list[int]:
    """A conversation's tokens [T], with the calculator as its tool."""
    text = tokenizer.apply_chat_template(
        list(messages), tools=[CALC_TOOL], add_generation_prompt=add_generation_prompt, tokenize=False
    )
    return encode(tokenizer, str(text))


def encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Tokens [T] of a text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def parse_call(text: str) -> str | None:
    """The expression of a reply's tool call; None if the reply holds no well-formed call."""
    match = _CALL.search(text)
    if match is None:
        return None
    try:
        call = json.loads(match.group(1))
    except ValueError:
        return None
    match call:
        case {"name": "calc", "arguments": {"expression": str(expression)}}:
            return expression
    return None


def observe(expression: str) -> str:
    """What the agent tells the policy that a call returned."""
    try:
        return calc(expression)
    except ValueError as error:
        return f"error: {error}"
