#!/usr/bin/env bash
# Stops the servers that scripts/start.sh started.
#
#   scripts/stop.sh [--port N]
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

[ -x "$venv/bin/llm-serving" ] || die "nothing has been installed in $venv yet, so nothing was started from it"
exec "$venv/bin/llm-serving" stop --run-dir "$run_dir" "$@"
