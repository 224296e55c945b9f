"""One request, one turn (or ``n``): resolve the prompt in the episode's token graph, generate, commit.

Prompts are token ids that tracking owns; text is only parsed and rendered at the edges.  A turn is
committed when its generation has ended.  If the call is given up meanwhile, what had reached control is
kept with finish reason "abort" (tokens of a streamed turn; of others nothing has come yet).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from wingbeat.core.errors import ContextOverflow, UnavailableError, UnknownPolicy
from wingbeat.core.types import FinishReason, SamplingParams
from wingbeat.core.worker_protocol import TokenChunk
from wingbeat.server.calls.model_call import ChatPrompt, Choice, ModelCall, Prepared, TextDelta
from wingbeat.server.calls.prompts import remember, resolve_prompt, with_kept_tools
from wingbeat.server.calls.text import Generated, TextStream
from wingbeat.server.calls.visible import TextRules
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies.host import PolicyHost
from wingbeat.server.workers.engines import EnginePool
from wingbeat.tracking.grammar import build_grammar
from wingbeat.tracking.messages import Message
from wingbeat.tracking.parsing import parse_reply
from wingbeat.tracking.turns import Turn


@dataclass(frozen=True, slots=True)
class Begun:
    """Streaming: an engine has begun to answer."""


Streamed = Begun | TextDelta | Choice


def unknown_policy(name: str, known: Iterable[str]) -> UnknownPolicy:
    """The refusal of a model that the key of a call may not call; it may call ``known``."""
    may = ", ".join(known) or "none of this server's (its --policy names others)"
    return UnknownPolicy(f"no policy {name!r} for this key; it has {may}", param="model")


class Gateway:
    """Serves model calls of episodes."""

    def __init__(
        self,
        policies: dict[str, PolicyHost],
        engines: EnginePool,
        metrics: ControlMetrics,
        *,
        capture: Callable[[OpenEpisode, Turn], None],
    ) -> None:
        """``capture`` makes a committed turn outlive this process."""
        self._policies = policies
        self._engines = engines
        self._metrics = metrics
        self._capture = capture

    def prepare(self, episode: OpenEpisode, call: ModelCall, *, turn_prefix: str = "chatcmpl-") -> Prepared:
        """Everything that can be refused is refused here, before anything is generated."""
        if call.policy not in episode.policies:
            raise unknown_policy(call.policy, episode.policies)
        host = self._policies[call.policy]
        call = with_kept_tools(episode, call)
        plan = resolve_prompt(episode, host, call)
        room = host.spec.context_tokens - len(plan.prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(plan.prompt_ids)} tokens, and the context of policy {call.policy!r} is"
                f" {host.spec.context_tokens}; shorten the conversation or raise policies.{call.policy}.context_tokens",
                param="messages" if isinstance(call.prompt, ChatPrompt) else "prompt",
            )
        limit = call.max_tokens or host.config.sampling.max_tokens or room
        temperature, seed, enforced = _randomness(episode.obeys_caller, call, host)
        sampling = SamplingParams(
            max_tokens=min(limit, room),
            temperature=temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            seed=seed,
            stop_token_ids=host.template.eos_token_ids,
            grammar=build_grammar(
                host.template,
                tools=None if call.tool_choice.mode == "none" else call.tools,
                names=call.tool_choice.names,
                required=call.tool_choice.mode == "required",
                one_call=call.one_tool_call,
                schema=call.schema,
            ),
        )
        turn_ids = tuple(episode.new_turn_id(turn_prefix) for _ in range(call.n))
        return Prepared(call, host, episode.policies[call.policy], plan, sampling, enforced, turn_ids)

    async def complete(self, episode: OpenEpisode, prepared: Prepared) -> list[Choice]:
        """All ``n`` choices."""
        if prepared.call.n == 1:
            return [await self._choice(episode, prepared, 0)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._choice(episode, prepared, i)) for i in range(prepared.call.n)]
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from None
        return [task.result() for task in tasks]

    async def _choice(self, episode: OpenEpisode, prepared: Prepared, index: int) -> Choice:
        async with aclosing(self._turn(episode, prepared, index, stream=False)) as turn:
            async for item in turn:
                if isinstance(item, Choice):
                    return item
        raise AssertionError("a turn ends with its choice")

    async def stream(self, episode: OpenEpisode, prepared: Prepared) -> AsyncGenerator[Streamed, None]:
        """``Begun`` once, text as it becomes final, then each choice; choices interleave for ``n`` > 1."""
        begun = False
        if prepared.call.n == 1:
            items = self._turn(episode, prepared, 0, stream=True)
        else:
            items = self._interleaved(episode, prepared)
        async with aclosing(items):
            async for item in items:
                if not begun:
                    begun = True
                    yield Begun()
                if not isinstance(item, Begun):
                    yield item

    async def _interleaved(self, episode: OpenEpisode, prepared: Prepared) -> AsyncGenerator[Streamed, None]:
        """The turns of all choices, as their items come."""
        queue: asyncio.Queue[Streamed | asyncio.Task[None]] = asyncio.Queue()

        async def run(index: int) -> None:
            async with aclosing(self._turn(episode, prepared, index, stream=True)) as turn:
                async for item in turn:
                    queue.put_nowait(item)

        tasks = [asyncio.create_task(run(i), name=f"choice-{i}") for i in range(prepared.call.n)]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            pending = len(tasks)
            while pending:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    item.result()
                    pending -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn(
        self, episode: OpenEpisode, prepared: Prepared, index: int, *, stream: bool
    ) -> AsyncGenerator[Streamed, None]:
        """Generate one turn and commit it, whatever happens to the caller."""
        call = prepared.call
        turn = _Growing(prepared, index)
        started = time.perf_counter()
        ended = False
        try:
            chunks = self._engines.generate(
                call.policy,
                prompt_ids=prepared.plan.prompt_ids,
                sampling=_seeded(prepared.sampling, index),
                cache_key=episode.episode_id,
                version=prepared.version,
                stream=stream or bool(call.stop),
                client=episode.client,
                floor=min(episode.group.floor_version.get(call.policy, 0), self._policies[call.policy].version),
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    if stream:
                        yield Begun()
                    turn.take(chunk, stream=stream)
                    for kind, text in turn.text.deltas() if stream else ():
                        yield TextDelta(index, turn.turn_id, text, kind)
                    if turn.text.stopped:
                        break
            async with episode.graph_lock:
                ended = True  # not before: whoever gives up while it waits here leaves an abandoned turn
                episode.require_open()
                choice = self._commit(episode, prepared, turn)
            self._metrics.turn(call.policy, len(choice.token_ids), time.perf_counter() - started)
            if choice.finish_reason is FinishReason.ABORT:
                raise UnavailableError("the engine gave this generation up; send the request again")
            for kind, text in turn.text.rest(choice.reply) if stream else ():
                yield TextDelta(index, turn.turn_id, text, kind)
            yield choice
        finally:
            if not ended and turn.generated.token_ids:
                turn.generated.finish = FinishReason.ABORT
                async with episode.graph_lock:
                    if episode.state is EpisodeState.OPEN:
                        self._commit(episode, prepared, turn)

    def _commit(self, episode: OpenEpisode, prepared: Prepared, growing: _Growing) -> Choice:
        """Append the turn to the episode's graph, and to the disk before anyone is told of it."""
        call, generated = prepared.call, growing.generated
        reply = growing.reply()
        if growing.tool_calls_malformed:
            self._metrics.malformed_tool_calls.labels(call.policy).inc(growing.tool_calls_malformed)
        turn = episode.graph.commit(
            prepared.plan,
            turn_id=growing.turn_id,
            token_ids=np.asarray(generated.token_ids, np.int32),
            logprobs=np.asarray(generated.logprobs, np.float32),
            versions=tuple(generated.versions),
            temperature=prepared.sampling.temperature,
            finish_reason=generated.finish,
            reply=reply if growing.rules.plain is False else None,
            text=growing.whole_text(),
            supports=generated.supports,
        )
        remember(episode, call, turn)
        self._capture(episode, turn)
        if turn.fork_reason and turn.parent_id is None:
            self._metrics.forks.labels(call.policy).inc()
        if generated.finish is FinishReason.LENGTH:
            episode.truncated.add((call.policy, call.agent))
        return Choice(
            index=growing.index,
            turn_id=growing.turn_id,
            reply=reply,
            finish_reason=generated.finish,
            stop_text=growing.text.stop_text,
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            num_prompt_tokens=len(prepared.plan.prompt_ids),
        )


