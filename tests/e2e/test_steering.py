"""`splitserve up --steer act` under a load that its workers are in the wrong roles for, or too few: one
changes its role, one more comes and goes again, and no stream is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from e2e.cluster import NEVER_DEAD, PATIENCE_S, START_S, Cluster, free_port, running, wait_for

from splitserve.bench.operator_auth import OperatorAuth
from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Piece, Profile, StepModel
from splitserve.loadgen.load import generate_load
from splitserve.loadgen.report import Sample
from splitserve.loadgen.settings import LoadSettings

RATE = 12.0  # requests a second: half as many again as one prefill worker can take
FLIPPED_WITHIN_S = 100.0  # a moment, on a machine with other work
COOLDOWN_S = 20.0  # longer than a worker takes to start
SCALE = Path(__file__).resolve().parents[2] / "deploy" / "scale.sh"
NUM_PROMPT_TOKENS, NUM_TOKENS = 400, 4
PROFILE = Profile(
    name="slow at prompts",
    memory=Memory(block_size=16, num_blocks=1024, block_bytes=1 << 14, num_layers=8, max_model_len=512),
    prefill=StepModel(pieces=(Piece(curve=((0, 0.0), (512, 0.16))),)),
    decode=StepModel(pieces=(Piece(curve=((0, 0.08),)),)),  # a busy machine would make half of 0.02 s of it
)


def model_and_profile(folder: Path) -> tuple[Path, Path]:
    """What paced workers need of a model, and their profile."""
    model, profile = folder / "model", folder / "profile.json"
    model.mkdir()
    for file in DEMO_MODEL.glob("*.json"):
        shutil.copy(file, model)
    PROFILE.write(profile)
    return model, profile


def test_a_worker_changes_its_role_where_the_load_calls_for_it_and_no_stream_is_lost(tmp_path: Path) -> None:
    model, profile = model_and_profile(tmp_path)
    workers = ("--flexible", "--prefill", "1", "--decode", "2", "--runner", f"paced:{profile}", *NEVER_DEAD)
    steering = ("--steer", "act", "--steer-slo", "ttft=1,tpot=0.2@p90", "--steer-profile", str(profile))
    with running(model, tmp_path, *workers, *steering) as cluster:
        cluster.wait_whole(1, 2)
        streams = asyncio.run(load_until_flipped(cluster))
        cluster.wait_at_rest()
        state = cluster.state()
    assert {(s.error, s.num_output_tokens) for s in streams} == {("", NUM_TOKENS)}, "no token is lost"
    decided = [d for d in state["steering"]["decisions"] if d["kind"] == "flip"]
    assert [(d["worker"], d["role"]) for d in decided] == [
        (flip["process"], "prefill") for flip in state["flips"]
    ]
    assert "load" in decided[0]["reason"]
    assert (state["counters"]["workers_lost"], state["counters"]["flips"]) == (0, 1)


@pytest.fixture
def command_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`splitserve` is on the path; what it has started in the background ends with the test."""
    pids = tmp_path / "pids"
    pids.touch()
    (tmp_path / "splitserve").write_text(
        f'#!/bin/sh\necho $$ >>{pids}\nexec {sys.executable} -m splitserve.cli.main "$@"\n'
    )
    (tmp_path / "splitserve").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield
    for pid in pids.read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.usefixtures("command_found")
def test_a_worker_is_started_for_a_queue_and_it_is_the_one_that_goes_again(tmp_path: Path) -> None:
    """By the example command; those that `up` would start again stay."""
    model, profile = model_and_profile(tmp_path)
    control = f"tcp://127.0.0.1:{free_port()}"
    scale = f"env SCALE_FOLDER={tmp_path / 'scaled'} {SCALE} --insecure"
    command = f"{scale} --model {model} --coordinator {control} --runner paced:{profile}"
    workers = ("--runner", f"paced:{profile}", "--insecure", "--control-address", control, *NEVER_DEAD)
    steering = (
        "--steer",
        "act",
        "--steer-slo",
        "ttft=1,tpot=0.2@p90",
        "--steer-profile",
        str(profile),
        "--steer-command",
        command,
    )
    rules = ("--steer-max-workers", "3", "--steer-queue-depth", "20", "--steer-cooldown-s", str(COOLDOWN_S))
    rules += ("--steer-scale-up-after-s", "0", "--steer-scale-down-after-s", "1")
    with running(model, tmp_path, *workers, *steering, *rules) as cluster:
        cluster.wait_whole(1, 1)
        before = {w["worker_id"]: w["pid"] for w in cluster.state()["workers"]}
        streams = asyncio.run(streamed(cluster, 60))
        wait_for(
            "a worker came and has gone",
            lambda: decided(cluster, "scale_down") and len(cluster.state()["workers"]) == 2,
            START_S + COOLDOWN_S,
        )
        assert {w["worker_id"]: w["pid"] for w in cluster.state()["workers"]} == before
        wait_for("the command was told", lambda: not list((tmp_path / "scaled").iterdir()))
        assert {(s.error, s.num_output_tokens) for s in streams} == {("", NUM_TOKENS)}
        assert decided(cluster, "scale_down")[0].startswith("scaled-")


def decided(cluster: Cluster, kind: str) -> list[str]:
    return [d["worker"] for d in cluster.state()["steering"]["decisions"] if d["kind"] == kind]


async def streamed(cluster: Cluster, count: int, seed: int = 0) -> list[Sample]:
    """What clients see of ``count`` streams that begin at once."""
    settings = LoadSettings(
        url=cluster.url,
        requests=count,
        concurrency=count,
        warmup=0,
        prompt_len=str(NUM_PROMPT_TOKENS),
        output_len=str(NUM_TOKENS),
        vocab_size=250,
        seed=seed,
        timeout_s=PATIENCE_S,
    )
    samples, _ = await generate_load(settings)
    return samples


async def load_until_flipped(cluster: Cluster) -> list[Sample]:
    """Streams at ``RATE`` until a worker has worked in its new role: all of them, when all are over."""
    tasks: list[asyncio.Task[list[Sample]]] = []
    began = time.monotonic()
    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=PATIENCE_S, trust_env=False, auth=OperatorAuth()
    ) as http:
        flipped = asyncio.create_task(has_flipped(http))
        while not flipped.done():
            tasks.append(asyncio.create_task(streamed(cluster, 1, seed=len(tasks))))
            await asyncio.wait({flipped}, timeout=max(0.0, began + len(tasks) / RATE - time.monotonic()))
        await flipped
        return [sample for samples in await asyncio.gather(*tasks) for sample in samples]


async def has_flipped(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(FLIPPED_WITHIN_S):
        while not any(
            flip["worked_s"] is not None for flip in (await http.get("/debug/state")).json()["flips"]
        ):
            await asyncio.sleep(0.1)
