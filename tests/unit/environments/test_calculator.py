"""The calculator: tasks and scores, its tokenizer and template, and the warm-up of its model."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wingbeat.environments.calculator import (
    CALC_TOOL,
    DEMO_PRESET,
    all_tasks,
    best_constant,
    calc,
    make_split,
    score,
)
from wingbeat.environments.calculator.demonstrations import CarelessAgent
from wingbeat.environments.calculator.tokenizer import PHRASES, build_tokenizer, write_tokenizer

Message = dict[str, Any]


def conversations() -> st.SearchStrategy[list[Message]]:
    """Any order of roles, with tool calls whose arguments are a dict or a JSON string."""
    text = st.text(max_size=12)
    expression = st.text(alphabet="0123456789+-*", max_size=5)
    arguments = st.builds(
        lambda value, encode: json.dumps(value) if encode else value,
        st.fixed_dictionaries({"expression": expression}),
        st.booleans(),
    )
    call = st.builds(
        lambda value: {"type": "function", "function": {"name": "calc", "arguments": value}},
        arguments,
    )
    assistant = st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | text},
        optional={"tool_calls": st.lists(call, max_size=2)},
    )
    other = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": text})
    return st.lists(assistant | other, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without warm-up: config and tokenizer as the server finds them."""
    from wingbeat.environments.calculator.model import build_model

    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    build_model(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hf_tokenizer(model_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


def test_split_is_a_partition_and_depends_only_on_the_seed() -> None:
    train, heldout = make_split(3)
    assert (train, heldout) == make_split(3)
    assert heldout != make_split(4)[1]
    assert (len(train), len(heldout)) == (195, 105)
    assert sorted(task.id for task in train + heldout) == sorted(task.id for task in all_tasks())


def test_a_task_is_solved_by_its_expression() -> None:
    task = next(task for task in all_tasks() if task.id == "calculator/3-minus-8")
    assert (task.question, task.expression, task.answer) == ("what is 3 minus 8 ?", "3-8", "-5")
    for task in all_tasks():
        assert score(task, f" {calc(task.expression)}\n") == 1.0


@pytest.mark.parametrize("text", ["", "1 1", "11.", "the answer is 11", "011", "1"])
def test_only_the_exact_answer_scores(text: str) -> None:
    task = next(task for task in all_tasks() if task.id == "calculator/3-plus-8")
    assert score(task, text) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_no_constant_answer_scores_well(seed: int) -> None:
    _, heldout = make_split(seed)
    answer, mean = best_constant(heldout)
    assert mean == sum(score(task, answer) for task in heldout) / len(heldout)
    assert mean < 0.2
    assert all(sum(score(task, other.answer) for task in heldout) / len(heldout) <= mean for other in heldout)


@given(left=st.integers(0, 999), right=st.integers(0, 999), third=st.integers(0, 999))
def test_calc_agrees_with_arithmetic(left: int, right: int, third: int) -> None:
    assert calc(f"{left}+{right}*{third}") == str(left + right * third)
    assert calc(f" ({left} - {right}) * -{third}") == str((left - right) * -third)


@given(st.text(max_size=80) | st.text(alphabet="0123456789+-*() ", max_size=80))
def test_calc_returns_an_integer_or_raises_value_error(expression: str) -> None:
    try:
        result = calc(expression)
    except ValueError as error:
        assert "expected" in str(error)
    else:
        assert str(int(result)) == result


@pytest.mark.parametrize("expression", ["2**9", "3/4", "abs(3)", "3+", "", "08", "3 4", "9(8)", "9" * 65, "9" * 40])
def test_calc_refuses(expression: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        calc(expression)


def test_every_phrase_is_one_token_and_the_vocabulary_is_reproducible() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.to_str() == build_tokenizer().to_str()
    for phrase in PHRASES:
        assert len(tokenizer.encode(phrase).ids) == 1, phrase
    assert len(tokenizer.encode("3+8").ids) == 3


@given(st.text(max_size=60))
def test_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer_once()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_loads_the_folder(hf_tokenizer: Any) -> None:
    assert hf_tokenizer.decode(hf_tokenizer.eos_token_id) == "<|im_end|>"
    assert hf_tokenizer.pad_token_id != hf_tokenizer.eos_token_id
    ids = hf_tokenizer("<tool_call>é3</tool_call><|im_end|>")["input_ids"]
    assert hf_tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>é3</tool_call>"
    prompt = hf_tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is 3 plus 8 ?"}],
        tools=[CALC_TOOL],
        add_generation_prompt=True,
    )["input_ids"]
    assert len(prompt) == 16
    assert prompt == build_tokenizer().encode(hf_tokenizer.decode(prompt)).ids


@settings(deadline=None)
@given(messages=conversations(), with_tools=st.booleans())
def test_a_finished_turn_stays_a_prefix(hf_tokenizer: Any, messages: list[Message], with_tools: bool) -> None:
    def render(upto: int, prompt: bool = False) -> str:
        return hf_tokenizer.apply_chat_template(
            messages[:upto],
            tools=[CALC_TOOL] if with_tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
        )

    whole = render(len(messages))
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = render(index + 1)
        assert turn.endswith("<|im_end|>\n")
        assert whole.startswith(turn.removesuffix("\n"))
        if index:
            assert turn.startswith(render(index, prompt=True))


def test_a_call_renders_as_hermes_json(hf_tokenizer: Any) -> None:
    rendered = {
        hf_tokenizer.apply_chat_template(
            [{"role": "assistant", "tool_calls": [{"function": function}]}], tokenize=False
        )
        for arguments in ({"expression": "3+8"}, '{"expression": "3+8"}')
        for function in [{"name": "calc", "arguments": arguments}]
    }
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "3+8"}}</tool_call>'
    assert rendered == {f"<|im_start|>assistant\n{call}<|im_end|>\n"}


