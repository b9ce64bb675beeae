"""Planning of costly requests away from the event loop: long prompts on a thread, large bodies in the reader
process. A key's limits are asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import no_workers
from ..http.call import Call
from ..lifecycle.request import Dispatcher
from ..tenants.buckets import Shortage
from ..tenants.tenancy import Admission, Answer, Limiter, refusal_of
from .plan import PLAN_HEADERS, AskedRequest, Planner, RequestPlan
from .reader.body_reader import BodyReader


class CostlyPlanner:
    """Plans requests for one model while the event loop goes on."""

    def __init__(
        self, planner: Planner, reader: BodyReader, limiter: Limiter, dispatcher: Dispatcher
    ) -> None:
        self._planner, self._reader, self._limiter, self._dispatcher = planner, reader, limiter, dispatcher

    async def plan(self, call: Call, request: AskedRequest | None) -> tuple[RequestPlan, Admission]:
        """Return the plan, and the admission of one request of one token so far. Raises ApiError.

        ``request``: None if the body is not parsed yet.
        """
        admission = await self._asked(lambda answer: self._limiter.admit(call.account, 1, answer))
        own_class = call.account.priority_class
        try:
            if request is not None:
                aside = self._planner.model.tokenizer.aside
                return await aside(lambda: self._planner.plan(request, call.headers, own_class)), admission
            headers = {name: call.headers[name] for name in PLAN_HEADERS if name in call.headers}
            plan = await self._reader.read("plan", call.body, call.endpoint, headers, own_class)
            if gap := self._dispatcher.gap():
                raise no_workers(gap)
            return plan, admission
        except BaseException:
            self._limiter.settle(admission, 0)
            raise

    async def _asked(self, ask: Callable[[Answer], None]) -> Admission:
        """Wait for a limiter's answer. Raises RateLimited."""
        answer: asyncio.Future[Admission | Shortage] = asyncio.get_running_loop().create_future()
        ask(answer.set_result)
        if isinstance(found := await answer, Shortage):
            raise refusal_of(found)
        return found
