# Sourced by the other scripts: finds Python 3.11 or 3.12, creates a virtual environment, and installs the package if
# necessary. Sets root (folder of the project), venv and run_dir; LLM_SERVING_VENV and LLM_SERVING_RUN_DIR override the
# latter two.

set -o pipefail # a pipeline fails if any of its commands fails
root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${LLM_SERVING_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv # some scripts change the working directory
run_dir=${LLM_SERVING_RUN_DIR:-$root/.run} # process ids and logs of background servers

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

# describe_progress LINE: prints what an installation does: a line of pip, or how many of the packages are installed; and
# how many sources of the kernels are compiled meanwhile.
describe_progress() {
    local text=$1 names kernels
    if [[ $text == "Installing collected packages: "* ]]; then
        names=${text//[!,]/}
        text="$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' -newer "$venv/install.log.start" | wc -l)"
        text="$text of $((${#names} + 1)) packages installed"
    fi
    kernels=$(grep -o '[0-9]* of [0-9]* sources' "$venv/compile.log" 2>/dev/null | tail -n 1) || true
    printf '%.100s%s' "$text" "${kernels:+; kernels: $kernels compiled}"
}

# show_progress TITLE: shows the progress of an installation, whose output it reads: on a terminal in one line, elsewhere
# in a new line every 10 s.
show_progress() {
    local title=$1 line last="" status start=$SECONDS shown=$SECONDS every=10
    if [ -t 2 ]; then every=1; else echo "$title ..." >&2; fi
    while true; do
        status=0
        IFS= read -r -t "$every" line || status=$?
        [ "$status" -ne 0 ] || last=${line#"${line%%[![:space:]]*}"}
        [ "$status" -eq 0 ] || [ "$status" -gt 128 ] || break # above 128: timeout
        if [ $((SECONDS - shown)) -ge "$every" ]; then
            line="$title ($((SECONDS - start)) s): $(describe_progress "$last")"
            if [ -t 2 ]; then printf '\r\033[K%.120s' "$line" >&2; else echo "$line" >&2; fi
            shown=$SECONDS
        fi
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
    echo "$title: $((SECONDS - start)) s" >&2
}

# make_venv: creates a virtual environment with pip, or completes an incomplete one.
make_venv() {
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python=$(find_python) || exit 1
    [ -x "$venv/bin/python" ] || rm -f "$venv"/bin/python* # broken links to a removed Python, which venv would keep
    "$python" -m venv "$venv" ||
        die "cannot make a virtual environment in $venv; install Python's venv (on Debian: python3.11-venv) and try again"
}

# compile_kernels [--tests]: compiles the operator library in the background if it is missing, with the kernels for this
# CPU, or for every instruction set that it runs. Processes that need them wait for them, and report errors.
compile_kernels() {
    PYTHONPATH="$root/llm-serving" "$venv/bin/python" -S -m llm_serving.kernels.compiler "$@" >"$venv/compile.log" 2>&1 9>&- &
}

# is_installed: succeeds if $venv contains the package with the extras of `install`, and its Python exists. An
# installation with extras is sufficient if none are requested.
is_installed() {
    [ -x "$venv/bin/python" ] && grep -qF -- "$extras installed $fingerprint" "$venv/installed" 2>/dev/null
}

# install EXTRAS: installs the package with these extras ("" or "[dev]") into $venv, unless it is installed already.
install() {
    local extras=$1 fingerprint
    fingerprint=$(cat "$root/llm-serving/pyproject.toml" "$root/llm-serving/requirements.lock" | cksum)
    fingerprint="$fingerprint $root" # an editable installation refers to its folder
    if ! { mkdir -p "$venv" && exec 9>"$venv/install.lock"; } 2>/dev/null; then
        is_installed && return # a read-only installation is sufficient
        die "cannot write to $venv; make it writable, or put the virtual environment elsewhere with LLM_SERVING_VENV"
    fi
    flock 9 # concurrent scripts install one after the other
    if ! is_installed; then
        make_venv
        touch "$venv/install.log.start"
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
