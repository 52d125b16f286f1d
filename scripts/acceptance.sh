#!/usr/bin/env bash
# Runs real clients against a real server with the shipped model and prints the result of each.
#
#   scripts/acceptance.sh [--golden] [--envs FOLDER] [CLIENT ...]
#   scripts/acceptance.sh --mindformers             tests MindFormers' own networks instead of clients
#   scripts/acceptance.sh --real [--models NAME ..] tests real pretrained models of the package index instead of clients
#
# Each client has an environment of its own in FOLDER (.acceptance), installed from the package index at the first run.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
CDPATH='' cd -- "$(dirname "$(readlink -f "$0")")/.."
if [ "${1:-}" = --mindformers ]; then
    export LLM_SERVING_VENV=${LLM_SERVING_VENV:-$PWD/.acceptance/mindformers}
    bash scripts/install_mindformers.sh dev
    python=$LLM_SERVING_VENV/bin/python
    "$python" -m pytest -c llm-serving/pyproject.toml --rootdir . tests/test_mindformers_networks.py \
        tests/ascend/test_mindformers.py
    for dtype in bfloat16 float16; do
        PYTHONPATH=tests "$python" -m families.exactness --kernels mindformers --dtype $dtype \
            llama2 llama3.1 llama3.2 llama-yarn-told qwen3 qwen3-tied qwen3-yarn qwen3-moe glm4 \
            glm4-moe deepseek-v3-wide
        PYTHONPATH=tests "$python" -m families.exactness --kernels mindformers-legacy --dtype $dtype llama2 llama3.1
    done
    exit
fi
python=.venv/bin/python
if [ "${1:-}" = --real ]; then
    shift
    exec $python tests/acceptance/real/run.py "$@"
fi
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
