"""What a first start on a GPU meets: ``splitserve up`` with nothing but the folder of a model in its real
size. All weights are zero: which tokens come is of no interest."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.engine_figures import LLAMA_8B, QWEN3_600M
from ..live_cluster import live_cluster
from ..models import QWEN3, make_hollow_llama
from .correctness import interpret
from .line import MACHINE_FILE, Line, Place
from .machine import SMALL
from .serving import completed

SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {**LLAMA_8B, "max_position_embeddings": 131_072, "rope_theta": 500_000.0},
    "Qwen3-0.6B": {**QWEN3_600M, **QWEN3, "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0},
}
LEAST_USED, MOST_USED = 0.8, 0.95  # of the card, by weights and KV caches
PROMPT, OUTPUT = 300, 16
CACHE = re.compile(r"KV cache: .* ([0-9.]+) GiB")
MOVER = re.compile(r"hands KV blocks to \S+ by (\w+)")
NOTED = re.compile(
    r"\b(?:WARNING .*|ready in .*|hands KV blocks to .*|KV cache: .*|kernels: .*|prefill graphs: .*)"
)


def start(place: Place, name: str) -> Iterator[Line]:
    """Seconds until ready, two answers, the mover, the memory that caches take, and what the log warns of."""
    interpret(place)
    folder, log = place.work / "models" / f"hollow {name}", place.work / "logs" / f"start {name} cluster.log"
    shape = SHAPES[name] if place.big else SMALL
    make_hollow_llama(folder, **shape)
    began = time.monotonic()
    options = ["--model", str(folder), "--served-model-name", "m"]
    options += [] if place.big else ["--device", "cpu", "--kv-cache-gib", "0.1"]
    with live_cluster(options, log) as url:
        yield Line(f"{name}: up, ready after", value=time.monotonic() - began, unit="s", headline=True)
        for what in ("first", "second"):
            asked = time.monotonic()
            ids = completed(url, list(range(3, 3 + (PROMPT if place.big else 9))), OUTPUT)
            seconds = time.monotonic() - asked
            note = f"after {seconds:.2f} s"
            yield Line(f"{name}: up, the {what} request has its tokens", good=len(ids) == OUTPUT, note=note)
        movers = set(MOVER.findall(log.read_text()))
        good = movers == {"cuda_ipc"} if place.big else bool(movers)
        yield Line(f"{name}: up, KV blocks stay on the device", good=good, note=", ".join(sorted(movers)))
        yield from _memory(place, name, (folder / "model.safetensors").stat().st_size, log.read_text())
    for found in dict.fromkeys(
        match[0] for match in map(NOTED.search, log.read_text().splitlines()) if match
    ):
        yield Line(f"{name}: up logs", note=found)


def _memory(place: Place, name: str, weights: int, log: str) -> Iterator[Line]:
    """``weights``: bytes of one of the two workers."""
    caches = [float(gib) for gib in CACHE.findall(log)]
    note = f"{' and '.join(f'{gib:.1f}' for gib in caches)} GiB of KV caches"
    yield Line(f"{name}: up, both workers have a cache", good=len(caches) == 2, note=note)
    if place.big:
        card = json.loads(file.read_text())["memory"] if (file := place.work / MACHINE_FILE).exists() else 0
        card = card or torch.cuda.get_device_properties(0).total_memory
        used = (2 * weights + sum(caches) * 2**30) / card
        good = LEAST_USED <= used <= MOST_USED
        yield Line(f"{name}: up, weights and caches of the card", good=good, value=used, unit="share")
