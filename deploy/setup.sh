# shellcheck shell=bash
# Makes .venv at the root of the repository ready. Sourced by the scripts beside it:
#
#     source setup.sh && prepare serve     what is needed to serve
#     source setup.sh && prepare test      and to test
#
# Does nothing when nothing has changed since the last time. PYTHON=... chooses the interpreter.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/test_packages.sh
source "$ROOT/deploy/test_packages.sh"
VENV="$ROOT/.venv"
TORCH_CPU="torch==2.13.0"
TRITON_CPU="triton==3.6.0"

say() { printf '%s\n' "-- $*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

prepare() {
    {
        flock 9 # several roles may be started at once from one clone
        if [[ "$1" == test ]]; then
            make_venv
            (install_test_packages && install_node_client && install_helm && install_nixl) & # beside pip
        fi
        prepare_alone "$1"
        wait
    } 9<"${BASH_SOURCE[0]}"
}

prepare_alone() {
    local purpose="$1" stamp
    make_venv
    stamp="$(fingerprint)" || die "this clone is not complete: the file named above is missing. Clone the repository again."
    if [[ "$(cat "$VENV/.prepared-$purpose" "$VENV/.prepared-test" 2>/dev/null)" == *"$stamp"* ]]; then
        return
    fi
    if [[ "$purpose" == test ]]; then install_package test; else install_package all; fi
    report_kernels
    echo "$stamp" >"$VENV/.prepared-$purpose"
}

make_venv() {
    if "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        return
    fi
    local python
    python="$(find_python)" || die "Python 3.11 or newer is needed and was not found. Install it (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: PYTHON=/path/to/python3 $0"
    say "making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv --clear "$VENV" ||
        die "$python cannot make virtual environments. Install its venv module (Debian, Ubuntu: apt-get install python3-venv) and run this again."
}

# The first new enough Python that can make virtual environments; else the first new enough one.
find_python() {
    local candidate needs
    local -a candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    for needs in "sys, venv, ensurepip" "sys"; do
        for candidate in "${candidates[@]}"; do
            if "$candidate" -c "import $needs; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
                command -v "$candidate"
                return
            fi
        done
    done
    return 1
}

# Changes whenever an installation would give something else.
fingerprint() {
    (
        cd "$ROOT" || exit
        "$VENV/bin/python" --version
        if has_gpu; then echo gpu; fi
        command -v c++ || command -v g++ || echo "no compiler"
        cksum pyproject.toml setup.py deploy/setup.sh deploy/constraints.txt kernels/cpu/*.cpp kernels/cpu/*.h
    ) | cksum
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1
}

# Without a GPU: the version that the tests pass with. With one: what pyproject.toml's range and the package index give.
install_torch() {
    if ! has_gpu && ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
        say "installing $TORCH_CPU (a few minutes the first time). Where the package index has no CPU build it brings CUDA's libraries along, some 4 GB:" \
            "PyTorch's index of CPU builds (https://pytorch.org/get-started/locally names it) as PIP_EXTRA_INDEX_URL makes that 0.2 GB."
        pip_install "$TORCH_CPU"
    fi
}

# With the requirements of one extra. The kernels are compiled meanwhile, on all cores.
install_package() {
    local kernels
    local -a needed
    mapfile -t needed < <(requirements "$1")
    if [[ "$1" == test ]] && ! has_gpu && ! "$VENV/bin/python" -c 'import importlib.metadata as m; m.version("triton")' 2>/dev/null; then
        needed+=("$TRITON_CPU") # a CPU build of torch brings none
    fi
    rm -f "$ROOT"/kernels/_cpu.cpython-*.so # of an earlier build: it would be found before the one that is made now
    say "installing splitserve and what it needs"
    pip_install setuptools # what torch needs replaces it; beside the build, which imports it, that ended some installations
    pip_install --no-deps --editable "$ROOT" &
    kernels=$!
    install_torch
    pip_install "${needed[@]}"
    "$VENV/bin/python" -m compileall -q -j 0 -x '/(_inductor|anthropic|distutils|fontTools|graphql|lexers|moto|mypyc?|networkx|physics|pip|testing|tests|transformers/models)/' "$VENV/lib" >/dev/null || true
    wait "$kernels" || exit 1
}

# Those of the package, of an extra and of the extras that it names, line by line
requirements() {
    "$VENV/bin/python" - "$ROOT/pyproject.toml" "$1" <<'END'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
def of(extra):
    for each in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"splitserve\[(.*)\]", each)
        yield from [each] if own is None else (need for name in own[1].split(",") for need in of(name))
print("\n".join([*project["dependencies"], *of(sys.argv[2])]))
END
}

# For the tests of its mover. Its build for either CUDA works without a GPU; with the other one it would be half a gigabyte. Tried at most once.
install_nixl() {
    if [[ -e "$VENV/.nixl-tried" ]] || "$VENV/bin/python" -c 'import nixl' 2>/dev/null; then
        return
    fi
    touch "$VENV/.nixl-tried"
    say "installing NIXL"
    (pip_install --no-deps nixl nixl-cu12) 2>/dev/null || say "NIXL could not be installed: the tests of its mover are skipped"
}

pip_install() {
    local said
    said="$(mktemp)"
    if ! PIP_ROOT_USER_ACTION=ignore "$VENV/bin/python" -m pip install --progress-bar off --disable-pip-version-check --no-compile \
        --constraint "$ROOT/deploy/constraints.txt" "$@" 2>&1 | tee "$said" | show_progress; then
        tail -n 40 "$said" >&2
        die "pip could not install ${*: -1} (its message is above). Is the package index reachable? Behind a proxy set HTTPS_PROXY, for a mirror PIP_INDEX_URL; then run this again."
    fi
    rm "$said"
}

# Of what pip says: what takes long.
show_progress() {
    { grep -E --line-buffered '^(WARNING: Retrying| *(Downloading|Building wheel|Installing collected))' || true; } |
        sed -u -E 's/^(.{100}[^ ,]*).+/\1 .../' >&2
}

report_kernels() {
    if ! "$VENV/bin/python" -c 'import splitserve.kernels._cpu' 2>/dev/null; then
        say "the C++ kernels were not built: plain torch computes instead, more slowly. Install a C++ compiler (Debian, Ubuntu: apt-get install g++) and run this again."
    fi
}
