# Sourced by the other scripts: finds Python 3.11 or 3.12, makes a virtual environment and installs the package when something
# is missing. Sets: root (folder of the project), venv and run_dir (LLM_SERVING_VENV and LLM_SERVING_RUN_DIR put them
# elsewhere).

set -o pipefail # what fails is often piped into something that does not
root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${LLM_SERVING_VENV:-$root/.venv}
run_dir=${LLM_SERVING_RUN_DIR:-$root/.run} # pids and logs of servers in the background

die() {
    echo "error: $*" >&2
    exit 1
}

# find_python: prints a Python 3.11 or 3.12.
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or 3.12 is needed and was not found; install it (on Debian: apt-get install python3.11 python3.11-venv)"
}

# show_progress TITLE: one line that is written over on a terminal; elsewhere a line now and then, 10 s apart at most.
show_progress() {
    local title=$1 line last="" status start=$SECONDS shown=$SECONDS
    if [ -t 2 ]; then
        while IFS= read -r line; do
            line=${line#"${line%%[![:space:]]*}"}
            printf '\r\033[K%s (%d s): %.60s' "$title" $((SECONDS - start)) "$line" >&2
        done
        printf '\r\033[K%s: %d s\n' "$title" $((SECONDS - start)) >&2
    else
        echo "$title ..." >&2
        while true; do
            status=0
            IFS= read -r -t 10 line || status=$?
            [ "$status" -ne 0 ] || last=${line#"${line%%[![:space:]]*}"}
            [ "$status" -eq 0 ] || [ "$status" -gt 128 ] || break # above 128: nothing came in time
            if [ $((SECONDS - shown)) -ge 10 ]; then
                printf '%s (%d s): %.100s\n' "$title" $((SECONDS - start)) "$last" >&2
                shown=$SECONDS
            fi
        done
        echo "$title: $((SECONDS - start)) s" >&2
    fi
}

# make_venv: a virtual environment with pip; one that was left half made is completed.
make_venv() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python=$(find_python) || exit 1
    [ -x "$venv/bin/python" ] || rm -f "$venv"/bin/python* # links to a Python that is gone, which venv would keep
    "$python" -m venv "$venv" ||
        die "cannot make a virtual environment in $venv; install Python's venv (on Debian: python3.11-venv) and try again"
}

# compile_kernels: compiles the operator library if it is not there, beside what follows; whoever needs the library
# waits for it, and says what went wrong.
compile_kernels() {
    PYTHONPATH="$root/llm-serving" "$venv/bin/python" -S -m llm_serving.kernels.compiler >"$venv/compile.log" 2>&1 9>&- &
}

# is_installed: whether $venv holds the package with what `install` was asked for, and its Python is still there. An
# install with extras serves where none are asked for.
is_installed() {
    [ -x "$venv/bin/python" ] && grep -qF -- "$extras installed $fingerprint" "$venv/installed" 2>/dev/null
}

# install EXTRAS: makes $venv hold the package with the given extras ("" or "[dev]"); at once when it does already.
install() {
    local extras=$1 fingerprint
    fingerprint=$(cat "$root/llm-serving/pyproject.toml" "$root/llm-serving/requirements.lock" | cksum)
    fingerprint="$fingerprint $root" # an editable install points at its folder
    if ! { mkdir -p "$venv" && exec 9>"$venv/install.lock"; } 2>/dev/null; then
        is_installed && return # whoever may only read it needs no more
        die "cannot write to $venv; make it writable, or put the virtual environment elsewhere with LLM_SERVING_VENV"
    fi
    flock 9 # two first starts install one after the other
    if ! is_installed; then
        make_venv
        compile_kernels
        if ! "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
            -c "$root/llm-serving/requirements.lock" -e "$root/llm-serving$extras" 2>&1 |
            tee "$venv/install.log" | show_progress "installing into ${venv/#$root\//}"; then
            tail -n 20 "$venv/install.log" >&2
            die "the packages could not be installed; the whole output is in $venv/install.log"
        fi
        echo "$extras installed $fingerprint" >"$venv/installed"
    fi
    exec 9>&-
}
