"""The client SDK: run any agent, in any framework, on any machine, against a Wingbeat server.

Light by rule: importing it loads aiohttp, orjson and pydantic, and never torch or transformers.

    @wingbeat.agent
    async def solve(episode):
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        ...
        return reward

    async with AsyncSwarm("http://127.0.0.1:8321") as swarm:
        await Runner(swarm, solve, concurrency=16).run()
"""

from wingbeat.client.agents import Agent, agent, load_agent
from wingbeat.client.episode import Episode
from wingbeat.client.model_clients import MODEL_CALL_RETRIES
from wingbeat.client.plans import RolloutPlan
from wingbeat.client.processes import leave_in_time, run_rollouts, set_up_logging
from wingbeat.client.runner import Runner, RunnerOptions
from wingbeat.client.runner_stats import EpisodeEnd, RunnerStats
from wingbeat.client.swarm import AsyncSwarm, BeginOptions
from wingbeat.client.sync import Swarm, SyncEpisode
from wingbeat.client.team import AsyncTeam
from wingbeat.client.team_episode import TeamEpisode
from wingbeat.client.team_sync import SyncTeamEpisode, Team

__all__ = [
    "MODEL_CALL_RETRIES",
    "Agent",
    "AsyncSwarm",
    "AsyncTeam",
    "BeginOptions",
    "Episode",
    "EpisodeEnd",
    "RolloutPlan",
    "Runner",
    "RunnerOptions",
    "RunnerStats",
    "Swarm",
    "SyncEpisode",
    "SyncTeamEpisode",
    "Team",
    "TeamEpisode",
    "agent",
    "leave_in_time",
    "load_agent",
    "run_rollouts",
    "set_up_logging",
]
