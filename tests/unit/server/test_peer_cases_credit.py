"""Cases in which other systems credited the wrong turn or policy, through the real finishing, book and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from wingbeat.core.errors import InvalidReward
from wingbeat.core.protocol import BeginRequest, FinishRequest, LeaseRequest, Rewards
from wingbeat.core.samples import EpisodeSamples
from wingbeat.core.types import FinishReason, Outcome, Split
from wingbeat.server.episodes.registry import EpisodeState, OpenEpisode
from wingbeat.tracking.messages import Message

OpenDesk = Callable[..., Any]
TEAM: dict[str, Any] = {"solver": {}, "verifier": {}, "judge": {"trainable": False}}


async def begun(desk: Any, count: int) -> list[OpenEpisode]:
    """Training episodes without a turn yet."""
    granted = await desk.rollouts.lease(LeaseRequest(max_leases=count, splits=[Split.TRAIN], wait_s=0))
    found: list[OpenEpisode] = []
    for lease in granted.leases:
        request = BeginRequest(idempotency_key=lease.lease_id, lease_id=lease.lease_id)
        reply = await desk.rollouts.begin(request, base_url="http://here/v1")
        found.append(desk.episode(reply.episode_id))
    return found


class Speaker:
    """Model calls of one episode, each continuing the conversation of its policy and agent."""

    def __init__(self, desk: Any, episode: OpenEpisode) -> None:
        self._desk = desk
        self._episode = episode
        self._messages: dict[tuple[str, str], list[Message]] = {}

    def say(self, policy: str = "solver", agent: str = "", *, tokens: tuple[int, ...] = (5, 6), anew: str = "") -> str:
        """``anew`` begins another conversation, which is a fork."""
        if anew:
            self._messages[policy, agent] = [Message("user", anew)]
        messages = self._messages.setdefault((policy, agent), [Message("user", "hi")])
        template = self._desk.policies[policy].template
        plan = self._episode.graph.resolve(policy=policy, agent=agent, messages=messages, tools=None, template=template)
        reply = Message("assistant", f"reply {len(messages)}")
        turn = self._episode.graph.commit(
            plan,
            turn_id=self._episode.new_turn_id(),
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1.0, np.float32),
            versions=((0, len(tokens)),),
            temperature=1.0,
            finish_reason=FinishReason.STOP,
            reply=reply,
        )
        messages += [reply, Message("user", "go on")]
        return turn.turn_id


def members(desk: Any, policy: str = "solver") -> list[EpisodeSamples]:
    draft = desk.policies[policy].buffer.take(0)
    assert draft is not None
    return list(draft.episodes)


async def test_rows_do_not_weigh_in_a_baseline(open_desk: OpenDesk) -> None:
    """agent-lightning#489: rewards 1, 0, 1, 0 in 2, 1, 2, 1 rows: the mean is 0.5 over episodes, not 0.667."""
    desk = open_desk(group_size=4)
    for episode, (reward, rows) in zip(await begun(desk, 4), [(1.0, 2), (0.0, 1), (1.0, 2), (0.0, 1)], strict=True):
        speaker = Speaker(desk, episode)
        for row in range(rows):
            speaker.say(anew=f"question {row}")
        await desk.finishing.finish(episode, FinishRequest(rewards=reward))
    found = members(desk)
    assert [(len(m.samples), m.reward) for m in found] == [(2, 1.0), (1, 0.0), (2, 1.0), (1, 0.0)]
    mean = sum(m.reward for m in found) / len(found)
    assert mean == 0.5
    assert [m.reward - mean for m in found] == [0.5, -0.5, 0.5, -0.5]


async def test_every_turn_carries_its_own_tokens_wherever_they_stand(open_desk: OpenDesk) -> None:
    """SkyRL#1492: turns of one episode begin at different places; each one's own tokens are marked, and no others."""
    desk = open_desk(group_size=2)
    short, long = await begun(desk, 2)
    spoken: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for episode, replies in ((short, [(5,), (6, 7)]), (long, [(8, 9, 10, 11), (12,), (13, 14)])):
        speaker = Speaker(desk, episode)
        spoken[episode.episode_id] = [(speaker.say(tokens=tokens), tokens) for tokens in replies]
        await desk.finishing.finish(episode, FinishRequest(rewards=1.0 if episode is short else 0.0))
    for member in members(desk):
        (sample,) = member.samples
        expected = spoken[member.episode_id]
        assert list(sample.turn_ids) == [turn_id for turn_id, _ in expected]
        marked = np.zeros(sample.num_tokens, np.uint8)
        for start, (_, tokens) in zip(sample.turn_starts, expected, strict=True):
            assert tuple(sample.tokens_T[start : start + len(tokens)].tolist()) == tokens
            marked[start : start + len(tokens)] = 1
        assert sample.sampled_T.tolist() == marked.tolist()


