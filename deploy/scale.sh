#!/usr/bin/env bash
# An example of what --steer-command runs: starts one more worker on this machine, and tidies up after one that has left. Its own arguments
# are the worker's options; the coordinator adds `up ROLE` or `down WORKER`:
#
#     --steer-command "deploy/scale.sh --model PATH --key-file FILE --coordinator tcp://COORDINATOR:7700"
#
# Workers are named scaled-..., can change their roles, and write to $SCALE_FOLDER/NAME.log (default: /tmp/splitserve-scaled). Nothing starts
# them again when they end. Where workers are machines, instances or pods, this is where those would be started and deleted.
set -euo pipefail

command -v splitserve >/dev/null || PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
folder="${SCALE_FOLDER:-/tmp/splitserve-scaled}"
usage="usage: scale.sh [OPTION...] up prefill|decode|mixed, or scale.sh [OPTION...] down WORKER"
(($# >= 2)) || { echo "$usage" >&2; exit 2; }
options=("${@:1:$#-2}") verb="${*: -2:1}" what="${*: -1}"

case "$verb" in
up)
    mkdir -p "$folder"
    name="scaled-$(date +%s)-$$"
    setsid nohup splitserve worker "${options[@]}" --start-as "$what" --name "$name" </dev/null >"$folder/$name.log" 2>&1 &
    echo "$name starts as a $what worker, its log is $folder/$name.log"
    ;;
down)
    rm -f "$folder/$what.log" # it has drained and ended
    echo "$what has left"
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
