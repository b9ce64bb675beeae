"""`splitserve up --steer act` under a load that its workers are in the wrong roles for: one changes, and no stream is lost."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import httpx
from e2e.cluster import NEVER_DEAD, PATIENCE_S, Cluster, running

from splitserve.bench.steer_live import Streamed, stream
from splitserve.deploy.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Piece, Profile, StepModel
from splitserve.planner.trace.request import TraceRequest

RATE = 12.0  # requests a second: half as many again as one prefill worker can take
FLIPPED_WITHIN_S = 40.0
NUM_PROMPT_TOKENS, NUM_TOKENS = 400, 4
PROFILE = Profile(
    name="slow at prompts",
    memory=Memory(block_size=16, num_blocks=1024, block_bytes=1 << 14, num_layers=8, max_model_len=512),
    prefill=StepModel(pieces=(Piece(curve=((0, 0.0), (512, 0.16))),)),
    decode=StepModel(pieces=(Piece(curve=((0, 0.02),)),)),
)


def test_a_worker_changes_its_role_where_the_load_calls_for_it_and_no_stream_is_lost(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO_MODEL.glob("*.json"):
        shutil.copy(file, model)
    profile = tmp_path / "profile.json"
    PROFILE.write(profile)
    workers = ("--flexible", "--prefill", "1", "--decode", "2", "--runner", f"paced:{profile}", *NEVER_DEAD)
    steering = ("--steer", "act", "--steer-slo", "ttft=1,tpot=0.2@p90", "--steer-profile", str(profile))
    with running(model, tmp_path, *workers, *steering) as cluster:
        cluster.wait_whole(1, 2)
        streams = asyncio.run(load_until_flipped(cluster))
        cluster.wait_at_rest()
        state = cluster.state()
    assert not [s for s in streams if not s.whole], "every stream ended by its length, with every token"
    decided = [d for d in state["steering"]["decisions"] if d["kind"] == "flip"]
    assert [(d["worker"], d["role"]) for d in decided] == [(flip["process"], "prefill") for flip in state["flips"]]
    assert "load" in decided[0]["reason"]
    assert (state["counters"]["workers_lost"], state["counters"]["flips"]) == (0, 1)


async def load_until_flipped(cluster: Cluster) -> list[Streamed]:
    """Streams at ``RATE`` until a worker has worked in its new role: all of them, when all are over."""
    tasks: list[asyncio.Task[Streamed]] = []
    began = time.monotonic()
    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None), trust_env=False
    ) as http:
        flipped = asyncio.create_task(has_flipped(http))
        while not flipped.done():
            request = TraceRequest(len(tasks) / RATE, NUM_PROMPT_TOKENS, NUM_TOKENS)
            tasks.append(asyncio.create_task(stream(http, len(tasks), request, Streamed(request.arrival_s, NUM_TOKENS))))
            await asyncio.wait({flipped}, timeout=max(0.0, began + len(tasks) / RATE - time.monotonic()))
        await flipped
        return list(await asyncio.gather(*tasks))


async def has_flipped(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(FLIPPED_WITHIN_S):
        while not any(flip["worked_s"] is not None for flip in (await http.get("/debug/state")).json()["flips"]):
            await asyncio.sleep(0.1)
