"""Scaling, thinning, cutting and mixing change a trace by their names, and in nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import trace_of

from splitserve.traces.errors import TraceError
from splitserve.traces.operators import cut, mean_rate, mixed, scaled, thinned
from splitserve.traces.request import Trace, TraceRequest
from splitserve.traces.statistics import describe

REQUESTS = st.lists(
    st.builds(
        TraceRequest,
        st.floats(0, 1000),
        st.just(64),
        st.just(2),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
        st.sampled_from("abc"),
    ),
    max_size=30,
).map(lambda requests: sorted(requests, key=lambda request: request.arrival_s))


@given(REQUESTS, st.floats(0.01, 100))
def test_scaling_divides_times_only(requests: list[TraceRequest], factor: float) -> None:
    assert list(scaled(trace_of(requests), factor)) == [
        replace(one, arrival_s=one.arrival_s / factor) for one in requests
    ]


@given(REQUESTS, st.floats(0, 500), st.floats(500, 1000), st.none() | st.integers(1, 5))
def test_a_cut_is_a_window_that_starts_at_0(
    requests: list[TraceRequest], start_s: float, end_s: float, most: int | None
) -> None:
    expected = [
        replace(one, arrival_s=one.arrival_s - start_s)
        for one in requests
        if start_s <= one.arrival_s < end_s
    ]
    assert list(cut(trace_of(requests), start_s, end_s, most)) == expected[:most]
    assert cut(trace_of(requests, origin_s=1e9), start_s).origin_s == 1e9 + start_s


def test_a_cut_reads_no_further_than_it_needs() -> None:
    read: list[int] = []

    def requests() -> Iterator[TraceRequest]:
        for at in count():
            read.append(at)
            yield TraceRequest(float(at), 1, 1)

    endless = Trace("endless", requests)
    assert len(list(cut(endless, max_requests=3))) == 3
    assert len(list(cut(endless, end_s=5))) == 5
    assert read == [*range(4), *range(6)]


def test_thinning_keeps_its_share_and_whole_sessions() -> None:
    requests = [
        TraceRequest(float(index), 1, 1, (), f"s{index % 2000}" if index < 10_000 else "")
        for index in range(20_000)
    ]
    kept = list(thinned(trace_of(requests), 0.3, seed=1))
    sessions = {request.session for request in kept if request.session}
    assert len(sessions) / 2000 == pytest.approx(0.3, abs=0.04)
    assert sum(not request.session for request in kept) / 10_000 == pytest.approx(0.3, abs=0.02)
    assert sum(bool(request.session) for request in kept) == 5 * len(sessions)
    assert kept == list(thinned(trace_of(requests), 0.3, seed=1))
    assert kept != list(thinned(trace_of(requests), 0.3, seed=2))
    assert list(thinned(trace_of(requests), 1.0)) == requests


@given(st.lists(REQUESTS, min_size=2, max_size=3))
def test_a_mix_has_all_requests_in_order_and_shares_nothing_between_traces(
    parts: list[list[TraceRequest]],
) -> None:
    requests = list(mixed([trace_of(part, 16) for part in parts]))
    assert [one.arrival_s for one in requests] == sorted(one.arrival_s for part in parts for one in part)
    for attribute in ("block_hashes", "session"):
        distinct = sum(len({name for one in part for name in getattr(one, attribute)}) for part in parts)
        if attribute == "session":
            assert len({one.session for one in requests}) == sum(
                len({one.session for one in part}) for part in parts
            )
        else:
            assert len({name for one in requests for name in one.block_hashes}) == distinct


def test_a_mix_keeps_the_reuse_of_each_part() -> None:
    part = [TraceRequest(0.0, 48, 1, (1, 2, 3)), TraceRequest(1.0, 48, 1, (1, 2, 4))]
    found = describe(mixed([trace_of(part, 16), trace_of(part, 16), trace_of([TraceRequest(0.5, 8, 1)])]))
    assert found is not None
    assert found[0].blocks is not None
    assert (found[0].blocks.block_size, found[0].blocks.num_distinct_blocks, found[0].blocks.reuse) == (
        16,
        8,
        4 / 12,
    )


def test_blocks_of_two_sizes_do_not_mix() -> None:
    with pytest.raises(TraceError, match="test 16, test 512"):
        mixed([trace_of([], 16), trace_of([], 512)])


def test_mean_rate() -> None:
    assert mean_rate(trace_of(TraceRequest(5 + at / 4, 1, 1) for at in range(9))) == 4.5
    with pytest.raises(TraceError, match="1 requests at one time have no rate; leave out --rate"):
        mean_rate(trace_of([TraceRequest(5.0, 1, 1)]))


def test_operators_of_an_endless_trace_are_streams() -> None:
    endless = Trace("endless", lambda: (TraceRequest(float(at), 1, 1) for at in count()))
    combined = scaled(mixed([endless, thinned(endless, 0.5)]), 2.0)
    assert len(list(islice(combined, 100))) == 100
    assert math.isclose(next(iter(combined)).arrival_s, 0.0)
