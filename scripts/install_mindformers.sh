#!/usr/bin/env bash
# Installs MindFormers for `model_config.implementation: mindformers`, and what its networks import.
#
#   scripts/install_mindformers.sh [EXTRA]          dev: what the tests need, too
#
# MindFormers 2.1 names mindspore ~=2.11 and hyper-parallel, which no package index has: it is installed without its
# dependencies, and those that its networks import are the extra `mindformers` of this project.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
install "[${1:+$1,}mindformers]"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps mindformers==2.1.0
"$venv/bin/python" -c 'import importlib.metadata as m; print("MindFormers", m.version("mindformers"), "is installed")'
