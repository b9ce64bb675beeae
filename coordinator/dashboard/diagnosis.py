"""What slows requests down or fails them, what would help, and how much: one sentence for people. Pure.

Each rule reads one ``Window`` and finds nothing or one thing. Findings are ordered: what fails requests
before what slows them, and of these the one that takes the larger share of requests' time first. Where no
rule finds anything, the result states it.

Expected gains: of one more worker where requests queue, ``queueing``; of a faster stage, Amdahl's law (AFIPS
1967), a bound; of one more decode worker for the time per token, processor sharing (L. Kleinrock,
"Time-shared systems", J. ACM 14, 1967), a bound too: a step's time shrinks at most as its number of rows
does. Below ``MIN_REQUESTS`` nothing is promised.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..metrics.load_window import Window
from .findings import (
    MIN_REQUESTS,
    Finding,
    all_good,
    basis_of_queue,
    duration,
    nth,
    one_more,
    percent,
    requests,
    too_few,
)  # fmt: skip
from .queueing import SATURATED

QUEUE_SHARE, QUEUE_TTFT_SHARE, QUEUE_S = 0.2, 0.5, 1.0
"""A queue is a finding from this share of requests' time on; or of the TTFT, if it takes QUEUE_S seconds or
the objective is missed."""
HANDOFF_SHARE, HANDOFF_S = 0.1, 0.01
COORDINATOR_SHARE, COORDINATOR_S = 0.15, 0.01
CLIENT_SHARE, CLIENT_S = 0.15, 0.05
TROUBLE_SHARE = 0.01
"""Share of requests: fewer failed, refused or preempted ones are left to the log of events."""
BUSY = 0.7
"""Mean busy share from which on requests queue for prefill because it is busy."""
FULL = 0.9
"""Share of KV blocks, or of batch rows, from which on requests queue because a decode worker has no room."""
WORKERS_STAGES = ("queue", "prefill", "handoff", "decode", "stream")
"""All other stages are the coordinator's own."""
UNKNOWN_BUSY = 0.95


def diagnose(window: Window) -> list[Finding]:
    """The weightiest first; never empty."""
    failing = [*_missing(window), *_failing(window)]
    if window.num_measured < MIN_REQUESTS:
        return [*failing, too_few(window)] if not failing or window.num_ended else failing
    slow = [*_queue(window), *_decode(window), *_handoff(window), *_coordinator(window), *_client(window)]
    slow.sort(key=lambda finding: -finding.share)
    return [*failing, *slow, *_objectives(window, slow)] or [all_good(window)]


# --- requests fail -------------------------------------------------------------------------------


def _missing(w: Window) -> Iterator[Finding]:
    absent = [role for role, pool in w.pools.items() if not pool.num_workers]
    wait = "waits" if w.now_waiting == 1 else "wait"
    waits = f" {requests(w.now_waiting)} {wait}." if w.now_waiting else ""
    if len(absent) == 2:
        start = "Start some: `splitserve up` on this machine, or `splitserve prefill` and `splitserve decode`"
        yield Finding("no_workers", "bad", f"No workers are connected.{waits}", f"{start} on others.")
    elif absent:
        what = f"No {absent[0]} worker is connected.{waits}"
        yield Finding("no_workers", "bad", what, f"Start one: `splitserve {absent[0]}`.")
    elif not w.ready:
        unproven = "no request has gone from prefill to decode, or the last ones all failed in one stage; "
        why = w.gap or f"{unproven}/ready says which"
        then = "That is tried by itself as soon as workers of both roles fit together."
        yield Finding("not_ready", "warn", f"Not ready: {why}.", then)
    for role, pool in w.pools.items():
        missing = int(w.most_workers.get(role, 0.0) - pool.num_workers)
        if w.lost and missing > 0 and pool.num_workers:
            names = ", ".join(w.lost[-3:])
            rest = f"{pool.num_workers:.0f} {role} worker{'s' if pool.num_workers > 1 else ''} left"
            yield Finding(
                "lost",
                "bad",
                f"Lost in the last minute: {names}. {rest}; its requests go on there.",
                f"It is restarted by `splitserve up`; elsewhere: start it again with `splitserve {role}`.",
            )


