#!/usr/bin/env bash
# Installs MindFormers for `model_config.implementation: mindformers`, and the packages that its networks import.
#
#   scripts/install_mindformers.sh [EXTRA]          dev: also installs the packages for tests
#
# MindFormers 2.1 depends on mindspore ~=2.11 and hyper-parallel, which no package index has. So it is installed without
# dependencies; those that its networks import are in the extra `mindformers` of this project.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
install "[${1:+$1,}mindformers]"
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps mindformers==2.1.0
"$venv/bin/python" -c 'import importlib.metadata as m; print("MindFormers", m.version("mindformers"), "is installed")'
