#!/usr/bin/env bash
# Sets everything up and starts splitserve on this machine: a coordinator, a prefill and a decode worker.
#
#     deploy/quickstart.sh                   chat in this terminal, with the HTTP server running beside it
#     deploy/quickstart.sh --prompt "..."    print one answer and stop
#     deploy/quickstart.sh --serve           serve until stopped
#     deploy/quickstart.sh --model MODEL     any of these, with another model (a checkpoint folder, a .gguf file, ORG/NAME)
#
# It installs Python packages into .venv at the root of the clone, and nothing outside of it.
#
# Every other option goes to `splitserve up`. Without a terminal it answers a sample question and stops.
set -euo pipefail
# shellcheck source=deploy/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

SAMPLE_PROMPT="What does os.path.join do?"

main() {
    local serves="" asks="" argument
    local -a options=()
    for argument in "$@"; do
        case "$argument" in
            -h | --help)
                sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
                return
                ;;
            --serve) serves=yes ;;
            --chat | --prompt | --prompt=*)
                asks=yes
                options+=("$argument")
                ;;
            *) options+=("$argument") ;;
        esac
    done
    if [[ -n "$serves" && -n "$asks" ]]; then
        die "--serve stays when --chat or --prompt would end: give one of them; \`splitserve chat\` asks a server that runs"
    fi
    prepare serve
    if [[ -z "$serves$asks" && -t 0 ]]; then
        options+=(--chat)
    elif [[ -z "$serves$asks" ]]; then
        options+=(--prompt "$SAMPLE_PROMPT")
    fi
    exec "$VENV/bin/splitserve" up "${options[@]}"
}

main "$@"
