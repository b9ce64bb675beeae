#!/usr/bin/env bash
# Makes the archive that checks and measures splitserve on a machine with a GPU and no network:
#
#     deploy/gpu_check_bundle.sh gpu_check.tar            here: this commit, and the wheels it needs
#     tar xf gpu_check.tar && gpu_check/run.sh OUT        there: ten minutes; results in the folder OUT
#
# That machine brings Python 3.12 (PYTHON_VERSION=3.11 here for another), pip, and torch with Triton. run.sh installs
# into gpu_check/site what is missing there, nothing outside of it, and passes other arguments on:
# gpu_check/run.sh OUT --rehearse runs every part without a GPU. The C++ kernels for CPUs go along where they are built.
# WITHOUT="numpy uvloop" here leaves out wheels that the machine has, where the archive must be smaller.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
PYTHON_VERSION="${PYTHON_VERSION:-3.12}"
LIMIT_MB=60

main() {
    if [[ $# -ne 1 || "$1" == -* ]]; then
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        [[ "${1:-}" == -h || "${1:-}" == --help ]] && return
        return 2
    fi
    local work
    work="$(mktemp -d)"
    trap "rm -rf '$work'" EXIT
    mkdir -p "$work/gpu_check"
    git -C "$ROOT" archive --prefix=gpu_check/tree/ HEAD . ':!tests' ':!docs' ':!bench/results' ':!tools' \
        ':!deploy/demo_model/model.safetensors' | tar x -C "$work"
    cp "$ROOT"/kernels/_cpu.*.so "$work/gpu_check/tree/kernels/" 2>/dev/null || true
    git -C "$ROOT" describe --always --exclude='*' --abbrev=12 >"$work/gpu_check/tree/cli/commit.txt"
    requirements >"$work/gpu_check/requirements.txt"
    wheels "$work/gpu_check"
    write_run_script "$work/gpu_check/run.sh"
    tar cf "$1" -C "$work" gpu_check
    local megabytes=$(($(stat -c %s "$1") / 1000000))
    echo "$1: $megabytes MB" >&2
    if ((megabytes >= LIMIT_MB)); then
        echo "error: more than $LIMIT_MB MB; see which wheels grew: tar tvf $1" >&2
        return 1
    fi
}

# What splitserve[worker,bench] needs, without torch
requirements() {
    "$PYTHON" - "$ROOT/pyproject.toml" <<'END'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
needs = [*project["dependencies"], *extras["worker"], *extras["bench"]]
print("\n".join(each for each in needs if not each.startswith("torch")))
END
}

wheels() {
    local -a platforms=()
    local number name
    for number in 39 35 34 31 28 27 24 17 12 5; do
        platforms+=(--platform "manylinux_2_${number}_x86_64")
    done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
    "$PYTHON" -m pip download -q --only-binary=:all: --python-version "$PYTHON_VERSION" --implementation cp \
        "${platforms[@]}" -d "$1/wheels" -r "$1/requirements.txt"
    for name in ${WITHOUT:-}; do
        rm "$1/wheels/${name//-/_}"-*.whl
    done
}

write_run_script() {
    cat >"$1" <<'END'
#!/usr/bin/env bash
# gpu_check/run.sh OUT [options of python -m splitserve.bench.gpu_check]; PYTHON=... chooses the interpreter
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-python3}"
OUT="${1:?usage: run.sh OUT [options]}"
shift
if [[ ! -f "$HERE/site/.complete" ]]; then
    # what is missing or too old here
    "$PYTHON" -m pip install -q --dry-run --report "$HERE/report.json" --no-index --find-links "$HERE/wheels" -r "$HERE/requirements.txt"
    "$PYTHON" -c '
import json, sys, urllib.parse
for each in json.load(open(sys.argv[1]))["install"]:
    print(urllib.parse.unquote(urllib.parse.urlparse(each["download_info"]["url"]).path))' "$HERE/report.json" |
        xargs -r "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$HERE/site"
    mkdir -p "$HERE/site" && touch "$HERE/site/.complete"
fi
export PYTHONPATH="$HERE/site:$HERE/tree/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HERE/triton}"  # a second call finds what the first has compiled
exec "$PYTHON" -m splitserve.bench.gpu_check --out "$OUT" "$@"
END
    chmod +x "$1"
}

main "$@"
