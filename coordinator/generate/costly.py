"""Planning of costly requests away from the event loop: long prompts on a thread, large bodies in the reader
process. A key's limits are asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..http.call import Call
from ..tenants.buckets import Shortage
from ..tenants.tenancy import Admission, Answer, Limiter, refusal_of
from .conversation import AskedRequest
from .plan import PLAN_HEADERS, Planner, RequestPlan
from .prompts import has_images
from .reader.body_reader import BodyReader

Known = tuple[AskedRequest, Planner, str]
"""A request that is parsed, its model's planner, and the route by which it came (empty: none)."""


class CostlyPlanner:
    """Plans requests while the event loop goes on."""

    def __init__(self, reader: BodyReader, limiter: Limiter) -> None:
        self._reader, self._limiter = reader, limiter

    async def plan(self, call: Call, known: Known | None) -> tuple[RequestPlan, Admission]:
        """Return the plan, and the admission of one request of one token so far. Raises ApiError.

        ``known``: None if the body is not parsed yet. Chats with images are read by the reader's process: one
        takes seconds, and other prompts wait for the threads.
        """
        if known is not None and has_images(known[0]):
            known = None
        admission = await self._asked(lambda answer: self._limiter.admit(call.account, 1, answer))
        own_class = call.account.priority_class
        try:
            if known is not None:
                request, planner, route = known
                aside = planner.model.tokenizer.aside
                plan = await aside(lambda: planner.plan(request, call.headers, own_class))
                return plan._replace(route=route), admission
            headers = {name: call.headers[name] for name in PLAN_HEADERS if name in call.headers}
            how = call.endpoint, headers, own_class, call.prefers
            read: RequestPlan = await self._reader.read("plan", call.body, *how)
            if read.route and self._reader.refuses(read.model):  # since its reading began
                read = await self._reader.read("plan", call.body, *how)
            return read, admission
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
