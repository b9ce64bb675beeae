"""Stored responses in Redis, for coordinators on several hosts: each reads, continues, cancels and deletes
what the others have stored.

    one:ID             hash: tenant, previous, deadline, status, response, input
    events:ID          list of events as JSON, by their numbers
    item:N:ID:TENANT   one item as JSON; N: characters of its id, which may be a client's own
    of:TENANT          sorted set of the tenant's responses, by age

Every key expires by itself. Changes are scripts, so that no coordinator writes to a response that another one
has cancelled or deleted.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import orjson
import redis.asyncio
from redis.exceptions import OutOfMemoryError

from ..errors import CannotStart, StorageFull, Unavailable
from ..tenants.redis_limiter import AWAY
from .responses_items import Item
from .stored_response import (
    MAX_INPUT_BYTES,
    MAX_PAGE_BYTES,
    MAX_TURNS,
    RUNNING,
    Stored,
    item_key,
    not_found,
    page_of,
    stored_of,
)

PREFIX = "splitserve:responses:"
TIMEOUT_S = 2.0
FIELDS = ("tenant", "previous", "deadline", "status", "response", "input")
SAVE = """
-- KEYS: hash, events, ids of the tenant. ARGV: 1 to begin it, seconds to keep, now, id, number of the first
-- event, how many, the events, number of items, key and JSON of each, fields of the hash and their values.
-- Done twice, because an answer was lost on its way, it leaves the same. No event comes behind a lost one.
local keep, first, num_events, at = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6]), 7
if ARGV[1] ~= '1' then
  local status = redis.call('HGET', KEYS[1], 'status')
  if status ~= 'queued' and status ~= 'in_progress' then return 0 end
end
if num_events > 0 and first <= redis.call('LLEN', KEYS[2]) then
  if first > 0 then redis.call('LTRIM', KEYS[2], 0, first - 1) else redis.call('DEL', KEYS[2]) end
  for i = at, at + num_events - 1 do redis.call('RPUSH', KEYS[2], ARGV[i]) end
  redis.call('EXPIRE', KEYS[2], keep)
end
at = at + num_events
local num_items = tonumber(ARGV[at])
at = at + 1
for i = at, at + 2 * num_items - 2, 2 do redis.call('SET', ARGV[i], ARGV[i + 1], 'NX', 'EX', keep) end
redis.call('HSET', KEYS[1], unpack(ARGV, at + 2 * num_items))
if ARGV[1] == '1' then
  redis.call('EXPIRE', KEYS[1], keep)
  redis.call('ZADD', KEYS[3], ARGV[3], ARGV[4])
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', tonumber(ARGV[3]) - keep)
  redis.call('EXPIRE', KEYS[3], keep)
