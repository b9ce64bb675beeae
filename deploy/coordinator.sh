#!/usr/bin/env bash
# Sets this host up and runs the coordinator of a cluster (docs/hosts.md). Arguments go to `splitserve coordinator`:
#
#     deploy/coordinator.sh --model PATH --key-file FILE --host 0.0.0.0 --control-address tcp://0.0.0.0:7700
set -euo pipefail
# shellcheck source=deploy/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare serve
exec "$VENV/bin/splitserve" coordinator "$@"
