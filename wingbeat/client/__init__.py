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
from wingbeat.client.processes import RolloutPlan, run_rollouts, set_up_logging
from wingbeat.client.runner import EpisodeEnd, Runner, RunnerOptions, RunnerStats
from wingbeat.client.swarm import AsyncSwarm, BeginOptions
from wingbeat.client.sync import Swarm, SyncEpisode

__all__ = [
    "Agent",
    "AsyncSwarm",
    "BeginOptions",
    "Episode",
    "EpisodeEnd",
    "RolloutPlan",
    "Runner",
    "RunnerOptions",
    "RunnerStats",
    "Swarm",
    "SyncEpisode",
    "agent",
    "load_agent",
    "run_rollouts",
    "set_up_logging",
]