async def test_each_policy_gets_its_own_rewards_turns_and_task(open_desk: OpenDesk) -> None:
    """Per policy, per agent, per turn, in one episode of two trained policies and a frozen one."""
    desk = open_desk(policies=TEAM, group_size=1, drop_zero_variance=False)
    (episode,) = await begun(desk, 1)
    speaker = Speaker(desk, episode)
    first, second = speaker.say(), speaker.say()
    checked = speaker.say("verifier", "strict")
    loose = speaker.say("verifier", "loose")
    judged = speaker.say("judge")
    rewards = Rewards(
        policies={"solver": 1.0, "verifier": 0.25, "judge": 3.0},
        agents={"verifier:loose": -1.0},
        turns={second: 0.5, checked: 2.0, judged: 7.0},
    )
    await desk.finishing.finish(episode, FinishRequest(rewards=rewards))
    (solver,) = members(desk, "solver")
    assert (solver.reward, solver.source, solver.task_id) == (1.5, "src", episode.group.task.id)
    assert [(t.turn_id, t.parent_id, t.reward) for t in solver.turns] == [(first, "", 0.0), (second, first, 0.5)]
    verifier = {m.agent: m for m in members(desk, "verifier")}
    assert {agent: m.reward for agent, m in verifier.items()} == {"strict": 2.25, "loose": -1.0}
    assert [(t.turn_id, t.reward) for t in verifier["strict"].turns] == [(checked, 2.0)]
    assert [(t.turn_id, t.reward) for t in verifier["loose"].turns] == [(loose, 0.0)]
    assert len(desk.policies["judge"].buffer) == 0
    assert desk.finishing.rewards_seen == {"solver": [1.5], "verifier": [0.25]}


async def test_a_reward_for_an_uncalled_policy_is_recorded_and_told_once(open_desk: OpenDesk) -> None:
    desk = open_desk(policies=TEAM, group_size=2)
    episodes = await begun(desk, 2)
    told: list[str] = []
    for episode in episodes:
        Speaker(desk, episode).say()
        rewards = Rewards(policies={"solver": 1.0, "verifier": 0.5, "judge": 0.0})
        told.append((await desk.finishing.finish(episode, FinishRequest(rewards=rewards))).warning)
    assert "'verifier' took no turn in this episode" in told[0] and "trains nothing" in told[0]
    assert "'judge'" not in told[0], "it never trains: nothing is lost"
    assert told[1] == ""
    assert len(desk.policies["verifier"].buffer) == 0
    desk.check_writes()
    recorded = desk.ledger.episode(episodes[0].episode_id)[0].record
    assert recorded is not None and recorded.rewards == {"solver": 1.0, "verifier": 0.5, "judge": 0.0}


@pytest.mark.parametrize(
    ("rewards", "name"),
    [
        (Rewards(policies={"solver": 1.0, "verifer": 1.0}), "verifer"),
        (Rewards(policies={"solver": 1.0}, agents={"verifier:strict": 1.0}), "verifier:strict"),
        (Rewards(policies={"solver": 1.0}, turns={"resp-9": 1.0}), "resp-9"),
    ],
)
async def test_a_reward_for_a_name_the_episode_lacks_is_refused_whole(
    open_desk: OpenDesk, rewards: Rewards, name: str
) -> None:
    desk = open_desk(policies=TEAM)
    episode, _ = await begun(desk, 2)
    Speaker(desk, episode).say()
    with pytest.raises(InvalidReward, match=name):
        await desk.finishing.finish(episode, FinishRequest(rewards=rewards))
    assert episode.state is EpisodeState.OPEN, "the corrected finish may follow"
    assert (await desk.finishing.finish(episode, FinishRequest(rewards={"policies": {"solver": 1.0}}))).warning == ""  # pyright: ignore[reportArgumentType]


async def test_a_called_policy_that_trains_needs_a_reward_unless_nothing_counts(open_desk: OpenDesk) -> None:
    desk = open_desk(policies=TEAM)
    episode, _ = await begun(desk, 2)
    speaker = Speaker(desk, episode)
    speaker.say()
    speaker.say("verifier")
    with pytest.raises(InvalidReward, match="policy 'verifier' took turns but got no reward"):
        await desk.finishing.finish(episode, FinishRequest(rewards=Rewards(policies={"solver": 1.0})))
    reply = await desk.finishing.finish(episode, FinishRequest(outcome=Outcome.ENVIRONMENT))
    assert reply.state == "finished"


@pytest.mark.parametrize("keeps", [False, True])
async def test_the_reward_of_a_superseded_turn_counts_for_its_agent(open_desk: OpenDesk, keeps: bool) -> None:
    """It is part of the agent's reward in any case; a turn that credit goes to it is only where it trains."""
    desk = open_desk(policies={"solver": {"train_superseded": keeps}}, group_size=1, drop_zero_variance=False)
    (episode,) = await begun(desk, 1)
    speaker = Speaker(desk, episode)
    kept = speaker.say()
    lost = speaker.say(anew="again")
    episode.undelivered.add(lost)
    rewards = Rewards(policies={"solver": 1.0}, turns={lost: 0.5})
    await desk.finishing.finish(episode, FinishRequest(rewards=rewards))
    (member,) = members(desk)
    assert member.reward == 1.5
    trained = [kept, lost] if keeps else [kept]
    assert [turn_id for sample in member.samples for turn_id in sample.turn_ids] == trained
    assert [(t.turn_id, t.reward) for t in member.turns] == [(kept, 0.0), (lost, 0.5)][: len(trained)]
