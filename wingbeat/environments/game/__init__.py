"""A two-player text game for several policies: Nim.

nim           rules, moves, perfect play
environment   who plays whom, what they are told, what they earn
recipe        what the tiny model imitates
"""

from wingbeat.environments.game.kind import KIND

__all__ = ["KIND"]
