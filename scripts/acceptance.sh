#!/usr/bin/env bash
# Runs real clients against a real server of the shipped model and prints what came of each.
#
#   scripts/acceptance.sh [--golden] [--envs FOLDER] [CLIENT ...]
#
# Each client has an environment of its own, made from the package index the first time and kept in FOLDER (.acceptance).
set -e
cd "$(dirname "$0")/.."
python=.venv/bin/python
port=$($python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
run_dir=$(mktemp -d)
end() {
    .venv/bin/llm-serving stop --run-dir "$run_dir" --port "$port" || true
    rm -rf "$run_dir"
}
trap end EXIT
.venv/bin/llm-serving start --model demo --port "$port" --run-dir "$run_dir" \
    --set model_config.pooling=last --set serving_config.tool_call_parser=hermes
$python tests/acceptance/run.py --url "http://127.0.0.1:$port" "$@"
