"""One HTTP request for tokens as it was, once it is over: for metrics, the log, traces and the dashboard."""

from __future__ import annotations

from typing import NamedTuple

from ...transport.process.otel import RequestTrace
from ..lifecycle.time_ledger import Stages, TimeLedger


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

    @property
    def total(self) -> float:
        """From arrival to the last byte."""
        return self.ledger.end - self.ledger.begin
