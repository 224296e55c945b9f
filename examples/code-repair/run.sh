#!/usr/bin/env bash
# The whole example: a scripted agent earns 1, an idle one 0, then the tiny model trains for 20 steps.
# Arguments are those of `wingbeat train`: bash run.sh --run.steps=2
set -euo pipefail
cd "$(dirname "$0")"

python reference.py
wingbeat train config.toml "$@"
