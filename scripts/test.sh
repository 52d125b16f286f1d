#!/usr/bin/env bash
# Sets up what is missing, then runs lint, types and all tests. Arguments go to pytest.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

install "[dev]"
cd "$root"
config=llm-serving/pyproject.toml
python_folders=(llm-serving tests performance scripts)
"$venv/bin/ruff" check --quiet --config "$config" "${python_folders[@]}"
"$venv/bin/ruff" format --quiet --check --config "$config" "${python_folders[@]}"
find llm-serving/llm_serving/kernels/csrc \( -name '*.cc' -o -name '*.h' \) -print0 |
    xargs -0 "$venv/bin/clang-format" --dry-run -Werror
(cd llm-serving && "$venv/bin/mypy")
[ $# -gt 0 ] || set -- tests
exec "$venv/bin/python" -m pytest -c "$config" --rootdir "$root" "$@"