def _failing(w: Window) -> Iterator[Finding]:
    tried = w.num_measured + w.num_failed + w.num_refused
    if w.num_failed and w.num_failed >= TROUBLE_SHARE * tried:
        yield Finding(
            "failed",
            "bad",
            f"{requests(w.num_failed)} of {tried:,} failed with 5xx in the last minute.",
            "The coordinator's log has a line with the reason for each.",
        )
    if w.num_refused and w.num_refused >= TROUBLE_SHARE * tried:
        yield Finding(
            "refused",
            "bad",
            f"{requests(w.num_refused)} of {tried:,} were refused with 429 in the last minute.",
            "Reasons are counted in `splitserve_refusals_total`: `overloaded` asks for workers or a larger "
            "`--max-queue`, the others for higher limits of a key.",
        )


# --- requests are slow ---------------------------------------------------------------------------


def _rising(w: Window, before_s: float) -> Iterator[Finding]:
    """More requests wait now than the times of those that have ended show. ``before_s``: their mean wait."""
    wait_s = w.now_waiting * w.seconds / max(1, w.num_ended)  # Little's law
    if w.growth > 0 and wait_s >= max(QUEUE_S, QUEUE_TTFT_SHARE * w.ttft_s, 2 * before_s):
        what = (
            f"Queueing rises: {requests(w.now_waiting)} waiting, at this pace for {duration(wait_s)}; those "
            f"of the last minute waited {duration(before_s)} on average."
        )
        yield Finding("rising", "warn", what, "What would help shows once they are answered.")


def _queue(w: Window) -> Iterator[Finding]:
    """Requests wait for a worker: for decode where that has no room, else for prefill."""
    queue_s, share = w.stages.get("queue", 0.0), w.share("queue")
    of_ttft = queue_s / w.ttft_s if w.ttft_s else 0.0
    matters = queue_s >= QUEUE_S or _is_missed(w, w.ttft_missed)
    if share < QUEUE_SHARE and not (of_ttft >= QUEUE_TTFT_SHARE and matters):
        yield from _rising(w, queue_s)
        return
    decode, prefill = w.pools["decode"], w.pools["prefill"]
    head = _of_time(w, share, "queueing", of_ttft)
    preempted = int(w.grown.get("preemptions", 0.0))
    if decode.kv >= FULL or preempted > TROUBLE_SHARE * w.num_measured:
        more = (
            f", and {preempted:,} sequence{'s were' if preempted != 1 else ' was'} preempted"
            if preempted
            else ""
        )
        what = f"{head}: the decode workers' KV cache is full ({percent(decode.kv)} in use{more})."
        remedy = f"{one_more(w, 'decode', decode.kv)}; or give workers more KV memory (`--kv-cache-gib`)."
        yield Finding("kv_memory", "warn", what, remedy, basis_of_queue(decode.kv), share)
    elif decode.rows >= FULL:
        what = f"{head}: the decode workers' batches are full ({percent(decode.rows)} of their rows)."
        more = one_more(w, "decode", decode.rows)
        remedy = f"{more}; or raise `--max-num-seqs`, if the time per token allows it."
        yield Finding("decode", "warn", what, remedy, basis_of_queue(decode.rows), share)
    elif prefill.busy is not None and prefill.busy < BUSY:
        seldom = f"busy only {percent(prefill.busy)} of the time"
        what = f"{head}, yet prefill workers are {seldom}: requests come in bursts."
        remedy = f"{one_more(w, 'prefill', prefill.busy)}."
        yield Finding("bursts", "warn", what, remedy, basis_of_queue(prefill.busy), share)
    else:
        busy = UNKNOWN_BUSY if prefill.busy is None else prefill.busy
        known = "" if prefill.busy is None else f", whose workers are busy {percent(busy)} of the time"
        arrived = w.num_ended + w.growth
        offered = busy * prefill.num_workers * arrived / max(1, w.num_ended)
        if offered >= prefill.num_workers + 1:
            wanted = int(offered / SATURATED) + 1 - int(prefill.num_workers)
            remedy = (
                f"{arrived / w.seconds:.1f} requests a second come and {w.num_ended / w.seconds:.1f} are "
                f"served: the queue grows until {wanted} more prefill workers are there."
            )
        else:
            remedy = f"{one_more(w, 'prefill', busy)}."
        yield Finding("prefill", "warn", f"{head} for prefill{known}.", remedy, basis_of_queue(busy), share)