class _Growing:
    """One turn while it is sampled."""

    def __init__(self, prepared: Prepared, index: int) -> None:
        self.index = index
        self.turn_id = prepared.turn_ids[index]
        self.rules = rules_of(prepared.call)
        self.generated = Generated(is_truncated=_is_truncated(prepared.sampling))
        self.text = TextStream(prepared.host.template, self.rules)
        self.tool_calls_malformed = 0
        self._template = prepared.host.template

    def take(self, chunk: TokenChunk, *, stream: bool) -> None:
        """More tokens; the text tells whether they end the turn."""
        self.generated.extend(chunk)
        self.generated.finish = chunk.finish or FinishReason.ABORT
        if (stream or self.rules.ends_early) and self.text.feed(self.generated):
            self.generated.finish = FinishReason.STOP

    def reply(self) -> Message:
        """What the caller is answered; of an abandoned stream, what it was sent."""
        sent = self.text.keep_sent(self.generated) if self.generated.finish is FinishReason.ABORT else None
        if sent is not None:
            return sent
        if self.rules.plain:
            text = self.whole_text()
            return Message("assistant", text.partition(self.text.stop_text)[0] if self.text.stop_text else text)
        parsed = parse_reply(
            self._template,
            self.generated.token_ids,
            tools_given=self.rules.tools_given,
            new_id=new_tool_call_id,
        )
        self.tool_calls_malformed = parsed.tool_calls_malformed
        return self.text.trim(parsed)

    def whole_text(self) -> str:
        """Of a plain completion: all that its tokens say, a stop string included."""
        return self.text.decode(self.generated.token_ids) if self.rules.plain else ""


