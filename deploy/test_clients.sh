#!/usr/bin/env bash
# Sets up and runs the tests that drive the server with other people's clients. Most run against a real cluster (tests/clients/test_trials.py):
# each one for Python in an environment of its own in .venv-trials, those for Node and codex and opencode in tests/clients/trials; 2 GB together.
# LiteLLM and LangChain share .venv-clients, for they want older versions of packages that the other tests use.
# --json FILE: writes down what was run, and with which versions.
#
#     deploy/test_clients.sh [--json bench/results/clients.json]
set -euo pipefail
# shellcheck source=deploy/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

CLIENTS="$ROOT/.venv-clients"
TRIALS="$ROOT/.venv-trials"
OURS=(tests/coordinator/generate/test_openai_client.py tests/coordinator/routes/test_schemathesis.py tests/clients/test_node.py
    tests/clients/test_trials.py tests/coordinator/dialects/test_ollama.py)
OTHERS=(tests/clients/test_python_clients.py)

# What it does not have itself, it takes from .venv.
make_clients_venv() {
    local stamp
    stamp="$(cksum <"$ROOT/deploy/clients.txt") $("$VENV/bin/python" --version)"
    if [[ "$(cat "$CLIENTS/.prepared" 2>/dev/null)" == "$stamp" ]]; then
        return
    fi
    say "installing LiteLLM and LangChain in .venv-clients"
    "$VENV/bin/python" -m venv --clear "$CLIENTS"
    "$VENV/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
        >"$("$CLIENTS/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_tests.pth"
    "$CLIENTS/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --requirement "$ROOT/deploy/clients.txt" ||
        die "pip could not install deploy/clients.txt (its message is above). Is the package index reachable?"
    LITELLM_LOCAL_MODEL_COST_MAP=True "$CLIENTS/bin/python" -W ignore -c 'import langchain_openai, litellm' ||
        die "deploy/clients.txt is not complete (what is missing is named above)."
    echo "$stamp" >"$CLIENTS/.prepared"
}

make_trials() {
    local stamp name line
    local -a packages
    stamp="$(cat "$ROOT/deploy/trials.txt" "$ROOT/tests/clients/trials/package.json" | cksum) $("$VENV/bin/python" --version)"
    if [[ "$(cat "$TRIALS/.prepared" 2>/dev/null)" == "$stamp" ]]; then
        return
    fi
    rm -f "$TRIALS/.prepared"
    say "installing the clients of deploy/trials.txt in .venv-trials, and those for Node"
    while read -r name line; do
        read -ra packages <<<"$line"
        "$VENV/bin/python" -m venv --clear "$TRIALS/$name"
        "$TRIALS/$name/bin/python" -m pip install -qq --disable-pip-version-check "${packages[@]}" ||
            die "pip could not install ${packages[*]} (its message is above). Is the package index reachable?"
    done < <(grep -v '^#' "$ROOT/deploy/trials.txt")
    npm --prefix "$ROOT/tests/clients/trials" install --no-package-lock --silent --no-audit --no-fund ||
        die "npm could not install tests/clients/trials. Are node and the package index there?"
    echo "$stamp" >"$TRIALS/.prepared"
}

main() {
    local json=""
    case "${1:-}" in
        --json) json="${2:?--json needs the name of a file}" ;;
        "") ;;
        *) die "unknown argument $1; known: --json FILE" ;;
    esac
    prepare test
    make_clients_venv
    make_trials
    cd "$ROOT"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    REPORTS="$(mktemp -d)"
    trap 'rm -rf "$REPORTS"' EXIT
    "$VENV/bin/python" -m pytest -rs --junitxml "$REPORTS/ours.xml" "${OURS[@]}"
    "$CLIENTS/bin/python" -m pytest -rs --junitxml "$REPORTS/others.xml" "${OTHERS[@]}"
    if [[ -n "$json" ]]; then
        "$CLIENTS/bin/python" -m splitserve.bench.clients "$REPORTS"/*.xml --json "$json" \
            --openai "$("$VENV/bin/python" -c 'import openai; print(openai.__version__)')"
    fi
}

main "$@"
