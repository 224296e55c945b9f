"""Code repair: small git repositories with one bug each, mended in a sandbox by an agent with a shell and file tools.

programs     15 small packages with unit tests, and hidden cases
mutations    11 kinds of mistakes, put into a module's source
verify       runs the tests against every mutant: which of them are bugs (index.json)
tasks        one bug each, split into training and held-out ones
environment  leases a sandbox, lets the agent work, scores what it left
judge        the hidden cases, run in that very sandbox (hidden_runner), compared outside of it
recipe       what the tiny model imitates
"""

from wingbeat.environments.code_repair.kind import KIND

__all__ = ["KIND"]
