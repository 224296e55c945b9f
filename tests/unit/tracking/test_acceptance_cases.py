"""Cases on which published systems went wrong, one named test each: what came in, and what is right.

They are the "context and tokens" cases of our study of peers; each names the public reports that it is
taken from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from wingbeat.core.samples import TrainingSample
from wingbeat.core.types import FinishReason, Provenance
from wingbeat.tracking import ChatTemplate, EpisodeGraph, Message, Turn, build_samples, parse_messages, parse_reply

Say = Callable[..., Turn]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HELLO = Message("user", "hello")


def call(graph: EpisodeGraph, prompt: Sequence[int], sampled: Sequence[int]) -> Turn:
    """A model call given by token ids alone."""
    return graph.commit(
        graph.resolve_tokens(policy="solver", agent="", token_ids=prompt),
        turn_id=f"t{graph.num_turns}",
        token_ids=sampled,
        logprobs=[-0.5] * len(sampled),
        versions=[(0, len(sampled))],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
    )


def samples_of(graph: EpisodeGraph) -> tuple[TrainingSample, ...]:
    return build_samples(graph, policy="solver", episode_id="e").get("", ())


def shifted_mask(sample: TrainingSample) -> str:
    """As trainers see it: whether the *next* token trains."""
    return "".join(map(str, sample.sampled_T[1:]))


def trained_tokens(sample: TrainingSample) -> list[int]:
    return sample.tokens_T[sample.sampled_T.astype(bool)].tolist()


def test_three_turns_that_extend_each_other_are_one_sample() -> None:
    """tinker-cookbook, multiturn_weight_assignment_test."""
    graph = EpisodeGraph("e")
    call(graph, [1, 2, 3, 4, 5], [10, 11, 12])
    call(graph, [1, 2, 3, 4, 5, 10, 11, 12, 20, 21], [30, 31])
    call(graph, [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 30, 31, 40], [50, 51, 52])
    (sample,) = samples_of(graph)
    assert shifted_mask(sample) == "000011100110111"
    assert trained_tokens(sample) == [10, 11, 12, 30, 31, 50, 51, 52]


def test_two_unrelated_turns_are_two_samples() -> None:
    """tinker-cookbook, multiturn_weight_assignment_test."""
    graph = EpisodeGraph("e")
    call(graph, [1, 2, 3], [10, 11])
    call(graph, [50, 51, 52], [60, 61])
    assert [shifted_mask(sample) for sample in samples_of(graph)] == ["0011", "0011"]


def drifting_template(folder: Path) -> ChatTemplate:
    """A vocabulary in which "hello" can be one token or several, and text encodes as the longest."""
    vocabulary = {"h": 0, "e": 1, "l": 2, "o": 3, "hell": 4, "he": 5, "llo": 6, ":": 7, "u": 8, "a": 9, "ll": 10}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("ll", "o")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    source = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": source}))
    return ChatTemplate.load(folder)


def test_sampled_ids_train_though_their_text_encodes_otherwise(tmp_path: Path, say: Say) -> None:
    """rllm#272: sampled [53122, 316], re-encoded [393, 30002]."""
    template = drifting_template(tmp_path)
    sampled = [5, 6, *template.encode("<end>")]  # he + llo
    assert template.encode("hello") == [4, 3]  # hell + o
    graph = EpisodeGraph("e")
    first = say(graph, template, [Message("user", "u")], token_ids=sampled)
    assert first.reply.content == "hello"
    second = say(graph, template, [Message("user", "u"), Message("assistant", "hello"), Message("user", "u")], "o<end>")
    assert second.parent_id == first.turn_id
    assert graph.prompt_ids(second).tolist()[: first.end] == graph.full_ids(first).tolist()
    (sample,) = samples_of(graph)
    assert trained_tokens(sample)[:3] == sampled


