"""Versioned weights: published as safetensors files, received by memory-mapping, proven by checksum.

A publisher writes each policy version once, under a name that never changes its content; a receiver on
the same host maps that file and recomputes the checksum from the bytes it will serve.

This module exports nothing, so that ``weights.host`` can be used without torch.
"""