def test_a_demonstration_trains_only_what_the_assistant_wrote(hf_tokenizer: Any) -> None:
    from wingbeat.environments.calculator.model import encode_demonstration

    agent = CarelessAgent(call_rate=1.0, expression_rate=1.0, report_rate=1.0)
    task = next(task for task in all_tasks() if task.id == "calculator/3-plus-8")
    ids, trained = encode_demonstration(hf_tokenizer, agent.demonstrate(task, random.Random(0)))
    written = [token for token, mask in zip(ids, trained, strict=True) if mask]
    call = '<tool_call>{"name": "calc", "arguments": {"expression": "3+8"}}</tool_call>'
    assert hf_tokenizer.decode(written) == f"{call}<|im_end|>11<|im_end|>"


def test_the_careless_agent_earns_what_it_expects() -> None:
    agent, rng = CarelessAgent(), random.Random(0)
    rewards = [score(task, agent.demonstrate(task, rng)[-1]["content"]) for task in rng.choices(all_tasks(), k=5000)]
    assert agent.expected_reward < sum(rewards) / 5000 < agent.expected_reward + 0.06 < 0.35


def test_a_few_steps_of_warm_up_lower_the_loss_and_leave_global_randomness(
    hf_tokenizer: Any,
) -> None:
    import torch

    from wingbeat.environments.calculator.model import WarmUpConfig, build_model, warm_up

    config = WarmUpConfig(round_steps=8, max_extra_rounds=0, check_episodes=8)
    before = torch.random.get_rng_state()
    runs = [warm_up(build_model(0), hf_tokenizer, 0, config=config) for _ in range(2)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert runs[0].last_loss == runs[1].last_loss
    assert runs[0].last_loss < runs[0].first_loss
    assert runs[0].steps == 8


def test_the_sampler_plays_and_records_what_it_sampled(hf_tokenizer: Any) -> None:
    import torch

    from wingbeat.environments.calculator.model import build_model
    from wingbeat.environments.calculator.rollouts import Sampler

    model = build_model(1)
    sampler = Sampler(model, hf_tokenizer, torch.Generator().manual_seed(0))
    for rollout in sampler.play(all_tasks()[:3]):
        logits = model(torch.tensor([rollout.token_ids[:-1]])).logits[0].log_softmax(-1)
        for index, (sampled, logprob) in enumerate(zip(rollout.sampled, rollout.logprobs, strict=True)):
            if sampled:
                expected = logits[index - 1, rollout.token_ids[index]].item()
                assert logprob == pytest.approx(expected, abs=1e-4)


def test_the_preset_is_consistent() -> None:
    assert DEMO_PRESET.group_size >= 2
    assert DEMO_PRESET.steps >= DEMO_PRESET.expected_steps
    assert DEMO_PRESET.steps * DEMO_PRESET.groups_per_step * DEMO_PRESET.group_size <= 6000


def build_tokenizer_once(cache: list[Any] = []) -> Any:  # noqa: B006
    """Hypothesis calls a test many times; the tokenizer is the same every time."""
    if not cache:
        cache.append(build_tokenizer())
    return cache[0]
