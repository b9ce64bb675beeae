#!/usr/bin/env bash
# Sets this host up and runs one decode worker of a cluster (docs/hosts.md). Arguments go to `splitserve decode`:
#
#     deploy/decode.sh --model PATH --key-file FILE --coordinator tcp://COORDINATOR:7700 --listen tcp://THIS_HOST:7710 --data-listen tcp://THIS_HOST:7711
set -euo pipefail
# shellcheck source=deploy/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

prepare serve
exec "$VENV/bin/splitserve" decode "$@"
