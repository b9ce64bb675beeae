"""Stored responses and lists of them are bounded in bytes, tenant by tenant."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from splitserve.coordinator.dialects import responses_store, stored_response
from splitserve.coordinator.dialects.responses_body import ResponsesRequest
from splitserve.coordinator.dialects.responses_events import ResponseAnswer
from splitserve.coordinator.dialects.responses_items import items_of
from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.stored_bytes import ROW_BYTES, StorageLimitReached, stored_in


async def store_one(
    store: SqliteResponses, tenant: str, id: str, size: int, max_bytes: int | None = None
) -> None:
    asked = ResponsesRequest.model_validate({"input": "Hi", "instructions": "x" * size})
    response = {**ResponseAnswer(id, asked, "tiny").response, "status": "completed"}
    await store.save(tenant, response, items_of("Hi"), max_bytes=max_bytes)


async def test_a_tenants_oldest_responses_make_room_for_its_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    store = SqliteResponses(path, 3600)
    await store_one(store, "b", "resp_b", 5000)
    for i in range(50):
        await store_one(store, "a", f"resp_{i}", 10_000, 100_000)
    kept, more = await store.newest("a", None, 50)
    assert 5 < len(kept) < 10
    assert [one["id"] for one in kept] == [f"resp_{49 - i}" for i in range(len(kept))]
    assert not more
    assert stored_in(path)["a"] <= 100_000
    with pytest.raises(StorageLimitReached):
        await store_one(store, "a", "resp_large", 100_000, 100_000)
    assert (await store.found("b", "resp_b")).id == "resp_b"
    await store.close()
    store = SqliteResponses(path, 3600)
    for one in (await store.newest("a", None, 50))[0]:
        await store.delete("a", one["id"])
    assert set(stored_in(path)) == {"b"}
    await store.close()


async def test_after_a_limit_was_lowered_room_is_made_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once held up every tenant and coordinator, for minutes."""
    monkeypatch.setattr(responses_store, "MAX_DELETED", 3)
    store = SqliteResponses(tmp_path / "responses", 3600)
    for i in range(9):
        await store_one(store, "a", f"resp_{i}", 10_000)
    left = []
    for i in range(9, 13):
        await store_one(store, "a", f"resp_{i}", 10_000, 50_000)
        left.append([one["id"] for one in (await store.newest("a", None, 50))[0]])
    assert [len(ids) for ids in left] == [7, 5, 4, 4]
    assert left[-1] == ["resp_12", "resp_11", "resp_10", "resp_9"]
    await store.close()


async def test_a_file_of_an_earlier_version_is_counted_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    store = SqliteResponses(path, 3600)
    await store_one(store, "a", "resp_old", 10_000)
    await store.close()
    with sqlite3.connect(path) as db:  # as that version left it
        for name in ("in", "out", "changed"):
            db.execute(f"DROP TRIGGER responses_{name}")
        db.execute("DROP TABLE stored")
        db.execute("ALTER TABLE responses DROP COLUMN bytes")
    db.close()
    store = SqliteResponses(path, 3600)
    assert stored_in(path) == {"a": ROW_BYTES}
    await store_one(store, "a", "resp_new", 10_000, 20_000)
    await store.delete("a", "resp_old")
    assert 10_000 + ROW_BYTES < stored_in(path)["a"] < 20_000
    await store.delete("a", "resp_new")
    assert stored_in(path) == {}
    await store.close()


async def test_a_full_file_loses_the_oldest_of_the_tenant_with_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size on disk never shrank, and every ten minutes a tenth of all was deleted, for good."""
    monkeypatch.setattr(responses_store, "MAX_BYTES", 200_000)
    store = SqliteResponses(tmp_path / "responses", 3600)
    await store_one(store, "b", "resp_b", 5000)
    for i in range(100):
        await store_one(store, "a", f"resp_{i}", 10_000)
    for _ in range(20):
        store._prune_at = 0.0
        await store.newest("a", None, 1)
    assert len((await store.newest("b", None, 100))[0]) == 1
    assert 1 < len((await store.newest("a", None, 100))[0]) < 20
    await store.close()


async def test_a_page_of_responses_is_bounded_in_bytes_and_none_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one second came again and again."""
    for module in (responses_store, stored_response):
        monkeypatch.setattr(module, "MAX_PAGE_BYTES", 40_000)
    store = SqliteResponses(tmp_path / "responses", 3600)
    sizes = [100, 100_000, *([10_000] * 7)]
    for i, size in enumerate(sizes):
        await store_one(store, "a", f"resp_{i}", size)
    found, after, more = list[str](), None, True
    while more:
        page, more = await store.newest("a", after, 100)
        assert len(page) == 1 or sum(len(one["instructions"]) for one in page) <= 40_000
        found += [one["id"] for one in page]
        after = found[-1]
    assert found == [f"resp_{i}" for i in reversed(range(len(sizes)))]
    await store.close()