def test_a_prompt_that_drifts_on_the_last_token_of_the_reply_forks() -> None:
    """slime's realignment and ART#782: response 1 ends in 12, but the next prompt spells it 13."""
    graph = EpisodeGraph("e")
    call(graph, [1, 2], [10, 11, 12])
    second = call(graph, [1, 2, 10, 11, 13, 20], [30])
    assert (second.parent_id, second.fork_reason) == (None, "token 4 differs (12 -> 13)")
    one, two = samples_of(graph)
    assert (one.tokens_T.tolist(), trained_tokens(one)) == ([1, 2, 10, 11, 12], [10, 11, 12])
    assert (two.tokens_T.tolist(), trained_tokens(two)) == ([1, 2, 10, 11, 13, 20, 30], [30])


def test_a_text_reply_that_the_client_changed_at_its_end_forks(chatml: ChatTemplate, say: Say) -> None:
    """The same on the level of messages: each reply trains on the prompt that it saw."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "as well <|im_end|>")
    second = say(graph, chatml, [HELLO, Message("assistant", "as well"), HELLO], "so<|im_end|>")
    assert second.fork_reason == "message 1 differs: content ('as well ' -> 'as well')"
    one, two = samples_of(graph)
    assert trained_tokens(one) == first.sampled.tolist()
    assert trained_tokens(two) == second.sampled.tolist()
    assert two.tokens_T.tolist() == graph.full_ids(second).tolist()


def test_qwen3_strips_the_thought_of_an_earlier_answer(templates: dict[str, ChatTemplate], say: Say) -> None:
    """prime-rl#1334: U1, <think>R</think>A1, U2 renders without R: a new sample, no assertion."""
    qwen3 = templates["qwen3"]
    graph = EpisodeGraph("e")
    first = say(graph, qwen3, [HELLO], "<think>\nwhy\n</think>\n\nA1<|im_end|>")
    second = say(graph, qwen3, [*first.messages, Message("user", "U2")], "A2<|im_end|>")
    assert second.parent_id is None
    assert second.fork_reason.startswith("template rewrites history at character ")
    assert "why" in second.fork_reason
    assert "why" not in qwen3.decode(graph.prompt_ids(second).tolist())
    assert [trained_tokens(sample) for sample in samples_of(graph)] == [first.sampled.tolist(), second.sampled.tolist()]


def test_what_a_template_writes_after_the_stop_token_is_prompt(chatml: ChatTemplate, say: Say) -> None:
    """verl#3720, codescout#60: the engine stops at <|im_end|>, the template goes on with a newline."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], "as<|im_end|>")
    second = say(graph, chatml, [*first.messages, HELLO], "so<|im_end|>")
    newline = chatml.encode("\n")
    assert second.segment.tolist()[:1] == newline
    assert second.segment_runs == ((Provenance.RENDERED, len(second.segment)),)
    (sample,) = samples_of(graph)
    assert sample.tokens_T.tolist()[first.end : first.end + 1] == newline
    assert sample.sampled_T[first.end] == 0
    assert sample.sampled_T[first.end - 1] == 1


def test_an_assistant_message_that_was_never_sampled_is_prompt(chatml: ChatTemplate, say: Say) -> None:
    """NeMo Gym#2254: a summary that the harness wrote has no captured ids; it trains nothing and invents none."""
    graph = EpisodeGraph("e")
    history = [HELLO, Message("assistant", "so far: as well"), Message("user", "go on")]
    turn = say(graph, chatml, history, "so<|im_end|>")
    (sample,) = samples_of(graph)
    assert trained_tokens(sample) == turn.sampled.tolist()
    assert turn.segment_runs == ((Provenance.RENDERED, turn.prompt_length),)
    assert "so far: as well" in chatml.decode(graph.prompt_ids(turn).tolist())


def test_a_turn_without_any_token_trains_nothing(chatml: ChatTemplate, say: Say) -> None:
    """The same report: an empty reply stays empty, and is never made into [0]."""
    graph = EpisodeGraph("e")
    turn = say(graph, chatml, [HELLO], token_ids=[])
    assert turn.sampled.tolist() == []
    assert samples_of(graph) == ()
    follow = say(graph, chatml, [*turn.messages, HELLO], "as<|im_end|>")
    assert follow.parent_id == turn.turn_id
    assert follow.segment_runs[0] == (Provenance.FORCED, 1)


