"""Which prefill and decode workers fit together, and the sentences for those that do not. Pure.

Two workers fit if their models, as Hello describes them, are equal.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import asdict

from .worker import WorkerRecord

MAX_MISFIT = 4096  # characters of the sentence for the worker's log


def gap(prefills: list[WorkerRecord], decodes: list[WorkerRecord]) -> str:
    """Return why no request can be served, as a sentence; empty if some pair fits together."""
    if not prefills and not decodes:
        return "no worker is connected"
    if not prefills or not decodes:
        return f"no {'decode' if prefills else 'prefill'} worker is connected"
    models = {w.hello.model for w in prefills}
    if any(w.hello.model in models for w in decodes):
        return ""
    a, b = prefills[0], decodes[0]
    names = f"prefill worker {a.hello.worker_id} and decode worker {b.hello.worker_id}"
    return f"{names} do not fit together: {_difference(a, b)}"


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
    return f"their {name} differs ({ours!r} and {theirs!r})"


def sentence_for_worker(worker: WorkerRecord, other: WorkerRecord) -> str:
    """Return the sentence for the worker's own log."""
    name, ours, theirs = _first_difference(worker, other)
    sentence = (
        f"this {worker.role} worker gets no work: it fits no {other.role} worker, and its {name} is not "
        f"that of {other.hello.worker_id} ({ours!r} here, {theirs!r} there); "
        "start all workers of a model with the same model and options"
    )
    return sentence[:MAX_MISFIT]


def _first_difference(a: WorkerRecord, b: WorkerRecord) -> tuple[str, object, object]:
    """Return the first field in which their models differ, and both values."""
    ours, theirs = asdict(a.hello.model), asdict(b.hello.model)
    name = next(name for name in ours if ours[name] != theirs[name])
    return name.replace("_", " "), ours[name], theirs[name]
