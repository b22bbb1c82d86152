# Sourced by the scripts beside it: goes to the root of the repository and makes a Python environment there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ensure_environment FOLDER CONDITION PYTHON...: install the package and its tests into FOLDER unless that was done
# for this pyproject.toml in this place; the first PYTHON whose sys.version_info meets CONDITION makes it. The stamp
# is written last, so that a broken-off installation is done again; whoever comes second waits for the first.
ensure_environment() {
    local folder=$1 condition=$2 stamp=$1/.installed wanted
    shift 2
    wanted="$(sha256sum <pyproject.toml) $PWD"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    (
        flock 9
        if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit; fi
        echo "rlsp: installing into $folder; the first time this takes some minutes"
        rm -f "$stamp"
        if ! meets "$condition" "$folder/bin/python"; then
            python=$(first_python "$condition" "$@")
            "$python" -m venv --clear "$folder"
        fi
        # Without a GPU the certified build is taken first; else the range below would pull the newest CUDA build.
        if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
            install_into "$folder" torch==2.13.0
        fi
        install_into "$folder" --editable '.[hf,dashboards,dev]'
        if ! install_into "$folder" --editable '.[tasks]'; then
            echo "rlsp: without the extra 'tasks' (its pycosat needs a C compiler): the default task is refused; run task=arithmetic"
        fi
        echo "$wanted" >"$stamp"
    ) 9>"$folder.lock" >&2
}

install_into() {
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}

meets() {
    "$2" -c "import sys; sys.exit(not ($1))" 2>/dev/null
}

first_python() {
    local condition=$1 python
    shift
    for python in "$@"; do
        if meets "$condition" "$python"; then
            echo "$python"
            return
        fi
    done
    echo "rlsp: no Python with $condition among: $*" >&2
    return 1
}

ensure_venv() {
    ensure_environment .venv 'sys.version_info >= (3, 11)' python3 python3.11 python3.12 python3.13 python
}
