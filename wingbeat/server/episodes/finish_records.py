"""What a finish leaves: everything about an attempt that must be durable before it counts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from wingbeat.core.protocol import FinishRequest
from wingbeat.core.samples import EpisodeSamples
from wingbeat.core.types import UNSAID, Outcome, Split
from wingbeat.dataflow.aging import rebase_member
from wingbeat.dataflow.records import EpisodeRecord
from wingbeat.server.episodes.registry import OpenEpisode
from wingbeat.server.episodes.rewards import Credit, assign_rewards
from wingbeat.server.policies.host import PolicyHost
from wingbeat.tracking.credit import turn_credits
from wingbeat.tracking.serialize import dump_graph
from wingbeat.tracking.timelines import build_samples


def record_of(
    episode: OpenEpisode, request: FinishRequest, digest: str, *, policies: Mapping[str, PolicyHost]
) -> EpisodeRecord:
    """Everything about the attempt that must be durable.  Raises InvalidReward."""
    _mark_superseded(episode)
    credit = credit_of(episode)
    is_agent = request.outcome is Outcome.AGENT
    learners = trainable(episode, policies)
    assigned = assign_rewards(request.rewards, credit, required=learners if is_agent else ())
    rewards = {f"{policy}:{agent}" if agent else policy: reward for (policy, agent), reward in assigned.items()}
    for policy in episode.policies:
        own = [r for (p, _), r in assigned.items() if p == policy]
        if isinstance(request.rewards, float | int):
            rewards.setdefault(policy, float(request.rewards))
        elif policy in request.rewards.policies:
            rewards.setdefault(policy, request.rewards.policies[policy])
        elif own:
            rewards.setdefault(policy, sum(own) / len(own))
    turn_rewards = {} if isinstance(request.rewards, float | int) else request.rewards.turns
    samples = ()
    if trains(episode, request.outcome):
        hosts = {name: policies[name] for name in learners}
        samples = _samples(episode, hosts, rewards=assigned, turn_rewards=turn_rewards)
    return EpisodeRecord(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        group_id=episode.group.id,
        outcome=request.outcome,
        cause=UNSAID[request.outcome],
        finish_digest=digest,
        rewards=rewards,
        metrics=dict(request.metrics),
        samples=samples,
        graph=dump_graph(episode.graph),
        label=episode.label,
        code=episode.code,
        client=episode.client,
        message=request.message,
        num_turns=episode.graph.num_turns,
        created_s=episode.began_s,
        finished_s=time.time(),
    )


def _samples(
    episode: OpenEpisode,
    policies: Mapping[str, PolicyHost],
    *,
    rewards: Mapping[tuple[str, str], float],
    turn_rewards: Mapping[str, float],
) -> tuple[EpisodeSamples, ...]:
    """What each policy and agent trains on."""
    samples: list[EpisodeSamples] = []
    task = episode.group.task
    for policy, host in policies.items():
        keeps = host.config.train_superseded
        turns = turn_credits(episode.graph, policy=policy, rewards=turn_rewards, train_superseded=keeps)
        built = build_samples(episode.graph, policy=policy, episode_id=episode.episode_id, train_superseded=keeps)
        for agent, parts in built.items():
            samples.append(
                EpisodeSamples(
                    episode_id=episode.episode_id,
                    attempt=episode.attempt,
                    group_id=episode.group.id,
                    policy=policy,
                    agent=agent,
                    reward=rewards[(policy, agent)],
                    samples=parts,
                    truncated=(policy, agent) in episode.truncated,
                    turns=turns[agent],
                    source=task.source,
                    task_id=task.id,
                )
            )
    highest = episode.highest_versions
    return tuple(rebase_member(s, highest=highest[s.policy]) if s.policy in highest else s for s in samples)


def trainable(episode: OpenEpisode, policies: Mapping[str, PolicyHost]) -> list[str]:
    """Its policies that learn."""
    return [policy for policy in episode.policies if policies[policy].config.trainable]


def credit_of(episode: OpenEpisode) -> Credit:
    """What the episode holds that can be rewarded."""
    turns = episode.graph.turns
    return Credit(
        agents={(t.policy, t.agent) for t in turns},
        turns={t.turn_id: (t.policy, t.agent) for t in turns},
        policies=episode.policies,
    )


def trains(episode: OpenEpisode, outcome: Outcome) -> bool:
    """Whether a finish with this outcome may train."""
    return outcome is Outcome.AGENT and episode.split is Split.TRAIN


def _mark_superseded(episode: OpenEpisode) -> None:
    """Tell the graph which replies nobody received, and which were sampled again."""
    for turn in episode.graph.turns:
        if turn.turn_id in episode.undelivered:
            episode.graph.mark_undelivered(turn.turn_id)
        else:
            episode.graph.mark_delivered(turn.turn_id)
        if turn.turn_id in episode.resampled:
            episode.graph.mark_resampled(turn.turn_id)
