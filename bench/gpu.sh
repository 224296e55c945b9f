#!/usr/bin/env bash
# What one accelerator does with Wingbeat, in at most ten minutes: bash bench/gpu.sh [--tiny]
#
# Needs Python 3.11 with torch and transformers, and of Wingbeat's own dependencies those that the report names where
# one is missing. It installs nothing, downloads nothing and needs neither vLLM nor Wingbeat itself to be installed.
# PYTHON names the interpreter; else it is .venv's, else python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
exec "$PYTHON" -m bench.gpu "$@"