def new_tool_call_id() -> str:
    """Unique over the server: agents answer a call by its id."""
    return f"call_{secrets.token_hex(8)}"


def rules_of(call: ModelCall) -> TextRules:
    """How this call's replies are read."""
    tools_given = bool(call.tools) and call.tool_choice.mode != "none"
    return TextRules(
        stop=call.stop,
        tools_given=tools_given,
        one_call=tools_given and call.one_tool_call,
        plain=not isinstance(call.prompt, ChatPrompt),
    )


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choices of one call must differ."""
    return sampling if index == 0 or sampling.seed is None else replace(sampling, seed=sampling.seed + index)


def _is_truncated(sampling: SamplingParams) -> bool:
    """Whether tokens are drawn from a part of the vocabulary, so that training needs to know which."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or bool(sampling.grammar))


def _randomness(obeys: bool, call: ModelCall, host: PolicyHost) -> tuple[float, int | None, dict[str, str]]:
    """Temperature, seed and the headers that tell of them.

    Evaluation obeys the client, and so does production.  Training uses the policy's temperature and no seed: an
    agent's habitual ``temperature: 0`` or fixed seed would make all members of a group say the same.
    """
    if obeys:
        return (1.0 if call.temperature is None else call.temperature), call.seed, {}
    temperature = host.config.sampling.temperature
    ignored: list[str] = []
    if call.temperature is not None and call.temperature != temperature:
        ignored.append(f"temperature={call.temperature:g}")
    if call.seed is not None:
        ignored.append(f"seed={call.seed}")
    headers = {"x-wingbeat-temperature": f"{temperature:g}"}
    if ignored:
        headers["x-wingbeat-ignored"] = ", ".join(ignored)
    return temperature, None, headers


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
