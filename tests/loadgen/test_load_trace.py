"""The load generator replays a trace: its times, its lengths, and its shared prefixes as shared tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.fake_openai import fake_openai
from support.traces import MOONCAKE, written

from splitserve.loadgen.load import LoadError, generate_load, main
from splitserve.loadgen.settings import LoadSettings
from splitserve.loadgen.workload import planned_requests

ROWS = [
    {"format": "splitserve-trace", "version": 1, "block_size": 4},
    {"arrival_s": 5.0, "num_prompt_tokens": 10, "num_output_tokens": 3, "block_hashes": ["a", "b"]},
    {"arrival_s": 5.2, "num_prompt_tokens": 7, "num_output_tokens": 2, "block_hashes": ["a", "c"]},
    {"arrival_s": 5.3, "num_prompt_tokens": 6, "num_output_tokens": 1},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "t.jsonl", ROWS)


def test_equal_hashes_are_equal_tokens_and_nothing_else_is(trace: Path) -> None:
    first, second, third = (
        request.prompt for request in planned_requests(LoadSettings(trace=trace, vocab_size=1 << 20))
    )
    assert [len(prompt) for prompt in (first, second, third)] == [10, 7, 6]
    assert first[:4] == second[:4]
    assert not {*first[4:]} & {*second[4:]}
    assert not {*third} & {*first, *second}


def test_times_start_at_the_first_request(trace: Path) -> None:
    requests = planned_requests(LoadSettings(trace=trace))
    assert [request.at_s for request in requests] == pytest.approx([0.0, 0.2, 0.3])
    assert [request.num_output_tokens for request in requests] == [3, 2, 1]
    assert requests == planned_requests(LoadSettings(trace=trace))
    assert requests != planned_requests(LoadSettings(trace=trace, seed=1))


def test_what_is_too_long_or_too_many_is_cut(tmp_path: Path, trace: Path) -> None:
    assert len(planned_requests(LoadSettings(trace=trace, requests=2))) == 2
    short = planned_requests(LoadSettings(trace=trace, max_len=8))
    assert [(len(request.prompt), request.num_output_tokens) for request in short] == [(7, 1), (7, 1), (6, 1)]
    mooncake = planned_requests(LoadSettings(trace=written(tmp_path / "m.jsonl", MOONCAKE)))
    assert [len(request.prompt) for request in mooncake] == [1100, 1030, 20]
    assert mooncake[0].prompt[:1024] == mooncake[1].prompt[:1024]


def test_what_the_trace_says_cannot_be_said_again(trace: Path) -> None:
    with pytest.raises(ValidationError, match="--rate cannot be given with --trace"):
        LoadSettings(trace=trace, rate=3)


async def test_a_server_gets_the_trace_at_its_times(trace: Path) -> None:
    async with fake_openai() as server:
        samples, _ = await generate_load(LoadSettings(url=server.url, trace=trace, warmup=0))
        assert sorted((len(request["prompt"]), request["max_tokens"]) for request in server.requests) == [
            (6, 1),
            (7, 2),
            (10, 3),
        ]
    assert all(sample.start >= at for sample, at in zip(samples, (0.0, 0.2, 0.3), strict=True))
    assert not any(sample.error for sample in samples)


async def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    empty = LoadSettings(trace=written(tmp_path / "e.jsonl", ROWS[:1]), url="http://127.0.0.1:9")
    with pytest.raises(LoadError, match="has no requests"):
        await generate_load(empty)


def test_an_empty_trace_fails_the_command(tmp_path: Path) -> None:
    assert main(LoadSettings(trace=written(tmp_path / "e.jsonl", ROWS[:1]), url="http://127.0.0.1:9")) == 1
