"""Limits that coordinators on any number of hosts hold to together: the buckets lie in Redis (any server that
speaks its protocol and Lua).

The script has the rules of ``buckets.py``: fill, look, take; it runs as one, so that two hosts cannot take
the same tokens. Time is the server's. Open streams are counted for each process, under a sign of life that
ends by itself: what a killed process held is free seconds later. While the server does not answer, requests
are admitted and the log warns: a limit is no reason to stop serving. Then the process counts its own anew,
under another name: those that ended meanwhile would be held for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from ..background import Spawn, unwatched
from .buckets import FILLED_AT, NUM_FIELDS, Holder, Room, Shortage, month_of, room, shortage_of, tokens_alone
from .errors import TenantsFileError
from .limits import LIMIT_NAMES, Account, Limits
from .tenancy import Admission, Answer

PREFIX = "splitserve:limits:"
ALIVE_S = 10
RENEW_S = 3.0
TIMEOUT_S = 1.0
LOG_EVERY_S = 5.0
AWAY = (RedisError, OSError, RuntimeError)  # the last is uvloop's, for a connection that has just closed
SCRIPT = """
-- KEYS: one hash a holder. ARGV: change in tokens, change in streams, process, prefix of signs of life,
-- month, now or '', then five limits a holder, 0 for none.
-- Returns whether it was taken, and each holder's numbers and open streams.
local tokens, streams, process, alive = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local month, now = tonumber(ARGV[5]), tonumber(ARGV[6])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local day = math.floor(now / 86400)
local holders, short = {}, false
for i, key in ipairs(KEYS) do
  local limits, state = {}, {}
  for j = 1, 5 do limits[j] = tonumber(ARGV[6 + (i - 1) * 5 + j]) end
  local stored = redis.call('HMGET', key, '0', '1', '2', '3', '4', '5', '6')
  for j = 1, 7 do state[j] = tonumber(stored[j] or '0') end
  if now < state[3] - 60 then
    state[3], state[4], state[6] = now, math.min(state[4], day), math.min(state[6], month)
  end
  local new, elapsed = state[3] == 0, math.max(0, now - state[3])
  for j = 1, 2 do
    local limit = limits[j]
    if limit == 0 then state[j] = 1e300
    elseif new then state[j] = limit
    else state[j] = math.min(limit, state[j] + elapsed * limit / 60) end
  end
  state[3] = math.max(now, state[3])
  if day > state[4] then
    state[4], state[5] = day, 0
    if month > state[6] then state[6], state[7] = month, 0 end
  end
  local open = 0
  if limits[3] > 0 then
    local counts = redis.call('HGETALL', key .. ':streams')
    for j = 1, #counts, 2 do
      if redis.call('EXISTS', alive .. counts[j]) == 1 then open = open + tonumber(counts[j + 1])
      else redis.call('HDEL', key .. ':streams', counts[j]) end
    end
  end
  if streams > 0 then
    short = short or state[1] < 1 or state[2] < tokens or (limits[3] > 0 and open >= limits[3])
      or (limits[4] > 0 and state[5] + tokens > limits[4])
      or (limits[5] > 0 and state[7] + tokens > limits[5])
  end
  holders[i] = {limits, state, open}
