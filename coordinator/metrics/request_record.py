"""One HTTP request for tokens as it was, once it is over: for metrics, traces, the dashboard,
and its line in the log."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ...transport.process.otel import RequestTrace
from ..lifecycle.time_ledger import NAMES, Stages, TimeLedger

_log = logging.getLogger(__name__)


class RequestRecord(NamedTuple):
    """Times in seconds of the coordinator's monotonic clock. Of several choices, the one that ended last
    gives ledger and workers."""

    id: str
    endpoint: str
    status: (
        str  # the HTTP status, "cancelled" where the client went away first, "too_slow" where it was cut off
    )
    ledger: TimeLedger
    stages: Stages
    first_token_at: float  # of the first choice that had one; 0: none
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_dispatches: int  # of that choice; more than one: it was tried again
    prefill_worker: str = ""
    decode_worker: str = ""
    tenant: str = ""
    trace: RequestTrace | None = None
    client: str = ""  # address
    priority_class: str = "standard"
    model: str = ""  # or adapter, by the name that answers have
    num_images: int = 0  # of its prompts

    @property
    def total(self) -> float:
        """From arrival to the last byte."""
        return self.ledger.end - self.ledger.begin


def log_request(record: RequestRecord) -> None:
    """A listener of ``Metrics``. As JSON every number is a field; as text the sentence has them."""
    if not _log.isEnabledFor(logging.INFO):
        return
    stages = {name: round(getattr(record.stages, name), 6) for name in NAMES}
    tokens = (
        f"{record.num_prompt_tokens} prompt tokens ({record.num_cached_tokens} cached), "
        f"{record.num_output_tokens} output tokens"
    )
    if record.num_images:
        tokens += f", {record.num_images} images"
    where = f"{record.prefill_worker or '-'} to {record.decode_worker or '-'}"
    times = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in stages.items() if seconds)
    fields: dict[str, object] = {
        "request_id": record.id,
        "endpoint": record.endpoint,
        "model": record.model,
        "status": record.status,
        "tenant": record.tenant,
        "client": record.client,
        "seconds": round(record.total, 6),
        "stages": stages,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "images": record.num_images,
        "dispatches": record.num_dispatches,
        "prefill_worker": record.prefill_worker,
        "decode_worker": record.decode_worker,
    }
    if record.trace is not None:
        fields["trace_id"] = record.trace.trace_id
    _log.info(
        "%s %s in %.1f ms (%s): %s, %s",
        record.id,
        record.status,
        record.total * 1e3,
        times,
        tokens,
        where,
        extra={"fields": fields},
    )
