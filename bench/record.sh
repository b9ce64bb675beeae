#!/usr/bin/env bash
# Measures everything that needs no other server, into bench/results/: some minutes on a quiet machine with two cores.
#
#     bench/record.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
python=.venv/bin/python
results=bench/results
port=8017

for module in http.streaming handoff.overhead handoff.movers control kernels.engine; do
    echo "== $module"
    "$python" -m "splitserve.bench.$module" --json "$results/${module##*.}.json"
done

echo "== peer"
model=$(mktemp -d)/llama-125m
"$python" -c "import sys, pathlib; from splitserve.bench.models import make_random_llama; make_random_llama(pathlib.Path(sys.argv[1]))" "$model"
.venv/bin/splitserve up --model "$model" --dtype float32 --port "$port" >"$model.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -rf "$(dirname "$model")"' EXIT
until "$python" -c "import sys, httpx; sys.exit(httpx.get('http://127.0.0.1:$port/ready').status_code != 200)" 2>/dev/null; do
    kill -0 "$server" || { cat "$model.log"; exit 1; }
    sleep 0.5
done
"$python" -m splitserve.bench.peers.peer --url "http://127.0.0.1:$port" --name splitserve --json "$results/peer-splitserve.json"