def test_control_tokens_that_a_parser_drops_stay_sampled(chatml: ChatTemplate, say: Say) -> None:
    """agent-lightning#326: the agent sees a parsed message; the ids are those that were sampled, marks and all."""
    text = '<think>\nwhy\n</think>\n\nsum<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    graph = EpisodeGraph("e")
    turn = say(graph, chatml, [HELLO], text, tools=TOOLS)
    assert (turn.reply.content, turn.reply.reasoning, len(turn.reply.tool_calls)) == ("sum", "why", 1)
    assert turn.sampled.tolist() == chatml.encode(text)
    answer = Message("tool", "2", tool_call_id=turn.reply.tool_calls[0].id)
    follow = say(graph, chatml, [*turn.messages, answer], "2<|im_end|>", tools=TOOLS)
    assert chatml.decode(graph.prompt_ids(follow).tolist()[turn.prompt_length : turn.end]) == text


@pytest.mark.parametrize("text", ["<tool_call>{}</tool_call>", '<tool_call>{"name": "add", "arg', "<tool_call>"])
def test_a_malformed_call_goes_back_to_the_model(chatml: ChatTemplate, say: Say, text: str) -> None:
    """trl#4881: the rollout continues with an error observation, and the tokens stay."""
    graph = EpisodeGraph("e")
    first = say(graph, chatml, [HELLO], f"{text}<|im_end|>", tools=TOOLS)
    parsed = parse_reply(chatml, first.sampled.tolist(), tools_given=True, new_id=lambda: "c")
    assert (parsed.tool_calls_malformed, parsed.message.content) == (1, text)
    told = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "error: that is no valid call"},
    ]
    second = say(graph, chatml, parse_messages(told), "so<|im_end|>", tools=TOOLS)
    assert second.parent_id == first.turn_id
    (sample,) = samples_of(graph)
    assert trained_tokens(sample) == [*first.sampled.tolist(), *second.sampled.tolist()]


def test_ids_mask_and_logprobs_have_one_length_whatever_text_encodes_to(tmp_path: Path, say: Say) -> None:
    """trl#5144: retokenising a completion shortens it; here nothing is retokenised."""
    template = drifting_template(tmp_path)
    spelled = [0, 1, 2, 2, 3, *template.encode("<end>")]
    assert len(template.encode("hello<end>")) < len(spelled)
    graph = EpisodeGraph("e")
    first = say(graph, template, [Message("user", "u")], token_ids=spelled)
    say(graph, template, [*first.messages, Message("user", "u")], token_ids=spelled)
    (sample,) = samples_of(graph)
    lengths = [len(x) for x in (sample.tokens_T, sample.sampled_T, sample.sampling_logprobs_T, sample.versions_T)]
    assert set(lengths) == {graph.turns[1].end}
    assert sample.num_sampled == 2 * len(spelled)


def test_a_real_end_token_trains_though_it_also_pads(tmp_path: Path, say: Say) -> None:
    """trl#4974: pad id = EOS id; nothing here is masked by its id."""
    template = drifting_template(tmp_path)
    (end,) = template.encode("<end>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<end>"}))
    template = ChatTemplate.load(tmp_path)
    graph = EpisodeGraph("e")
    first = say(graph, template, [Message("user", "u")], "hello<end>")
    say(graph, template, [*first.messages, Message("user", "u")], "o<end>")
    (sample,) = samples_of(graph)
    assert trained_tokens(sample).count(end) == 2
    assert sample.tokens_T.tolist().count(end) == 4


def test_a_merged_timeline_is_as_long_as_its_turns_together(chatml: ChatTemplate, say: Say) -> None:
    """rllm#575: turns are capped at 8k tokens, the merged row has 100k; nothing is cut, silently or otherwise."""
    graph = EpisodeGraph("e")
    letter = chatml.encode("h")
    messages: tuple[Message, ...] = (HELLO,)
    for _ in range(13):
        turn = say(graph, chatml, messages, token_ids=letter * 8_000, finish=FinishReason.LENGTH)
        messages = (*turn.messages, HELLO)
    (sample,) = samples_of(graph)
    assert sample.num_sampled == 13 * 8_000
    assert sample.num_tokens == graph.turns[-1].end > 100_000
    assert all(turn.finish_reason is FinishReason.LENGTH for turn in graph.turns)
