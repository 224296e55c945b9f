"""Retrieval QA: questions about an invented world, answered by an agent with a search tool.

names, world  people, towns, firms and books with facts, from a seed; one short document each
questions     of one hop or two, split by the entity that they name
scoring       exact match and token F1
environment   the search tool and the agent
recipe        what the tiny model imitates
"""

from wingbeat.environments.retrieval.kind import KIND

__all__ = ["KIND"]
