#!/usr/bin/env bash
# Installs the package if necessary, then starts a server. Returns when it is ready; --foreground runs until Ctrl-C.
#
#   scripts/start.sh [--config YAML] [--model FOLDER|NAME] [--set section.key=value ...] [--port N] [--foreground]
#
# Without --config and --model it serves the demo model with configs/demo_cpu.yaml.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

command=start
arguments=()
has_model=
for argument in "$@"; do
    case $argument in
    --foreground) command=serve ;;
    -h | --help)
        sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit
        ;;
    --config | --config=* | --model | --model=*)
        has_model=yes
        arguments+=("$argument")
        ;;
    *) arguments+=("$argument") ;;
    esac
done
[ -n "$has_model" ] || arguments+=(--config "$root/configs/demo_cpu.yaml")

install ""
if [ "$command" = serve ]; then
    exec "$venv/bin/llm-serving" serve "${arguments[@]}"
fi
exec "$venv/bin/llm-serving" start --run-dir "$run_dir" "${arguments[@]}"
