#!/usr/bin/env bash
# Sets everything up, then runs lint, types and all tests. Arguments go to pytest:
#
#     deploy/test.sh
#     deploy/test.sh tests/engine -k sampler
#
# Python packages go into .venv at the root of the clone. Run as root where there is apt-get, it also installs Debian packages that tests drive,
# once for each .venv: redis-server, prometheus, chromium, nodejs, nginx-light. No service of theirs is started: /usr/sbin/policy-rc.d forbids it meanwhile.
# TEST_PACKAGES_SECONDS=0 installs none of them; the tests that need them are skipped, and named.
set -euo pipefail
# shellcheck source=deploy/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
fi
prepare test
cd "$ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # workers and tests are processes: they share the cores
export PYTHONDONTWRITEBYTECODE= # tests start hundreds of processes: one that compiles every module takes twice as long
say "lint"
"$VENV/bin/ruff" check
say "types, and beside them tests"
types="$(mktemp)"
trap 'rm -f "$types"' EXIT
"$VENV/bin/mypy" >"$types" 2>&1 &
checking=$!
# four on two cores: tests that start processes wait for a third of their time
if ((! $#)); then set -- --numprocesses 4 --max-worker-restart 1 --dist loadfile --no-loadscope-reorder; fi
status=0
"$VENV/bin/python" -m pytest "$@" || status=$?
wait $checking || status=1
cat "$types"
exit "$status"
