#!/usr/bin/env bash
# Accepts a device and writes one report: environment, precision of every family, right answers, long contexts, time of
# steps, equal bytes alone and under load, kill and restart, and the contest's load test with its published figures.
#
#   scripts/ascend_acceptance.sh --model FOLDER [--dtype float16] [--exactness exact|fast] [--report FILE.md]
#   scripts/ascend_acceptance.sh --device cpu --rate 3 --seconds 5 --families llama2 qwen3    a rehearsal
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
install "[dev,ascend]"
exec env PYTHONPATH="$root/tests" "$venv/bin/python" -m acceptance.device.run "$@"
