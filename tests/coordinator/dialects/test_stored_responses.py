"""Stored responses and their items, as hostile clients send them: no one's items get in the way of another
tenant's, none is read without bound, and none of wrong types ends as a defect."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from splitserve.coordinator.dialects import responses_store
from splitserve.coordinator.dialects.responses_body import ResponsesRequest
from splitserve.coordinator.dialects.responses_events import ResponseAnswer
from splitserve.coordinator.dialects.responses_items import items_of, messages_of
from splitserve.coordinator.dialects.stored_response import ResponseStore

ASKED: Any = {"model": "tiny", "input": "Hi!", "temperature": 0}


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "Hi", "id": {"a": 1}},
        {"role": "user", "content": "Hi", "id": 10**18},
        {"role": "user", "content": [{"type": ["input_text"], "text": "Hi"}]},
        {"type": "item_reference"},
    ],
)
async def test_an_item_of_wrong_types_is_refused(client: AsyncOpenAI, item: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]"):
        await client.responses.create(**{**ASKED, "input": [item]})


@pytest.mark.parametrize("content", ["abc", 5, {"a": 1}, [5], [{"text": 5}]])
def test_a_thought_of_another_form_is_left_out(content: Any) -> None:
    items = items_of([{"type": "reasoning", "content": content}, {"role": "assistant", "content": "Hi"}])
    assert messages_of(items) == [{"role": "assistant", "content": "Hi"}]


async def stored(store: ResponseStore, tenant: str, id: str, input: Any, previous: str | None = None) -> None:
    asked = ResponsesRequest.model_validate({"input": "Hi", "previous_response_id": previous})
    response = {**ResponseAnswer(id, asked, "tiny").response, "status": "failed"}
    await store.save(tenant, response, items_of(input))


async def test_an_id_that_another_tenant_has_taken_still_names_ones_own_item(store: ResponseStore) -> None:
    for tenant in ("a", "b"):
        await stored(store, tenant, f"resp_{tenant}", [{"role": "user", "content": tenant, "id": "msg_1"}])
    for tenant in ("a", "b"):
        assert (await store.items(tenant, ["msg_1"]))["msg_1"]["content"] == tenant
    await store.close()


async def test_no_more_of_a_conversation_is_read_than_may_fit(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs in the background is stored before its length is known: a thousand of 16 MiB, one after the
    other, would be 16 GB."""
    monkeypatch.setattr(responses_store, "MAX_INPUT_BYTES", 1000)
    previous = None
    for number in range(10):
        await stored(store, "a", f"resp_{number}", "x" * 400, previous)
        previous = f"resp_{number}"
    assert len(await store.conversation("a", "resp_9")) == 3
    await store.close()