end
return 1
"""
CANCEL = """
-- KEYS: hash. ARGV: the cancelled response.
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'queued' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelled', 'response', ARGV[1])
end
"""


class RedisResponses:
    """A ``ResponseStore``."""

    def __init__(self, url: str, keep_s: float) -> None:
        """Connects when it is first asked. Raises CannotStart for a malformed URL."""
        try:
            self._redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, decode_responses=True
            )
        except ValueError as error:
            raise CannotStart(f"--responses-file: {error}") from None
        self._keep_s = max(1, int(keep_s))
        self._save, self._cancel = map(self._redis.register_script, (SAVE, CANCEL))

    async def close(self) -> None:
        await self._redis.aclose()

    async def save(
        self,
        tenant: str,
        response: dict[str, Any],
        input: Sequence[Item],
        *,
        deadline: float = 0.0,
        events: Iterable[dict[str, Any]] = (),
        max_bytes: int | None = None,
    ) -> bool:
        """``max_bytes`` does not hold here: Redis bounds its memory itself."""
        id, status = response["id"], response["status"]
        begins = status == "queued" or not deadline
        new = list(events)
        first = new[0]["sequence_number"] if new else 0
        items = [] if status in RUNNING else [*input, *response["output"]]
        fields = {"status": status, "response": orjson.dumps(response), "deadline": deadline}
        if begins:
            previous = response["previous_response_id"] or ""
            fields |= {"tenant": tenant, "previous": previous, "input": orjson.dumps(list(input))}
        head = (
            int(begins),
            self._keep_s,
            time.time(),
            id,
            first,
            len(new),
            *map(orjson.dumps, new),
            len(items),
        )
        named = [part for item in items for part in (self._item(tenant, item["id"]), orjson.dumps(item))]
        written = [part for field in fields.items() for part in field]
        keys = [self._key("one", id), self._key("events", id), self._key("of", tenant)]
        return bool(await _answered(self._save(keys=keys, args=[*head, *named, *written])))

    async def found(self, tenant: str, id: str, param: str = "response_id") -> Stored:
        values = dict(
            zip(FIELDS, await _answered(self._redis.hmget(self._key("one", id), *FIELDS)), strict=True)
        )
        if values["response"] is None or values["tenant"] != tenant:
            raise not_found(id, param)
        deadline, previous = float(values["deadline"]), values["previous"] or None
        return stored_of(id, values["response"], values["input"], previous, values["status"], deadline)

    async def conversation(self, tenant: str, id: str) -> list[Item]:
        turns, num_bytes = list[list[Item]](), 0
        next_id: str | None = id
        while next_id is not None and len(turns) < MAX_TURNS and num_bytes < MAX_INPUT_BYTES:
            stored = await self.found(tenant, next_id, "previous_response_id")
            num_bytes += stored.input_bytes
            turns.append([*stored.input, *stored.response["output"]])
            next_id = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    async def items(self, tenant: str, ids: Sequence[str]) -> dict[str, Item]:
        found, num_bytes = dict[str, Item](), 0
        for id in ids:
            if num_bytes <= MAX_INPUT_BYTES and (
                item := await _answered(self._redis.get(self._item(tenant, id)))
            ):
                found[id], num_bytes = orjson.loads(item), num_bytes + len(item)
        return found

    async def newest(self, tenant: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        begin = 0
        if after is not None:
            rank = await _answered(self._redis.zrevrank(self._key("of", tenant), after))
            if rank is None:
                raise not_found(after, "after")
            begin = rank + 1
        found, num_bytes = list[str](), 0
        for id in await _answered(self._redis.zrevrange(self._key("of", tenant), begin, begin + limit)):
            response = await _answered(self._redis.hget(self._key("one", id), "response"))
            if response is not None:
                found.append(response)
                if num_bytes > MAX_PAGE_BYTES:
                    break
                num_bytes += len(response)
        return page_of(found, limit)

    async def events(self, id: str, after: int) -> list[bytes]:
        found = await _answered(self._redis.lrange(self._key("events", id), max(0, after + 1), -1))
        return [event.encode() for event in found]

    async def delete(self, tenant: str, id: str) -> None:
        stored = await self.found(tenant, id)
        items = [self._item(tenant, item["id"]) for item in (*stored.input, *stored.response["output"])]
        await _answered(self._redis.delete(self._key("one", id), self._key("events", id), *items))
        await _answered(self._redis.zrem(self._key("of", tenant), id))

    async def cancel(self, tenant: str, id: str) -> Stored:
        stored = await self.found(tenant, id)
        if not stored.running:
            return stored
        cancelled = {**stored.response, "status": "cancelled"}
        await _answered(self._cancel(keys=[self._key("one", id)], args=[orjson.dumps(cancelled)]))
        return await self.found(tenant, id)

    def _key(self, kind: str, name: str) -> str:
        return f"{PREFIX}{kind}:{name}"

    def _item(self, tenant: str, id: str) -> str:
        return self._key("item", item_key(tenant, id))


async def _answered(asked: Awaitable[Any]) -> Any:
    """Return Redis's answer. Raises StorageFull, or Unavailable where there is none."""
    try:
        return await asked
    except OutOfMemoryError as error:
        raise StorageFull("stored responses in Redis") from error
    except AWAY as error:
        message = f"Redis, which keeps the stored responses, does not answer: {error}"
        raise Unavailable(message, retry_after_s=1) from error
