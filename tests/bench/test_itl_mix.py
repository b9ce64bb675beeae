"""The comparison of gaps between tokens under mixed prompts: what is sent, what is counted, what is drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.fake_openai import fake_openai

from splitserve.bench.peers import itl_mix
from splitserve.loadgen.load import generate_load
from splitserve.loadgen.report import Sample
from splitserve.loadgen.settings import LoadSettings

PNG = b"\x89PNG"


async def test_every_sixth_prompt_is_long_and_all_answer_the_same_length() -> None:
    requests = itl_mix.mixed_requests(12, 3)
    assert [len(request.prompt) for request in requests] == [128, 128, 128, 128, 128, 2048] * 2
    assert requests == itl_mix.mixed_requests(12, 3) != itl_mix.mixed_requests(12, 4)
    async with fake_openai() as server:
        settings = LoadSettings(url=server.url, warmup=0, concurrency=2)
        samples, _ = await generate_load(settings, requests=requests)
        assert {len(body["prompt"]) for body in server.requests} == {128, 2048}
    assert len(itl_mix.gaps_of(samples)) == 12 * 63


def test_a_gap_lies_within_one_request() -> None:
    gaps = itl_mix.gaps_of([Sample(0, arrivals=[1.0, 1.5]), Sample(0, arrivals=[1.25, 4.25, 4.5])])
    assert gaps == [(1.5, 0.5), (4.25, 3.0), (4.5, 0.25)]


def test_the_plot_names_the_ratio_and_refuses_different_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(name: str, p99: float, requests: int = 6) -> Path:
        load = {"requests": requests, "short": 128, "long": 2048, "long_every": 6, "open": 8}
        itl = {"p50": 1.0, "p99": p99, "max": p99}
        content = {
            "name": name,
            "load": load,
            "itl_ms": itl,
            "output_tokens_per_s": 1.0,
            "gap_ends_s": [1, 2],
            "gaps_ms": [1.0, p99],
        }
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    ours, theirs, other = result("ours", 10), result("theirs", 45), result("other", 45, requests=7)
    png = tmp_path / "plot.png"
    monkeypatch.setattr(sys, "argv", ["itl_mix", "--plot", str(ours), str(theirs), "--png", str(png)])
    itl_mix.main()
    assert "p99 4.5 times that of ours" in capsys.readouterr().out
    assert png.read_bytes().startswith(PNG)
    monkeypatch.setattr(sys, "argv", ["itl_mix", "--plot", str(ours), str(other), "--png", str(png)])
    with pytest.raises(SystemExit, match="different loads"):
        itl_mix.main()
