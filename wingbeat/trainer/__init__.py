"""Optimisation of one policy: advantages, losses, log-probabilities, optimiser, checkpoints.

Invariant: every loss is a weighted sum over tokens whose weights are fixed for the whole batch before
the first forward, so micro-batching changes memory and speed but never a gradient.

This module exports nothing, so that importing one part (``trainer.models``, ``trainer.advantages``)
does not load the others.
"""
