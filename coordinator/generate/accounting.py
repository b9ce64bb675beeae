"""Counts one exchange: its tokens and time, for its answer, for metrics and for billing."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, time
from typing import Any

from ...transport.process.otel import RequestTrace
from ..http.call import Answering
from ..lifecycle.request import Ended
from ..lifecycle.time_ledger import NAMES, Stages, TimeLedger
from ..metrics.request_record import RequestRecord
from ..tenants.usage_record import UsageRecord
from .choice import Choice
from .formats import Usage
from .plan import RequestPlan

_USAGE_KEYS = [f"{name}_s" for name in NAMES]


class Accounting:
    """One exchange's numbers. The choice that ended last gives stages and workers. Monotonic seconds."""

    def __init__(
        self, id: str, plan: RequestPlan, call: Answering, arrival: float, choices: Sequence[Choice]
    ) -> None:
        self.arrival = arrival
        self.status = ""  # as it is counted; empty while it runs
        self.num_prompt_tokens = plan.num_prompt_tokens
        self._id, self._plan, self._call = id, plan, call
        self._choices = choices
        self._last: Ended | None = None
        self._ledger = TimeLedger("parse", arrival)

    def choice_ended(self, ended: Ended, now: float) -> None:
        """Take note that one choice has ended."""
        self._last = ended
        if ended.ledger is not None:
            self._ledger = ended.ledger
            self._ledger.enter("stream", now)

    def close(self) -> tuple[Stages, float]:
        """Return the seconds by stage until now, and in all: these by the clock, not from the stages, with
        which they must agree."""
        now = monotonic()
        self._ledger.close(now)
        return self._ledger.stages(), now - self.arrival

    def num_output_tokens(self) -> int:
        return sum([choice.num_tokens for choice in self._choices])

    def num_cached(self) -> int:
        """Return how many prompt tokens were found in a prefix cache: of each prompt, before its first
        candidate ran."""
        cached: dict[int, int] = {}
        for choice in self._choices:
            if choice.ended is not None:
                found = choice.ended.num_cached_tokens
                cached[id(choice.prompt)] = min(found, cached.get(id(choice.prompt), found))
        return sum(cached.values())

    def num_used_tokens(self) -> int:
        """Return prompt and output tokens, for limits; 0 where the server gave nothing for the prompt."""
        num_output = self.num_output_tokens()
        if num_output or self.status in ("200", "cancelled", "too_slow"):
            return self.num_prompt_tokens + num_output
        return 0

    def usage_so_far(self) -> Usage:
        """Return OpenAI's three counts."""
        num_prompt, num_output = self.num_prompt_tokens, self.num_output_tokens()
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def usage(self, stages: Stages) -> dict[str, Any]:
        """Return the answer's ``usage``: tokens, and under ``splitserve`` the seconds by stage of the choice
        that ended last."""
        assert self._last is not None, "an answer has a choice that has ended"
        num_cached = self.num_cached()
        num_reasoning = sum([choice.num_reasoning_tokens for choice in self._choices])
        return {
            **self.usage_so_far(),
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
            "splitserve": {
                **{key: round(seconds, 6) for key, seconds in zip(_USAGE_KEYS, stages, strict=True)},
                "cached_tokens": num_cached,
                "dispatches": self._last.num_dispatches,
                **({"timed_out": True} if any(choice.timed_out for choice in self._choices) else {}),
            },
        }

    def billing_begun(self) -> UsageRecord:
        """Return what is known for billing before the first token."""
        account, plan = self._call.account, self._plan
        names = (account.tenant, account.key, plan.model, plan.endpoint, plan.priority_class)
        return UsageRecord(self._id, time(), *names, "", self.num_prompt_tokens)

    def billing(self) -> UsageRecord:
        """Return what was used until now."""
        now, stages = monotonic(), self._ledger.stages()
        return self.billing_begun()._replace(
            started=time() - (now - self.arrival),
            status=self.status,
            cached_tokens=self.num_cached(),
            completion_tokens=self.num_output_tokens(),
            kv_byte_seconds=sum(
                choice.ended.kv_byte_seconds() for choice in self._choices if choice.ended is not None
            ),
            parse_s=stages.parse,
            queue_s=stages.queue,
            prefill_s=stages.prefill,
            handoff_s=stages.handoff,
            decode_s=stages.decode,
            stream_s=stages.coordinator + stages.stream,
        )

    def record(self, now: float, trace: RequestTrace | None) -> RequestRecord:
        """Close the books at ``now``, monotonic seconds, and return them for metrics, logs and traces."""
        self._ledger.close(now)
        ended = self._last or Ended()
        return RequestRecord(
            id=self._id,
            endpoint=self._plan.endpoint,
            status=self.status,
            ledger=self._ledger,
            stages=self._ledger.stages(),
            first_token_at=min([c.first_token_at for c in self._choices if c.first_token_at], default=0.0),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached(),
            num_output_tokens=self.num_output_tokens(),
            num_dispatches=ended.num_dispatches,
            prefill_worker=ended.prefill_worker,
            decode_worker=ended.decode_worker,
            tenant=self._call.account.tenant,
            trace=trace,
            client=self._call.client,
            priority_class=self._plan.priority_class,
            model=self._plan.model,
            num_images=sum(len(prompt.images) for prompt in self._plan.prompts),
        )