end
local result = {short and 0 or 1}
for i, key in ipairs(KEYS) do
  local limits, state, open = unpack(holders[i])
  if not short then
    if streams > 0 and limits[1] > 0 then state[1] = state[1] - 1 end
    if limits[2] > 0 then state[2] = math.min(limits[2], state[2] - tokens) end
    state[5], state[7] = math.max(0, state[5] + tokens), math.max(0, state[7] + tokens)
    if limits[3] > 0 and streams ~= 0 and redis.call('HINCRBY', key .. ':streams', process, streams) == 0 then
      redis.call('HDEL', key .. ':streams', process)
    end
  end
  local stored = {}
  for j = 1, 7 do
    local number = string.format('%.17g', state[j])
    stored[#stored + 1], stored[#stored + 2] = tostring(j - 1), number
    result[#result + 1] = number
  end
  redis.call('HSET', key, unpack(stored))
  redis.call('EXPIRE', key, 3000000) -- longer than a month: by then a holder's numbers are as a new one's
  result[#result + 1] = tostring(open)
end
return result
"""
_log = logging.getLogger(__name__)


class RedisLimiter:
    """A ``Limiter``."""

    def __init__(self, url: str) -> None:
        """Connects when it is first asked. Raises TenantsFileError for a malformed URL."""
        try:
            self._redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, decode_responses=True
            )
        except ValueError as error:
            raise TenantsFileError(f"--redis-url: {error}") from None
        self._script = self._redis.register_script(SCRIPT)
        self._process = secrets.token_hex(8)
        self._open: Counter[str] = Counter()  # streams, or requests for one, of holders with a bound of them
        self._miscounts = True  # what Redis counts as this process's may be other streams than these
        self._tasks: set[asyncio.Task[None]] = set()
        self._alive: asyncio.Task[None] | None = None
        self._complained = float("-inf")

    async def start(self, spawn: Spawn = unwatched) -> None:
        """Gives its first sign of life, and more from then on."""
        await self._renew_alive()
        self._alive = spawn("limits in Redis", self._stay_alive())

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        holders = self._holders(account)
        if not holders:
            answer(Admission(account, tokens, Room()))
        else:
            self._spawn(self._admit(account, holders, tokens, answer))

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        if not (holders := self._holders(admission.account)):
            answer(Admission(admission.account, tokens, admission.room))
        else:
            self._spawn(self._correct(admission, holders, tokens, answer))

    def settle(self, admission: Admission, tokens: int) -> None:
        if holders := self._holders(admission.account):
            self._spawn(self._settle(holders, tokens - admission.tokens))

    async def stop(self) -> None:
        """Send what is pending, and close."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TIMEOUT_S)
        for task in (*self._tasks, *([self._alive] if self._alive is not None else [])):
            task.cancel()
        with contextlib.suppress(*AWAY):
            await self._redis.delete(f"{PREFIX}alive:{self._process}")
        await self._redis.aclose()

    async def take(
        self, holders: Sequence[tuple[str, Limits]], tokens: int, streams: int, now: float | None = None
    ) -> tuple[bool, list[Holder]]:
        """Runs the script: whether it was taken, and what the holders then have. Raises RedisError or
        OSError. ``now``: for tests."""
        alive, month = f"{PREFIX}alive:", month_of(time.time() if now is None else now)
        head: list[Any] = [tokens, streams, self._process, alive, month, "" if now is None else now]
        bounds = [getattr(limits, name) or 0 for _, limits in holders for name in LIMIT_NAMES]
        result: list[Any] = await self._script(
            keys=[PREFIX + key for key, _ in holders], args=[*head, *bounds]
        )
        numbers, width = [float(value) for value in result[1:]], NUM_FIELDS + 1
        return bool(int(result[0])), [
            Holder(numbers[i * width : i * width + NUM_FIELDS], limits, int(numbers[i * width + NUM_FIELDS]))
            for i, (_, limits) in enumerate(holders)
        ]

    async def _admit(
        self, account: Account, holders: Sequence[tuple[str, Limits]], tokens: int, answer: Answer
    ) -> None:
        process = self._process
        self._count(holders, 1)
        try:
            taken, after = await self.take(holders, tokens, 1)
        except AWAY as error:
            self._complain(error)
            answer(Admission(account, tokens, Room()))
            return
        if not taken:
            self._count(holders, -1)
            self._miscounts |= process != self._process  # it was counted under the new name
        answer(Admission(account, tokens, room(after)) if taken else _shortage(after, tokens))

    async def _correct(
        self, admission: Admission, holders: Sequence[tuple[str, Limits]], tokens: int, answer: Answer
    ) -> None:
        """Takes the tokens; where that makes a debt gives them back, and the stream."""
        debt, left = None, Room()
        try:
            _, after = await self.take(holders, tokens - admission.tokens, 0)
            if (debt := _token_shortage(after, 0)) is not None:
                self._count(holders, -1)
                _, after = await self.take(holders, -tokens, -1)
                debt = _token_shortage(after, tokens) or debt
            left = room(after)
        except AWAY as error:
            self._complain(error)
        answer(debt or Admission(admission.account, tokens, left))

    async def _settle(self, holders: Sequence[tuple[str, Limits]], change: int) -> None:
        self._count(holders, -1)
        try:
            await self.take(holders, change, -1)
        except AWAY as error:
            self._complain(error)

    async def _stay_alive(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._renew_alive()

    async def _renew_alive(self) -> None:
        try:
            # the sign is gone where Redis came back without its data
            if not self._miscounts and await self._redis.expire(f"{PREFIX}alive:{self._process}", ALIVE_S):
                return
            process = secrets.token_hex(8)
            await self._redis.set(f"{PREFIX}alive:{process}", 1, ex=ALIVE_S)
            before, self._process, self._miscounts = self._process, process, False
            self._open = +self._open
            for key, num_streams in list(self._open.items()):
                await self._redis.hincrby(f"{PREFIX}{key}:streams", process, num_streams)
            await self._redis.delete(f"{PREFIX}alive:{before}")
        except AWAY as error:
            self._complain(error)

    def _count(self, holders: Sequence[tuple[str, Limits]], change: int) -> None:
        self._open.update({key: change for key, limits in holders if limits.max_streams is not None})

    def _holders(self, account: Account) -> list[tuple[str, Limits]]:
        both = ((f"tenant:{account.tenant_id}", account.tenant_limits), (account.key, account.key_limits))
        return [(key, limits) for key, limits in both if limits.bounded]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _complain(self, error: Exception) -> None:
        self._miscounts, now = True, time.monotonic()
        if now - self._complained >= LOG_EVERY_S:
            self._complained = now
            _log.error("Redis does not answer, requests pass without a look at their limits: %s", error)


def _shortage(holders: Sequence[Holder], tokens: int) -> Shortage:
    found = shortage_of(holders, tokens, max(holder.state[FILLED_AT] for holder in holders))
    assert found is not None, "the script refused what its own numbers allow"
    return found


def _token_shortage(holders: Sequence[Holder], tokens: int) -> Shortage | None:
    limited = [Holder(state, tokens_alone(limits)) for state, limits, _ in holders]
    return shortage_of(limited, tokens, max(holder.state[FILLED_AT] for holder in holders))
