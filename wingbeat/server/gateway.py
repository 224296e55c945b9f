"""One request, one turn (or ``n``): resolve the prompt in the episode's token graph, generate, commit.

Prompts are token ids that tracking owns; text is only parsed and rendered at the edges.  A turn is
committed when its generation has ended.  If the caller goes away meanwhile, what had reached control is
kept with finish reason "abort" (tokens of a streamed turn; of others nothing has come yet).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from wingbeat.core.errors import ContextOverflow, EpisodeClosed, UnknownPolicy, UnsupportedField
from wingbeat.core.types import FinishReason, SamplingParams, Split
from wingbeat.server.chat import ChatCall
from wingbeat.server.engines import EnginePool
from wingbeat.server.episodes import EpisodeState, OpenEpisode
from wingbeat.server.metrics import ControlMetrics
from wingbeat.server.policies import PolicyHost
from wingbeat.server.text import Generated, TextStream
from wingbeat.tracking.messages import Message, parse_messages
from wingbeat.tracking.parsing import parse_reply
from wingbeat.tracking.turns import PromptPlan


@dataclass(slots=True)
class Choice:
    """One completed turn, as the dialects answer with it."""

    index: int
    turn_id: str
    reply: Message
    finish_reason: FinishReason
    token_ids: list[int]
    logprobs: list[float]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Streaming: text that became final for one choice."""

    index: int
    turn_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated call with its prompt and effective sampling."""

    call: ChatCall
    host: PolicyHost
    version: int | None
    plan: PromptPlan
    sampling: SamplingParams
    enforced: dict[str, str]
    """Response headers that tell what the server decided for a training episode."""


class Gateway:
    """Serves model calls of episodes."""

    def __init__(self, policies: dict[str, PolicyHost], engines: EnginePool, metrics: ControlMetrics) -> None:
        self._policies = policies
        self._engines = engines
        self._metrics = metrics

    def prepare(self, episode: OpenEpisode, call: ChatCall) -> Prepared:
        """Everything that can be refused is refused here, before anything is generated."""
        if call.policy not in episode.policies:
            raise UnknownPolicy(
                f"this episode has no policy {call.policy!r}; it has {', '.join(sorted(episode.policies))}",
                param="model",
            )
        host = self._policies[call.policy]
        plan = episode.graph.resolve(
            policy=call.policy,
            agent=call.agent,
            messages=parse_messages(call.messages),
            tools=call.tools,
            template=host.template,
        )
        room = host.spec.context_tokens - len(plan.prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(plan.prompt_ids)} tokens, and the context of policy {call.policy!r} is"
                f" {host.spec.context_tokens}; shorten the conversation or raise policies.{call.policy}.context_tokens",
                param="messages",
            )
        limit = call.max_tokens or host.config.sampling.max_tokens or room
        temperature, enforced = _temperature(episode.split, call, host)
        sampling = SamplingParams(
            max_tokens=min(limit, room),
            temperature=temperature,
            top_p=call.top_p,
            seed=call.seed,
            stop_token_ids=host.template.eos_token_ids,
        )
        return Prepared(call, host, episode.policies[call.policy], plan, sampling, enforced)

    async def complete(self, episode: OpenEpisode, prepared: Prepared) -> list[Choice]:
        """All ``n`` choices."""
        if prepared.call.n == 1:
            return [await self._choice(episode, prepared, 0)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._choice(episode, prepared, i)) for i in range(prepared.call.n)]
        return [task.result() for task in tasks]

    async def _choice(self, episode: OpenEpisode, prepared: Prepared, index: int) -> Choice:
        async with aclosing(self._turn(episode, prepared, index, stream=False)) as turn:
            async for item in turn:
                if isinstance(item, Choice):
                    return item
        raise AssertionError("a turn ends with its choice")

    async def stream(self, episode: OpenEpisode, prepared: Prepared) -> AsyncGenerator[TextDelta | Choice, None]:
        """Text as it becomes final, then each choice; choices interleave for ``n`` > 1."""
        queue: asyncio.Queue[TextDelta | Choice | BaseException] = asyncio.Queue()

        async def run(index: int) -> None:
            try:
                async with aclosing(self._turn(episode, prepared, index, stream=True)) as turn:
                    async for item in turn:
                        queue.put_nowait(item)
            except asyncio.CancelledError:
                queue.put_nowait(EpisodeClosed(f"episode {episode.episode_id} ended while this call ran"))
                raise
            except Exception as error:  # noqa: BLE001 - handed to the reader below, who raises it
                queue.put_nowait(error)

        tasks = [asyncio.create_task(run(i), name=f"choice-{i}") for i in range(prepared.call.n)]
        episode.calls.update(tasks)
        try:
            pending = len(tasks)
            while pending:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                pending -= isinstance(item, Choice)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            episode.calls.difference_update(tasks)

    async def _turn(
        self, episode: OpenEpisode, prepared: Prepared, index: int, *, stream: bool
    ) -> AsyncGenerator[TextDelta | Choice, None]:
        """Generate one turn and commit it, whatever happens to the caller."""
        turn_id = episode.new_turn_id()
        generated = Generated()
        text = TextStream(prepared.host.template, prepared.call.stop, tools_given=bool(prepared.call.tools))
        watch = stream or bool(prepared.call.stop)
        seed = prepared.sampling.seed
        sampling = prepared.sampling if index == 0 or seed is None else replace(prepared.sampling, seed=seed + index)
        started = time.perf_counter()
        committed = False
        try:
            chunks = self._engines.generate(
                prepared.call.policy,
                prompt_ids=prepared.plan.prompt_ids,
                sampling=sampling,
                cache_key=episode.episode_id,
                version=prepared.version,
                stream=watch,
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    generated.extend(chunk.token_ids, chunk.logprobs, chunk.version)
                    generated.finish = chunk.finish or FinishReason.ABORT
                    if watch and text.feed(generated):
                        generated.finish = FinishReason.STOP
                    if stream and (delta := text.delta()):
                        yield TextDelta(index, turn_id, delta)
                    if text.stopped:
                        break
            choice = self._commit(episode, prepared, index, turn_id, generated, text)
            committed = True
            self._metrics.turn(prepared.call.policy, len(generated.token_ids), time.perf_counter() - started)
            if stream and (rest := text.rest(choice.reply)):
                yield TextDelta(index, turn_id, rest)
            yield choice
        finally:
            if not committed and generated.token_ids and episode.state is EpisodeState.OPEN:
                generated.finish = FinishReason.ABORT
                self._commit(episode, prepared, index, turn_id, generated, text)

    def _commit(
        self,
        episode: OpenEpisode,
        prepared: Prepared,
        index: int,
        turn_id: str,
        generated: Generated,
        text: TextStream,
    ) -> Choice:
        call, template = prepared.call, prepared.host.template
        parsed = parse_reply(template, generated.token_ids, tools_given=bool(call.tools), new_id=new_tool_call_id)
        reply = text.trim(parsed)
        if parsed.tool_calls_malformed:
            self._metrics.malformed_tool_calls.labels(call.policy).inc(parsed.tool_calls_malformed)
        turn = episode.graph.commit(
            prepared.plan,
            turn_id=turn_id,
            token_ids=np.asarray(generated.token_ids, np.int32),
            logprobs=np.asarray(generated.logprobs, np.float32),
            versions=tuple(generated.versions),
            temperature=prepared.sampling.temperature,
            finish_reason=generated.finish,
            reply=reply,
        )
        if turn.fork_reason:
            self._metrics.forks.labels(call.policy).inc()
        if generated.finish is FinishReason.LENGTH:
            episode.truncated.add((call.policy, call.agent))
        return Choice(
            index=index,
            turn_id=turn_id,
            reply=reply,
            finish_reason=generated.finish,
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            num_prompt_tokens=len(prepared.plan.prompt_ids),
        )


def new_tool_call_id() -> str:
    """Unique over the server: agents answer a call by its id."""
    return f"call_{secrets.token_hex(8)}"


def _temperature(split: Split, call: ChatCall, host: PolicyHost) -> tuple[float, dict[str, str]]:
    """Training episodes use the policy's temperature; evaluation obeys the client."""
    if split is Split.EVAL:
        return (1.0 if call.temperature is None else call.temperature), {}
    if call.top_p != 1.0:
        raise UnsupportedField(
            "`top_p` below 1 in a training episode needs the sampled support, which this release does not store;"
            " leave it out, or begin the episode with split=eval",
            param="top_p",
        )
    temperature = host.config.sampling.temperature
    headers = {"x-wingbeat-temperature": f"{temperature:g}"}
    if call.temperature is not None and call.temperature != temperature:
        headers["x-wingbeat-ignored"] = f"temperature={call.temperature:g}"
    return temperature, headers
