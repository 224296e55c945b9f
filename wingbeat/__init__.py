"""Wingbeat trains LLM agents with reinforcement learning.

Importing this package (or :mod:`wingbeat.client`) is cheap: it loads no torch, vllm or ray, so that
machines which only run agents stay light.
"""

__version__ = "0.1.0"
