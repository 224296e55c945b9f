"""Agent episodes of three shapes as our own tracking records them: what the trainer benchmarks train on.

    single   one agent: 10 turns, each but the last calls a tool and reads its result
    team     planner, worker and critic with private contexts that send each other what they wrote
    forks    one agent with a retry, two sub-agents, a compaction of its context, and a follow-up question
             before which its template strips the old reasoning

The words are drawn from a seed, the structure is real: every prompt goes through the chat template and the
token graph, so what merges, forks or is excluded is decided by the code that decides it for live agents.
A group holds episodes of one task, alike up to their first sampled token.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from wingbeat.core.samples import EpisodeSamples, TrainingBatch, TrainingSample
from wingbeat.core.types import FinishReason
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, build_samples, parse_message

POLICY = "solver"
VOCABULARY = 4096
END, START = "<|im_end|>", "<|im_start|>"
LOGPROB_NOISE = 0.2
"""Standard deviation of the sampling logprobs around a uniform policy's: some ratios are then clipped."""

_VOCABULARY_TEXT = """
account address agent amount answer archive array attempt balance batch branch buffer build cache call
cell change channel check client clock code column command commit compare config copy count customer data
date default delete deploy detail device draft edge email engine entry error event example export fail
field file filter find fix flag folder form function graph group handle header history host image import
index input invoice issue item job key label last layer ledger length level limit line link list load local
log loop match memory merge message method metric missing mode model module month name network node note
number object offset open option order output owner package page parse patch path payment plan point policy
port price process profile query queue range rate read record refund region remove report request reset
resource response result retry return review route row rule run sample schema scope search section send
server service session shard shipment signal size socket source span stage start state step store stream
string sum table tag target task team test text thread ticket time token total trace track type unit update
user value vector version view wait walk weight window worker write the of to and in is that for with as on
by this it from at are was be not which will has before after should because when each same only then
"""
WORDS = _VOCABULARY_TEXT.split()

TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' -%}{{ '<tool_response>\\n' + text(message.content) + '\\n</tool_response>' }}
{%- elif message.role == 'assistant' -%}
{%- if message.reasoning_content and loop.index0 > last.user -%}
{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{%- else -%}{{ text(message.content) }}
{%- endif -%}
{%- if loop.first and tools -%}
{{ '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools>\\nReturn each call as JSON within <tool_call></tool_call>.' }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""In the manner of Qwen 3: old reasoning is left out once the user has spoken again."""


class Author:
    """Draws texts; the same seed, the same texts."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def words(self, low: int, high: int) -> str:
        """Sentences of so many words in all, drawn log-uniformly between both."""
        rng = self._rng
        count = round(math.exp(rng.uniform(math.log(low), math.log(high))))
        words = [rng.choice(WORDS) for _ in range(count)]
        for start in range(0, count, 12):
            words[start] = words[start].capitalize()
            words[min(start + 11, count - 1)] += "."
        return " ".join(words)

    def name(self) -> str:
        return "_".join(self._rng.sample(WORDS, 2))

    def arguments(self) -> dict[str, Any]:
        return {"path": f"src/{self.name()}/{self.name()}.py", "query": self.words(3, 12), "limit": self.number()}

    def number(self) -> int:
        return self._rng.randrange(10_000)

    def tool_result(self) -> str:
        """Lines of a listing or a log, then prose."""
        lines = [f"{self.number()}: {self.name()} = {self.words(3, 8)}" for _ in range(self._rng.randint(1, 4))]
        return "\n".join([*lines, self.words(6, 24)])

    def logprobs(self, count: int) -> list[float]:
        uniform = -math.log(VOCABULARY)
        return [min(-1e-3, self._rng.gauss(uniform, LOGPROB_NOISE)) for _ in range(count)]


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of at most ``VOCABULARY`` tokens, trained on texts of the same author, and the template."""
    author = Author(seed=-1)
    corpus = [f"{author.words(20, 60)}\n{author.tool_result()}\n{json.dumps(author.arguments())}" for _ in range(600)]
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(plain),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", START, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


class Recorder:
    """One episode in the making."""

    def __init__(self, template: ChatTemplate, *, episode_id: str, seed: int) -> None:
        self.graph = EpisodeGraph(episode_id)
        self.author = Author(seed)
        self._template = template

    def turn(
        self,
        conversation: Sequence[Message],
        *,
        tools: list[dict[str, Any]],
        agent: str = "",
        calls_tool: bool = False,
        thinks: bool = True,
    ) -> Message:
        """Sample one reply to a conversation and commit it; the reply as a client receives it."""
        serial = self.graph.num_turns
        content = self.author.words(8, 24) if thinks else self.author.words(20, 60)
        reply: dict[str, Any] = {"role": "assistant", "content": content}
        text = content
        if thinks:
            reply["reasoning_content"] = self.author.words(16, 50)
            text = f"<think>\n{reply['reasoning_content']}\n</think>\n\n{text}"
        if calls_tool:
            arguments = self.author.arguments()
            call = {"name": "search_files", "arguments": json.dumps(arguments)}
            reply["tool_calls"] = [{"id": f"call-{serial}", "type": "function", "function": call}]
            call_text = json.dumps({"name": "search_files", "arguments": arguments})
            text += f"\n<tool_call>\n{call_text}\n</tool_call>"
        plan = self.graph.resolve(
            policy=POLICY, agent=agent, messages=conversation, tools=tools or None, template=self._template
        )
        token_ids = self._template.encode(text + END)
        message = parse_message(reply)
        self.graph.commit(
            plan,
            turn_id=f"t{serial:03d}",
            token_ids=token_ids,
            logprobs=self.author.logprobs(len(token_ids)),
            versions=[(0, len(token_ids))],
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            reply=message,
        )
        return message

    def tool_loop(self, conversation: list[Message], *, turns: int, **how: Any) -> None:
        """Turns that each call a tool; replies and results are appended."""
        for _ in range(turns):
            reply = self.turn(conversation, calls_tool=True, **how)
            conversation += [reply, self.tool_result(reply)]

    def tool_result(self, reply: Message) -> Message:
        call_id = reply.tool_calls[0].id
        return parse_message({"role": "tool", "tool_call_id": call_id, "content": self.author.tool_result()})


def say(role: str, content: str) -> Message:
    return parse_message({"role": role, "content": content})


def tool_schemas(author: Author, *, count: int) -> list[dict[str, Any]]:
    """Function schemas of about 80 tokens each; the first is the one that agents call."""
    names = ["search_files", *(author.name() for _ in range(count - 1))]
    fields = {"path": "string", "query": "string", "limit": "integer"}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": author.words(15, 25),
                "parameters": {
                    "type": "object",
                    "properties": {f: {"type": kind, "description": author.words(4, 8)} for f, kind in fields.items()},
                    "required": ["path"],
                },
            },
        }
        for name in names
    ]


def record_single(recorder: Recorder, task: Author) -> None:
    """10 turns of one agent."""
    tools = tool_schemas(task, count=2)
    conversation = [say("system", task.words(90, 110)), say("user", task.words(40, 60))]
    recorder.tool_loop(conversation, turns=9, tools=tools)
    recorder.turn(conversation, tools=tools)


def record_team(recorder: Recorder, task: Author) -> None:
    """4 rounds: the planner asks, the worker looks something up and answers, the critic judges for the planner."""
    charter = task.words(70, 90)
    tools = tool_schemas(task, count=2)
    contexts = {
        agent: [say("system", f"{charter}\nYou are the {agent}. {task.words(60, 80)}")]
        for agent in ("planner", "worker", "critic")
    }

    def speak(agent: str, heard: str, tools: list[dict[str, Any]]) -> str:
        context = contexts[agent]
        context.append(say("user", heard))
        if tools:
            recorder.tool_loop(context, turns=1, agent=agent, thinks=False, tools=tools)
        reply = recorder.turn(context, agent=agent, thinks=False, tools=tools)
        context.append(reply)
        return text_of(reply)

    heard = task.words(40, 60)
    for _ in range(4):
        plan = speak("planner", heard, [])
        answer = speak("worker", plan, tools)
        heard = speak("critic", f"Plan: {plan}\nAnswer: {answer}", [])


def record_forks(recorder: Recorder, task: Author) -> None:
    """Everything that makes a conversation not a straight line."""
    tools = tool_schemas(task, count=2)
    system = say("system", task.words(90, 110))
    question = say("user", task.words(40, 60))
    conversation = [system, question]
    recorder.tool_loop(conversation, turns=2, tools=tools)
    recorder.turn(conversation, tools=tools)  # its answer was lost: the agent asks again and goes on with the new one
    recorder.tool_loop(conversation, turns=2, tools=tools)
    for _ in range(2):
        errand = [system, say("user", f"Sub-task: {recorder.author.words(20, 30)}")]
        recorder.tool_loop(errand, turns=2, tools=tools)
        conversation.append(say("user", text_of(recorder.turn(errand, tools=tools))))
    conversation.append(recorder.turn(conversation, tools=tools))
    summary = say("user", f"Summary so far: {recorder.author.words(80, 120)}")
    compacted = [system, question, summary]
    recorder.tool_loop(compacted, turns=3, tools=tools)
    compacted += [recorder.turn(compacted, tools=tools), say("user", recorder.author.words(15, 30))]
    recorder.tool_loop(compacted, turns=1, tools=tools)
    recorder.turn(compacted, tools=tools)


def text_of(message: Message) -> str:
    """What a reply says, as text."""
    return str(message.to_template_dict()["content"])


SHAPES: dict[str, Callable[[Recorder, Author], None]] = {
    "single": record_single,
    "team": record_team,
    "forks": record_forks,
}


def record_group(shape: str, *, episodes: int, seed: int, template: ChatTemplate) -> list[EpisodeGraph]:
    """The episodes of one task."""
    graphs: list[EpisodeGraph] = []
    for index in range(episodes):
        recorder = Recorder(template, episode_id=f"{shape}-{seed}-{index}", seed=1000 * seed + index + 1)
        SHAPES[shape](recorder, Author(1000 * seed))
        graphs.append(recorder.graph)
    return graphs


def merged_batch(graphs: Sequence[EpisodeGraph]) -> TrainingBatch:
    """One sample per timeline, as the server hands them to the trainer; every other episode is rewarded."""
    episodes = tuple(
        EpisodeSamples(graph.episode_id, 1, "group", POLICY, agent, float(index % 2), samples)
        for index, graph in enumerate(graphs)
        for agent, samples in build_samples(graph, policy=POLICY, episode_id=graph.episode_id).items()
    )
    return TrainingBatch(batch_id="merged", policy=POLICY, step=1, episodes=episodes, seed=0)


def turn_rows_batch(graphs: Sequence[EpisodeGraph]) -> TrainingBatch:
    """The same trained tokens, one sample per turn: its whole prompt and its reply, of which the reply trains."""
    by_id = {graph.episode_id: graph for graph in graphs}
    merged = merged_batch(graphs)
    episodes = tuple(
        EpisodeSamples(e.episode_id, 1, "group", POLICY, e.agent, e.reward, tuple(_rows(by_id[e.episode_id], e)))
        for e in merged.episodes
    )
    return TrainingBatch(batch_id="rows", policy=POLICY, step=1, episodes=episodes, seed=0)


def _rows(graph: EpisodeGraph, episode: EpisodeSamples) -> Iterator[TrainingSample]:
    for turn in (graph.turn(turn_id) for sample in episode.samples for turn_id in sample.turn_ids):
        token_ids = graph.full_ids(turn)
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[turn.prompt_length :] = turn.logprobs
        sampled = np.arange(len(token_ids)) >= turn.prompt_length
        yield TrainingSample.build(
            turn.turn_id,
            token_ids=token_ids,
            sampled=sampled.astype(np.uint8),
            sampling_logprobs=logprobs,
            versions=np.where(sampled, 0, -1).astype(np.int32),
            temperature=turn.temperature,
            turn_ids=(turn.turn_id,),
        )


def num_tokens(batch: TrainingBatch) -> int:
    return sum(sample.num_tokens for episode in batch.episodes for sample in episode.samples)


def num_trained(batch: TrainingBatch) -> int:
    return sum(episode.num_sampled for episode in batch.episodes)
