"""Which prefill and decode workers fit together, and the sentences for those that do not. Pure.

Two workers fit if KV blocks may pass between their models, as Hello describes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ...transport.messages.messages import ModelIdentity
from .worker import WorkerRecord

MAX_MISFIT = 4096  # characters of the sentence for the worker's log


def gap(prefills: list[WorkerRecord], decodes: list[WorkerRecord]) -> str:
    """Return why no request can be served, as a sentence; empty if some pair fits together."""
    if not prefills and not decodes:
        return "no worker is connected"
    if not prefills or not decodes:
        return f"no {'decode' if prefills else 'prefill'} worker is connected"
    kinds = {w.kind for w in prefills}
    if any(w.kind in kinds for w in decodes):
        return ""
    a, b = prefills[0], decodes[0]
    names = f"prefill worker {a.hello.worker_id} and decode worker {b.hello.worker_id}"
    return f"{names} do not fit together: {_difference(a, b)}"


def has_pair(workers: list[WorkerRecord]) -> bool:
    """Whether two of these workers serve a request together: mixed ones and reserves serve with their own
    process alone."""
    prefills = [w for w in workers if w.role == "prefill"]
    kinds = {w.kind for w in prefills if not (w.is_mixed or w.is_reserve)}
    processes = {w.process for w in prefills if w.hello.mixed}
    return any(
        (w.kind in kinds and not w.is_reserve) or (w.hello.mixed and w.process in processes)
        for w in workers
        if w.role == "decode"
    )


def misfits(
    prefills: list[WorkerRecord], decodes: list[WorkerRecord]
) -> Iterator[tuple[WorkerRecord, WorkerRecord]]:
    """Yield each worker that fits none of the other role's, with one of these."""
    for workers, others in ((prefills, decodes), (decodes, prefills)):
        kinds = {other.kind for other in others}
        yield from ((worker, others[0]) for worker in workers if others and worker.kind not in kinds)


def sentence_for_log(worker: WorkerRecord, other: WorkerRecord) -> str:
    """Return the sentence for the coordinator's log."""
    return (
        f"{worker.role} worker {worker.hello.worker_id} gets no work: it does not fit "
        f"{other.role} worker {other.hello.worker_id}: {_difference(worker, other)}"
    )


def _difference(a: WorkerRecord, b: WorkerRecord) -> str:
    name, ours, theirs = _first_difference(a, b)
    return f"their {name} differs ({ours} and {theirs})"


def sentence_for_worker(worker: WorkerRecord, other: WorkerRecord) -> str:
    """Return the sentence for the worker's own log."""
    name, ours, theirs = _first_difference(worker, other)
    sentence = (
        f"this {worker.role} worker gets no work: it fits no {other.role} worker, and its {name} is not "
        f"that of {other.hello.worker_id} ({ours} here, {theirs} there); "
        "start all workers of a model with the same model, build and options"
    )
    return sentence[:MAX_MISFIT]


def kv_model(model: ModelIdentity) -> ModelIdentity:
    """Return what decides which workers fit."""
    return replace(model, revision="")


def revisions(workers: list[WorkerRecord]) -> list[str]:
    """Return a sentence if workers that fit together serve several revisions."""
    first: dict[int, WorkerRecord] = {}
    for worker in workers:
        known = first.setdefault(worker.kind, worker)
        if known.hello.model.revision != worker.hello.model.revision:
            names = f"{known.hello.worker_id} and {worker.hello.worker_id}"
            return [f"{names} serve two revisions of one model: tokenizer, template or defaults differ"]
    return []


def _first_difference(a: WorkerRecord, b: WorkerRecord) -> tuple[str, str, str]:
    """Return the first field in which their models differ, and both values."""
    found = a.hello.model.difference(b.hello.model)
    assert found is not None, "they are of different kinds"
    return found
