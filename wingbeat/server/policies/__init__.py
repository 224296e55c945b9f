"""A policy, its trainer and its versions."""
