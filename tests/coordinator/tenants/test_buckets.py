"""Limits hold, over any minute and any day, for any requests."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.coordinator.tenants.buckets import (
    DAY_TOKENS,
    MONTH_TOKENS,
    NUM_FIELDS,
    TOKENS,
    Holder,
    Room,
    Shortage,
    admit,
    settle,
)
from splitserve.coordinator.tenants.limits import LIMIT_NAMES, Account, Limits
from splitserve.coordinator.tenants.tenancy import duration, headers_of, refusal_of

NOON = datetime(2026, 3, 31, 12, tzinfo=UTC).timestamp()


def holder(**limits: int) -> Holder:
    return Holder([0.0] * NUM_FIELDS, Limits(**limits))


@given(
    limit=st.integers(1, 200), asks=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 100)), max_size=60)
)
def test_no_more_than_a_burst_and_the_rate_ever_passes(limit: int, asks: list[tuple[float, int]]) -> None:
    who, now, passed = holder(tokens_per_minute=limit), NOON, 0
    for wait_s, tokens in asks:
        now += wait_s
        if isinstance(admit([who], tokens, now), Room):
            passed += tokens
        assert passed <= limit + (now - NOON) * limit / 60 + 1e-6


@given(limit=st.integers(1, 100), used=st.integers(0, 300), estimated=st.integers(1, 100))
def test_a_request_that_comes_when_it_was_told_to_is_let_in(limit: int, used: int, estimated: int) -> None:
    who = holder(tokens_per_minute=limit)
    if isinstance(admit([who], estimated, NOON), Room):
        settle([who], estimated, used, NOON)
    again = admit([who], limit, NOON)
    if isinstance(again, Shortage):
        assert again.what == "tokens"
        assert isinstance(admit([who], limit, NOON + again.wait_s - 0.5), Shortage) or again.wait_s < 0.5
        assert isinstance(admit([who], limit, NOON + again.wait_s + 1e-3), Room)


def test_what_is_refused_takes_nothing_from_anyone() -> None:
    tenant, key = holder(requests_per_minute=5, tokens_per_minute=100), holder(requests_per_minute=1)
    assert isinstance(admit([tenant, key], 10, NOON), Room)
    before = list(tenant.state)
    refused = admit([tenant, key], 10, NOON)
    assert isinstance(refused, Shortage)
    assert (refused.what, refused.limit, refused.wait_s) == ("requests", 1, 60)
    assert list(tenant.state) == before


def test_an_estimate_is_set_right_at_the_end() -> None:
    who = holder(tokens_per_minute=600, tokens_per_day=10_000)
    admit([who], 500, NOON)
    settle([who], 500, 20, NOON)
    assert (who.state[TOKENS], who.state[DAY_TOKENS], who.state[MONTH_TOKENS]) == (580, 20, 20)
    admit([who], 580, NOON)
    settle([who], 580, 1180, NOON)  # it used more: a debt that a minute pays
    owing = admit([who], 1, NOON)
    assert isinstance(owing, Shortage)
    assert owing.wait_s == pytest.approx(60.1)


def test_quotas_end_with_the_day_and_the_month() -> None:
    who = holder(tokens_per_day=100, tokens_per_month=150)
    assert isinstance(admit([who], 100, NOON), Room)
    today = admit([who], 1, NOON)
    assert isinstance(today, Shortage)
    assert (today.what, today.wait_s) == ("day", 12 * 3600)
    tomorrow = NOON + today.wait_s  # the first of April
    assert isinstance(admit([who], 100, tomorrow), Room)
    assert who.state[MONTH_TOKENS] == 100
    may = datetime(2026, 5, 1, tzinfo=UTC).timestamp()
    spent = admit([who], 60, tomorrow + 86_400)
    assert isinstance(spent, Shortage)
    assert (spent.what, spent.wait_s) == ("month", may - tomorrow - 86_400)
    assert isinstance(admit([who], 60, may), Room)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    who = holder(requests_per_minute=1, tokens_per_day=10)
    admit([who], 10, NOON)
    assert isinstance(admit([who], 1, NOON - 90_000), Shortage)


def test_a_clock_that_is_set_right_does_not_stop_a_bucket_until_its_wrong_time_comes_again() -> None:
    tenant, year = holder(requests_per_minute=1, tokens_per_day=10), 365 * 86_400
    admit([tenant], 10, NOON + year)  # a host that began with a wrong clock
    assert isinstance(admit([tenant], 1, NOON), Shortage)
    assert isinstance(admit([tenant], 1, NOON + 60), Shortage), "today's tokens stay used"
    assert isinstance(admit([tenant], 10, NOON + 86_400), Room)


def test_larger_than_the_limit_is_said_to_be_so() -> None:
    refused = admit([holder(tokens_per_minute=10)], 11, NOON)
    assert isinstance(refused, Shortage)
    assert math.isinf(refused.wait_s)
    error = refusal_of(refused)
    assert error.message.startswith("Request too large")
    assert not any(name == b"retry-after" for name, _ in error.headers())


def test_headers_speak_of_who_has_less() -> None:
    room = admit(
        [holder(requests_per_minute=100, tokens_per_minute=6000), holder(requests_per_minute=10)], 1000, NOON
    )
    assert isinstance(room, Room)
    assert dict(headers_of(room)) == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"9",
        b"x-ratelimit-reset-requests": b"6s",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"5000",
        b"x-ratelimit-reset-tokens": b"10s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.02, "20ms"), (1.5, "1.5s"), (6 * 60, "6m0s"), (0, "0ms"), (86_400, "24h0m0s")]
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("names", [*((name,) for name in LIMIT_NAMES), LIMIT_NAMES])
def test_each_limit_binds_alone_and_all_of_them_together(names: tuple[str, ...]) -> None:
    limits = Limits(**dict.fromkeys(names, 1))
    assert Account(tenant_id=3, key_id=4, key_limits=limits).rows == ((9, limits),)
