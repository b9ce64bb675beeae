#!/usr/bin/env bash
# Sets this host up and runs one prefill worker of a cluster (docs/hosts.md). Arguments go to `splitserve prefill`:
#
#     deploy/prefill.sh --model PATH --key-file FILE --coordinator tcp://COORDINATOR:7700
set -euo pipefail
# shellcheck source=deploy/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare serve
exec "$VENV/bin/splitserve" prefill "$@"
