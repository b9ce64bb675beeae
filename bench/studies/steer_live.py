"""The pool controller live: real processes with paced workers, and a load that shifts in mid-run.

    python -m splitserve.bench.studies.steer_live [--workers 8] [--mixed 0] [--phase-s 90] \\
        [--json bench/results/steer_live.json]

`splitserve up --flexible --steer act` with workers that take the time of bench/studies/steer_workload.py and
compute nothing; sockets, cores and coordinator are real. First code-like requests, then conversation-like
ones. Every stream must end by its length with every token; the objectives count as recovered from the moment
on after which every window of 5 s of arrivals has at least 90% good requests. Ends with status 1 if a stream
was lost, or if the objectives had not recovered within 30 s.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from ...cli.settings import DEMO_MODEL
from ...loadgen.load import generate_load
from ...loadgen.report import Sample, times_of
from ...loadgen.settings import LoadSettings
from ...traces.own_format import write_trace
from ...traces.request import TraceRequest
from ..environment import environment, option_parser, write_record
from ..live_cluster import live_cluster, words
from ..operator_auth import OperatorAuth
from .steer_verdict import missed_live
from .steer_workload import CHAT, CODE, TPOT_S, TTFT_S, load, worker

WINDOW_S, SHARE = 5.0, 0.9
START_S, STREAM_S = 120.0, 600.0
SEED = 1


@dataclass(frozen=True, slots=True)
class Workers:
    """How many of each kind there are at the beginning."""

    prefill: int
    decode: int
    mixed: int  # of both roles, for good

    @property
    def count(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def num_names(self) -> int:
        """By which the coordinator knows them: one for each role."""
        return self.count + self.mixed


@dataclass(frozen=True, slots=True)
class Stream:
    """One request of the load, and what its client saw."""

    asked: TraceRequest
    seen: Sample

    @property
    def sent_s(self) -> float:
        return self.asked.arrival_s

    @property
    def whole(self) -> bool:
        return not self.seen.error and self.seen.num_output_tokens == self.asked.num_output_tokens

    @property
    def good(self) -> bool:
        if not self.whole:
            return False
        times = times_of(self.seen)
        return times.ttft <= TTFT_S and (times.tpot or 0.0) <= TPOT_S


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mixed", type=int, default=0, help="of these, of both roles for good")
    parser.add_argument(
        "--phase-s", type=float, default=90.0, help="seconds of each of the two kinds of load"
    )
    options = parser.parse_args()
    machine = environment()
    others = options.workers - options.mixed
    prefill = min(others, max(1, others * 3 // 4))
    found = asyncio.run(measure(Workers(prefill, others - prefill, options.mixed), options.phase_s))
    print(json.dumps({name: value for name, value in found.items() if name != "decisions"}, indent=1))
    missed = missed_live(found)
    print("\n".join(f"missed: {sentence}" for sentence in missed) or "every goal was reached")
    write_record(options.json, {"environment": machine, "missed": missed, **found})
    return 1 if missed else 0


async def measure(workers: Workers, phase_s: float) -> dict[str, Any]:
    """Starts the cluster, sends the load, stops it."""
    with tempfile.TemporaryDirectory(prefix="splitserve-steer-") as name:
        folder = Path(name)
        with live_cluster(options_of(folder, workers), folder / "log") as url:
            trace = load([CODE, CHAT], phase_s, SEED, workers.count)
            write_trace(folder / "load.jsonl", trace)
            settings = LoadSettings(
                url=url, trace=folder / "load.jsonl", warmup=0, vocab_size=250, timeout_s=STREAM_S
            )
            async with httpx.AsyncClient(
                base_url=url, timeout=START_S, trust_env=False, auth=OperatorAuth()
            ) as http:
                await _until_whole(http, workers.num_names)
                samples, _ = await generate_load(settings)
                state = (await http.get("/debug/state")).json()
            streams = [Stream(*one) for one in zip(trace, samples, strict=True)]
    return {"workers": asdict(workers), **summary(streams, phase_s, state)}


def options_of(folder: Path, workers: Workers) -> list[str]:
    """For a cluster of paced workers that the pool controller steers; their profile and model are written to
    ``folder``."""
    profile, model = folder / "profile.json", folder / "model"
    worker().write(profile)
    model.mkdir()
    for file in DEMO_MODEL.glob("*.json"):
        shutil.copy(file, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": worker().memory.max_model_len})
    )
    return words(
        **asdict(workers),
        model=model,
        flexible=True,
        runner=f"paced:{profile}",
        prefill_max_batch_tokens=2048,
        decode_max_num_seqs=128,
        steer="act",
        steer_slo=f"ttft={TTFT_S:g},tpot={TPOT_S:g}@p90",
        steer_profile=profile,
    )


async def _until_whole(http: httpx.AsyncClient, num_names: int) -> None:
    deadline = time.monotonic() + START_S
    while len((await http.get("/debug/state")).json()["workers"]) != num_names:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all workers were there within {START_S:g} s")
        await asyncio.sleep(0.1)


def summary(streams: list[Stream], phase_s: float, state: dict[str, Any]) -> dict[str, Any]:
    """What came of it; the shift was at ``phase_s``."""
    late = [s.sent_s for s in streams if s.sent_s >= phase_s]
    recovered = recovery(streams, phase_s, max(late, default=phase_s))
    lost = [asdict(s.seen) for s in streams if not s.whole]
    return {
        "num_streams": len(streams),
        "num_lost": len(lost),
        "lost": lost[:5],
        "good_before": _share([s for s in streams if s.sent_s < phase_s]),
        "good_after": _share([s for s in streams if s.sent_s >= phase_s]),
        "recovery_s": recovered,
        "good_by_window": [
            round(_share([s for s in streams if at <= s.sent_s < at + WINDOW_S]), 3)
            for at in (i * WINDOW_S for i in range(int(2 * phase_s / WINDOW_S)))
        ],
        "flips": state["flips"],
        "steering": state["steering"]["state"],
        "decisions": state["steering"]["decisions"],
        "redispatches": state["counters"]["redispatches"],
        "sequences_moved": state["counters"]["sequences_moved"],
        "workers_lost": state["counters"]["workers_lost"],
    }


def recovery(streams: list[Stream], shift_s: float, end_s: float) -> float | None:
    """Seconds after the shift from which on every window is good enough; None: not within the run."""
    after = [s for s in streams if s.sent_s >= shift_s]
    bad = [
        at
        for at in (s.sent_s for s in after)
        if _share([s for s in after if at <= s.sent_s < at + WINDOW_S]) < SHARE
    ]
    since = (
        max((s.sent_s for s in after if bad and s.sent_s <= bad[-1] and not s.good), default=shift_s)
        - shift_s
    )
    return round(since, 2) if since < end_s - shift_s - WINDOW_S else None


def _share(streams: list[Stream]) -> float:
    return sum(s.good for s in streams) / len(streams) if streams else 1.0


if __name__ == "__main__":
    sys.exit(main())
