"""Planning of costly requests away from the event loop: long prompts on a thread, large bodies in the reader
process. A key's limits are asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import MUST_BE_DATA, ImagesWanted, WrongField
from ..http.call import Call
from ..tenants.buckets import Shortage
from ..tenants.tenancy import Admission, Answer, Limiter, refusal_of
from .conversation import AskedRequest
from .plan import PLAN_HEADERS, Planner, RequestPlan
from .prompts import has_images
from .reader.body_reader import BodyReader

if TYPE_CHECKING:  # it imports httpx, which most servers start without
    from ..images.fetching import ImageFetcher

NOT_FETCHED = f"{MUST_BE_DATA}: this server fetches nothing; its operator may allow hosts by --image-domains"
Known = tuple[AskedRequest, Planner, str]
"""A request that is parsed, its model's planner, and the route by which it came (empty: none)."""


class CostlyPlanner:
    """Plans requests while the event loop goes on."""

    def __init__(self, reader: BodyReader, limiter: Limiter, images: ImageFetcher | None) -> None:
        """``images``: None: none are fetched."""
        self._reader, self._limiter, self._images = reader, limiter, images

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
            return await self._read(call), admission
        except BaseException:
            self._limiter.settle(admission, 0)
            raise

    async def _read(self, call: Call) -> RequestPlan:
        """Plan in the reader's process; twice where images are to be fetched, which that one finds out."""
        headers = {name: call.headers[name] for name in PLAN_HEADERS if name in call.headers}

        async def plan(fetched: Mapping[str, bytes]) -> RequestPlan:
            how = call.endpoint, headers, call.account.priority_class, call.prefers, fetched
            planned: RequestPlan = await self._reader.read("plan", call.body, *how)
            if planned.route and self._reader.refuses(planned.model):  # since its reading began
                planned = await self._reader.read("plan", call.body, *how)
            return planned

        try:
            return await plan({})
        except ImagesWanted as error:
            if self._images is None:
                raise WrongField(error.wanted[0][0], NOT_FETCHED) from None
            wanted, timeout_s = error.wanted, error.timeout_s
        async with self._images.fetched(wanted, call, timeout_s) as fetched:
            return await plan(fetched)

    async def _asked(self, ask: Callable[[Answer], None]) -> Admission:
        """Wait for a limiter's answer. Raises RateLimited."""
        answer: asyncio.Future[Admission | Shortage] = asyncio.get_running_loop().create_future()
        ask(answer.set_result)
        if isinstance(found := await answer, Shortage):
            raise refusal_of(found)
        return found
