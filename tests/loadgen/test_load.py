"""The load generator sends what was asked for and reports what its clients saw."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.fake_openai import fake_openai

from splitserve.loadgen.load import LoadError, generate_load, main
from splitserve.loadgen.report import Sample, draw_plot, print_report, summarize, times_of, write_json
from splitserve.loadgen.settings import LoadSettings
from splitserve.loadgen.workload import draw_lengths, draw_requests


@pytest.mark.parametrize(
    ("spec", "mean", "low", "high"),
    [
        ("7", 7, 7, 7),
        ("uniform:10,30", 20, 10, 30),
        ("normal:100,10", 100, 50, 150),
        ("lognormal:100,0.5", 113, 5, 2000),
    ],
)
def test_lengths_follow_their_distribution(spec: str, mean: float, low: int, high: int) -> None:
    lengths = draw_lengths(spec, 4000, np.random.default_rng(1))
    assert lengths.min() >= low
    assert lengths.max() <= high
    assert abs(lengths.mean() - mean) < 0.05 * mean


def test_requests_repeat_with_the_seed_share_prefixes_and_fit() -> None:
    settings = LoadSettings(
        prompt_len="lognormal:60,1",
        output_len="50",
        max_len=200,
        shared_prefix_len=40,
        num_prefixes=2,
        rate=10,
    )
    requests = draw_requests(settings, 200, 3)
    assert requests == draw_requests(settings, 200, 3)
    assert requests != draw_requests(settings, 200, 4)
    assert len({tuple(request.prompt[:40]) for request in requests}) == 2
    assert all(
        40 < len(request.prompt) <= 199 and len(request.prompt) + request.num_output_tokens <= 200
        for request in requests
    )
    gaps = np.diff([request.at_s for request in requests])
    assert requests[0].at_s == 0
    assert abs(gaps.mean() - 0.1) < 0.02


def test_text_prompts_have_about_a_word_a_token() -> None:
    (request,) = draw_requests(LoadSettings(prompts="text", prompt_len="30"), 1, 0)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 30


def test_latencies_are_those_of_the_definitions() -> None:
    sample = Sample(start=1.0, end=1.9, arrivals=[1.5, 1.6, 1.9], num_output_tokens=5)
    times = times_of(sample)
    assert (times.ttft, times.tpot, times.e2e) == pytest.approx((0.5, 0.1, 0.9))
    assert times.itl == pytest.approx([0.1, 0.3])


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    fast = Sample(0, 1.0, [0.1, 0.2], num_output_tokens=2)
    slow_start = Sample(0, 1.0, [0.9, 1.0], num_output_tokens=2)
    slow_tokens = Sample(0, 1.0, [0.1, 0.9], num_output_tokens=2)
    failed = Sample(0, 1.0, error="status 500")
    report = summarize([fast, slow_start, slow_tokens, failed], 2.0, "ttft=0.5,tpot=0.2")
    assert (report.num_good, report.goodput_requests_per_s, report.num_failed) == (1, 0.5, 1)
    assert report.errors == {"status 500": 1}


async def test_a_run_against_a_server(tmp_path: Path) -> None:
    async with fake_openai() as server:
        settings = LoadSettings(
            url=server.url,
            requests=20,
            warmup=1,
            concurrency=4,
            prompt_len="16",
            output_len="uniform:2,6",
            slo="ttft=60,tpot=60",
        )
        samples, duration_s = await generate_load(settings)
        assert len(server.requests) == 21
        assert {
            (request["stream"], request["ignore_eos"], len(request["prompt"])) for request in server.requests
        } == {(True, True, 16)}
    report = summarize(samples, duration_s, settings.slo)
    assert (report.num_failed, report.num_good) == (0, 20)
    assert report.num_output_tokens == sum(request["max_tokens"] for request in server.requests[1:])
    assert report.num_cached_tokens == 20 * 8
    table = io.StringIO()
    print_report(report, settings, Console(file=table, width=120))
    assert all(
        text in table.getvalue()
        for text in ("TTFT", "TPOT", "ITL", "E2E", "p99", "goodput under ttft=60,tpot=60")
    )
    write_json(tmp_path / "load.json", report, settings, samples)
    assert json.loads((tmp_path / "load.json").read_text())["report"]["num_requests"] == 20
    draw_plot(tmp_path / "load.png", report, samples)
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


async def test_concurrency_is_a_limit_and_rate_spreads_arrivals() -> None:
    async with fake_openai() as server:
        server.gap_s = 0.02
        samples, _ = await generate_load(
            LoadSettings(url=server.url, requests=12, warmup=0, concurrency=3, output_len="3")
        )
        events = sorted([(sample.start, 1) for sample in samples] + [(sample.end, -1) for sample in samples])
        assert max(np.cumsum([step for _, step in events])) == 3
        samples, _ = await generate_load(
            LoadSettings(url=server.url, requests=10, warmup=0, rate=100, output_len="1")
        )
        assert max(sample.start for sample in samples) > 0.02


async def test_failures_are_reported_not_hidden() -> None:
    async with fake_openai() as server:
        server.failing = True
        with pytest.raises(LoadError, match=r"failed: the server answered 429: too many requests$"):
            await generate_load(LoadSettings(url=server.url, requests=3))
        samples, duration_s = await generate_load(LoadSettings(url=server.url, requests=3, warmup=0))
        assert summarize(samples, duration_s).num_failed == 3
    with pytest.raises(
        LoadError, match=r"does not list its models \(cannot connect to 127\.0\.0\.1:\d+: .*\); is it running"
    ):
        await generate_load(LoadSettings(url=server.url, requests=1))


@pytest.mark.timeout(120)
async def test_ctrl_c_prints_what_was_measured_so_far(tmp_path: Path) -> None:
    """Ten requests at once, then one that its server does not answer."""
    options = ("--requests", "11", "--warmup", "0", "--concurrency", "1", "--prompt-len", "4")
    async with fake_openai() as server:
        server.most = 10
        command = (sys.executable, "-m", "splitserve.cli.main", "bench", "--url", server.url, *options)
        written = ("--json-file", str(tmp_path / "b.json"))
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*command, *written, **pipes)
        while len(server.requests) < 11:
            await asyncio.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert err.decode() == "splitserve: cut short: 10 of 11 requests had ended\n"
    assert out.startswith(b"10 requests, 1 at a time; milliseconds")
    assert b"640 output and 120 prompt tokens" in out
    assert process.returncode == 130
    assert len(json.loads((tmp_path / "b.json").read_bytes())["requests"]) == 10


@pytest.mark.parametrize(
    ("option", "name", "why"),
    [
        ("json_file", "none/file", "No such file or directory"),
        ("plot_file", "none/file", "No such file or directory"),
        ("json_file", "/dev/full", "No space left on device"),
    ],
)
async def test_a_record_that_cannot_be_written_is_a_sentence_after_the_report(
    option: str, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    async with fake_openai() as server:
        settings = LoadSettings(url=server.url, requests=1, warmup=0).model_copy(update={option: path})
        assert await asyncio.to_thread(main, settings) == 1
    message = capsys.readouterr()
    assert message.out.startswith("1 requests")
    assert message.err == f"splitserve: {path}: cannot be written: {why}\n"


def test_no_server_is_one_sentence_among_the_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(LoadSettings(url="http://127.0.0.1:9", requests=1)) == 1
    message = capsys.readouterr()
    assert message.err.startswith("splitserve: http://127.0.0.1:9 does not list its models")
    assert message.out == ""
