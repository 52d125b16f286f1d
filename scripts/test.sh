#!/usr/bin/env bash
# Sets up what is missing, then runs lint, types and all tests, the latter in two processes more than there are CPUs, four
# at most: some of them wait. Arguments go to pytest, which then runs in one process unless they say otherwise
# (--processes 2).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
# Dozens of servers and WorkAgents import the package; they should find it compiled.
unset PYTHONDONTWRITEBYTECODE

install "[dev]"
compile_kernels
cd "$root"
config=llm-serving/pyproject.toml
python_folders=(llm-serving tests performance scripts)
"$venv/bin/ruff" check --quiet --config "$config" "${python_folders[@]}"
"$venv/bin/ruff" format --quiet --check --config "$config" "${python_folders[@]}"
find llm-serving/llm_serving/kernels/csrc \( -name '*.cc' -o -name '*.h' \) -print0 |
    xargs -0 "$venv/bin/clang-format" --dry-run -Werror
pytest=("$venv/bin/python" -m pytest -c "$config" --rootdir "$root")
if [ $# -eq 0 ]; then
    processes=$(($(nproc) + 2))
    set -- tests --processes $((processes < 4 ? processes : 4))
    # Beside the types: leaves the byte code of tests that have changed.
    if [ ! -e "$venv/collected" ] || [ -n "$(find tests -name '*.py' -newer "$venv/collected" -print -quit)" ]; then
        { touch "$venv/collected.next" && "${pytest[@]}" tests --collect-only --quiet &&
            mv "$venv/collected.next" "$venv/collected"; } >/dev/null 2>&1 &
        collected=$!
    fi
fi
(cd llm-serving && "$venv/bin/python" -m mypy)
[ -z "${collected:-}" ] || wait "$collected" || true # what is wrong there the tests say
exec "${pytest[@]}" "$@"
