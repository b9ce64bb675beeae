"""One log line for each request that is over: what it was, and where its time went."""

from __future__ import annotations

import logging

from ..lifecycle.time_ledger import NAMES
from .request_record import RequestRecord

_log = logging.getLogger(__name__)


def log_request(record: RequestRecord) -> None:
    """A listener of ``Metrics``. As JSON every number is a field; as text the sentence has them."""
    if not _log.isEnabledFor(logging.INFO):
        return
    stages = {name: round(getattr(record.stages, name), 6) for name in NAMES}
    tokens = (
        f"{record.num_prompt_tokens} prompt tokens ({record.num_cached_tokens} cached), "
        f"{record.num_output_tokens} output tokens"
    )
    where = f"{record.prefill_worker or '-'} to {record.decode_worker or '-'}"
    times = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in stages.items() if seconds)
    fields: dict[str, object] = {
        "request_id": record.id,
        "endpoint": record.endpoint,
        "status": record.status,
        "tenant": record.tenant,
        "client": record.client,
        "seconds": round(record.total, 6),
        "stages": stages,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
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