def _decode(w: Window) -> Iterator[Finding]:
    """Tokens come too slowly for the objective. Without one, time on decode workers is what requests are
    for."""
    if not _is_missed(w, w.tpot_missed):
        return
    assert w.objectives.tpot_s is not None
    pool, share = w.pools["decode"], w.share("decode")
    what = (
        f"{percent(w.tpot_missed)} of requests get their tokens more slowly than "
        f"{duration(w.objectives.tpot_s)} each"
    )
    if pool.running >= 2:
        workers = int(pool.num_workers)
        remedy = (
            f"{nth(workers + 1)} decode worker would cut the time per token by at most "
            f"{percent(1 / (workers + 1))}."
        )
        yield Finding(
            "decode",
            "warn",
            f"{what}: {pool.running:.0f} sequences share a decode worker's steps.",
            remedy,
            "processor sharing; a bound",
            share,
        )
    else:
        yield Finding(
            "decode_alone",
            "warn",
            f"{what}, though hardly two sequences share a worker.",
            "More workers would not help: more GPUs each, faster ones, a smaller or quantised model would.",
            "",
            share,
        )


def _handoff(w: Window) -> Iterator[Finding]:
    seconds, share, decode = w.stages.get("handoff", 0.0), w.share("handoff"), w.pools["decode"]
    if share < HANDOFF_SHARE or seconds < HANDOFF_S:
        return
    head = _of_time(w, share, "the handoff of KV blocks from prefill to decode")
    if decode.kv >= FULL:
        yield Finding(
            "kv_memory",
            "warn",
            f"{head}: decode workers have no free KV blocks ({percent(decode.kv)} in use).",
            f"{one_more(w, 'decode', decode.kv)}; or give workers more KV memory (`--kv-cache-gib`).",
            basis_of_queue(decode.kv),
            share,
        )
        return
    slower = int(w.grown.get("mover_fallbacks", 0.0))
    why = f" Workers took a slower mover for {slower} peers: see their logs." if slower else ""
    yield Finding(
        "handoff",
        "warn",
        f"{head}: the transfer is slower than the prompt is computed.{why}",
        f"A faster mover or link would cut the time to the end by at most {percent(share)}.",
        "Amdahl's law; a bound",
        share,
    )


def _coordinator(w: Window) -> Iterator[Finding]:
    own = [stage for stage in w.stages if stage not in WORKERS_STAGES]
    seconds, share = sum(w.stages[stage] for stage in own), w.share(*own)
    if share < COORDINATOR_SHARE or seconds < COORDINATOR_S:
        return
    yield Finding(
        "coordinator",
        "warn",
        f"{_of_time(w, share, 'the coordinator itself')}: its process is late.",
        f"More of its processes (`--processes`) would cut the time to the end by at most {percent(share)}; "
        "so would cores that nothing else uses.",
        "Amdahl's law; a bound",
        share,
    )


def _client(w: Window) -> Iterator[Finding]:
    seconds, share = w.stages.get("stream", 0.0), w.share("stream")
    if share >= CLIENT_SHARE and seconds >= CLIENT_S:
        yield Finding(
            "client",
            "warn",
            f"{_of_time(w, share, 'waiting for clients to read their answers')}.",
            "The cluster is done by then: look at the clients, their network, or a proxy that buffers.",
            "",
            share,
        )


def _objectives(w: Window, slow: list[Finding]) -> Iterator[Finding]:
    """An objective is missed and no rule explains it: the first token is late without a queue."""
    if slow or w.kept is None or w.kept >= w.objectives.attainment:
        return
    missed = (
        f"{percent(1 - w.kept)} of requests miss the objectives; {percent(1 - w.objectives.attainment)} may"
    )
    if _is_missed(w, w.ttft_missed):
        work_s = w.stages.get("prefill", 0.0)
        yield Finding(
            "slow_prefill",
            "warn",
            f"{missed}. There is no queue: computing a prompt takes {duration(work_s)}.",
            "More workers would not help: shorter prompts, more of them cached, or a faster device would.",
            "",
            w.share("prefill"),
        )
    else:
        yield Finding(
            "objectives",
            "warn",
            f"{missed}.",
            "No stage stands out: see the requests below, the slowest ones first.",
        )


def _of_time(w: Window, share: float, what: str, of_ttft: float = 0.0) -> str:
    if of_ttft >= QUEUE_TTFT_SHARE and share < QUEUE_SHARE:
        return f"{percent(of_ttft)} of the time to first token is {what}"
    return f"{percent(share)} of requests' time is {what}"


def _is_missed(w: Window, share: float) -> bool:
    return bool(w.objectives) and share > 1 - w.objectives.attainment
