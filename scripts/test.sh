#!/usr/bin/env bash
# Installs the package if necessary, then runs lint, types and all tests. Tests run in two processes more than there are
# CPUs, at most four, because some tests wait. Arguments are passed to pytest, which then runs in one process unless they
# contain `--processes N`.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
# Byte code is written, because dozens of servers and WorkAgents import the package.
unset PYTHONDONTWRITEBYTECODE

install "[dev]"
compile_kernels --tests
kernels=$!
cd "$root"
config=llm-serving/pyproject.toml
python_folders=(llm-serving tests performance scripts)
"$venv/bin/ruff" check --quiet --config "$config" "${python_folders[@]}"
"$venv/bin/ruff" format --quiet --check --config "$config" "${python_folders[@]}"
find llm-serving/llm_serving/kernels/csrc \( -name '*.cc' -o -name '*.h' \) -print0 |
    xargs -0 "$venv/bin/clang-format" --dry-run -Werror
# Beside the tests: after a change of a module that many import, mypy takes a quarter of a minute of one core, and while
# pytest collects, the other cores are idle.
(cd llm-serving && exec "$venv/bin/python" -m mypy) >"$venv/types.log" 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
if [ $# -eq 0 ]; then
    processes=$(($(nproc) + 2))
    set -- tests --processes $((processes < 4 ? processes : 4))
fi
if kill -0 "$kernels" 2>/dev/null; then
    echo "waiting for the kernels of all instruction sets; progress: $venv/compile.log"
fi
# Otherwise tests that need another instruction set wait for the compiler longer than a test may last.
wait "$kernels" || echo "the kernels were not compiled: $(tail -n 1 "$venv/compile.log")" >&2
status=0
"$venv/bin/python" -m pytest -c "$config" --rootdir "$root" "$@" || status=$?
wait "$types" || status=1
cat "$venv/types.log"
exit "$status"
