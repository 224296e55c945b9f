"""Wingbeat trains LLM agents with reinforcement learning.

Importing this package (or :mod:`wingbeat.client`) is cheap: it loads no torch, vllm or ray, so that
machines which only run agents stay light.  The public names are those of the client SDK.
"""

from wingbeat.client import Episode, Swarm, agent

__version__ = "0.1.0"

__all__ = ["Episode", "Swarm", "__version__", "agent"]
