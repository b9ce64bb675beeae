"""The command ``splitserve simulate`` and its reports."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from support.simulated import cluster, profile, run

from splitserve.planner.errors import SimulationError
from splitserve.planner.search.goodput import Load
from splitserve.planner.settings import SimulateSettings
from splitserve.planner.simulate_command import simulate
from splitserve.planner.simulator.cluster import Failure, read_cluster
from splitserve.planner.simulator.records import COLUMNS
from splitserve.planner.simulator.report import print_report, summary
from splitserve.planner.simulator.slo import parse_slo
from splitserve.planner.simulator.timeline import rows_by_pool
from splitserve.traces.request import TraceRequest


def test_a_cluster_is_read_from_yaml(tmp_path: Path) -> None:
    profile().write(tmp_path / "p.json")
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "pools:\n- {role: prefill, count: 2, profile: p.json}\n- {role: decode, count: 3, profile: "
        "p.json, max_num_seqs: 8}\n"
    )
    assert [(p.role, p.count) for p in read_cluster(path).pools] == [("prefill", 2), ("decode", 3)]
    path.write_text("pools:\n- {role: prefill, count: 2, profile: p.json}\n")
    with pytest.raises(SimulationError, match="needs prefill and decode workers"):
        read_cluster(path)
    path.write_text("pools:\n- {role: prefill, count: 2}\n")
    with pytest.raises(SimulationError, match="it needs a list `pools` with role, count and profile each"):
        read_cluster(path)
    with pytest.raises(SimulationError, match=r"cannot read the cluster .*none\.yaml: No such file"):
        read_cluster(tmp_path / "none.yaml")


def test_the_command_writes_what_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile().write(tmp_path / "p.json")
    names = {
        name: tmp_path / file
        for name, file in (
            ("records", "r.csv"),
            ("json_file", "j.json"),
            ("plot_file", "p.png"),
            ("html_file", "h.html"),
        )
    }
    settings = SimulateSettings(
        trace=write_trace(tmp_path / "t.jsonl"),
        profile=tmp_path / "p.json",
        prefill=1,
        decode=1,
        slo="ttft=0.2,tpot=0.05",
        **names,
    )
    assert simulate(settings) == 0
    records = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert len(records) == 30
    assert tuple(records[0]) == COLUMNS
    message = json.loads((tmp_path / "j.json").read_text())
    assert message["requests"] == {"finished": 30}
    assert message["attainment"] == 1.0
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert "prefill-0-0" in (tmp_path / "h.html").read_text()
    assert "good requests/s" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["records", "json_file", "plot_file", "html_file"])
def test_a_result_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path, name: str) -> None:
    profile().write(tmp_path / "p.json")
    settings = SimulateSettings(
        trace=write_trace(tmp_path / "t.jsonl"),
        profile=tmp_path / "p.json",
        prefill=1,
        decode=1,
        **{name: tmp_path / "none/file"},
    )
    with pytest.raises(SimulationError, match="none/file: cannot be written: No such file or directory"):
        simulate(settings)


@pytest.mark.parametrize("duration_s", [None, 10.0])
def test_a_trace_without_requests_ends_in_a_sentence(tmp_path: Path, duration_s: float | None) -> None:
    profile().write(tmp_path / "p.json")
    (tmp_path / "t.jsonl").write_text('{"format": "splitserve-trace", "version": 1}\n')
    settings = SimulateSettings(
        trace=tmp_path / "t.jsonl", profile=tmp_path / "p.json", colocated=1, duration_s=duration_s
    )
    with pytest.raises(SimulationError, match=r"t\.jsonl has no requests"):
        simulate(settings)


def write_trace(path: Path) -> Path:
    rows = "".join(
        f'{{"arrival_s": {0.1 * i}, "num_prompt_tokens": 60, "num_output_tokens": 5}}\n' for i in range(30)
    )
    path.write_text('{"format": "splitserve-trace", "version": 1}\n' + rows)
    return path


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"prefill": 2}, "--prefill cannot .* `role: prefill` and `count`"),
        ({"max_num_seqs": 64}, "--max-num-seqs cannot .* `max_num_seqs` of a pool"),
    ],
)
def test_what_a_clusters_file_says_is_not_said_by_an_option_too(given: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError, match=place):
        SimulateSettings(trace=Path("t.jsonl"), cluster=Path("c.yaml"), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slo": "ttft=0.2@p90"}, "That is enough: 90 of a hundred were asked for."),
        ({"slo": "ttft=0.001@p95"}, "That is too few: 95 of a hundred were asked for."),
    ],
)
def test_the_command_says_what_came_of_each_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], message: str
) -> None:
    profile().write(tmp_path / "p.json")
    usual = {
        "trace": write_trace(tmp_path / "t.jsonl"),
        "profile": tmp_path / "p.json",
        "prefill": 1,
        "decode": 1,
    }
    assert simulate(SimulateSettings(**{**usual, **given})) == 0
    assert message in " ".join(capsys.readouterr().out.split())


def test_the_command_warns_where_sharing_a_host_costs_nothing_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile().write(tmp_path / "p.json")
    pools = "".join(f"- {{role: {role}, count: 1, profile: p.json}}\n" for role in ("prefill", "decode"))
    (tmp_path / "c.yaml").write_text(f"workers_per_host: 2\npools:\n{pools}")
    settings = SimulateSettings(trace=write_trace(tmp_path / "t.jsonl"), cluster=tmp_path / "c.yaml")
    assert simulate(settings) == 0
    message = "2 workers to a host change nothing for toy, whose profile has no `contention`"
    assert message in " ".join(capsys.readouterr().out.split())


def test_the_timeline_is_drawn_by_pool_and_two_pools_of_a_role_are_two() -> None:
    names = [
        "prefill-0-0",
        "decode-1-0",
        "decode-1-1",
        "decode-10-0:decode",
        "colocated-3-0:decode",
        "colocated-3-0:prefill",
    ]
    assert rows_by_pool(names) == {"prefill": [0], "decode-1": [1, 2], "decode-10": [3], "colocated": [4, 5]}


def test_the_timeline_stays_bounded() -> None:
    simulation, _ = run(cluster(), [TraceRequest(0.1 * i, 20, 2) for i in range(100)], sample_s=0.01)
    assert len(simulation.timeline.samples) <= 600
    assert simulation.timeline.interval_s > 0.01


def test_goodput_is_over_the_time_in_which_requests_arrive() -> None:
    """What the last answer takes after the last arrival is no part of it: the rate is that of a plan."""
    requests = [TraceRequest(0.5 * i, 100, 40) for i in range(9)]
    simulation, _ = run(cluster(), requests, slo=parse_slo("ttft=1").bounds)
    message = summary(simulation)
    assert message["simulated_s"] > message["arrivals_s"] == pytest.approx(4.0)
    assert (
        message["offered_per_s"]
        == message["goodput_per_s"]
        == pytest.approx(9 / 4)
        == pytest.approx(Load(tuple(requests), None).rate)
    )
    assert summary(run(cluster(), requests[:1])[0])["goodput_per_s"] is None


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_a_terminal(width: int) -> None:
    named = profile(name="llama2-70b h100-80gb tp8")
    simulation, _ = run(
        cluster(4, 12, named),
        [TraceRequest(0.1 * i, 400, 40) for i in range(30)],
        slo=parse_slo("ttft=1").bounds,
    )
    written = StringIO()
    print_report(simulation, Console(file=written, width=width))
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    (ttft,) = (line.split() for line in lines if line.split()[:1] == ["ttft"] and "<=" not in line)
    assert len(ttft) == 6, "one row a quantity, nothing wrapped"
    assert any(line.split()[:2] == ["decode", "12"] for line in lines)
    assert max(map(len, lines)) <= width


def test_the_report_tells_of_deaths() -> None:
    dying = cluster(2, 2, failures=(Failure(worker="decode-1-0", at_s=0.5),))
    simulation, _ = run(dying, [TraceRequest(0.05 * i, 100, 60) for i in range(20)])
    written = StringIO()
    print_report(simulation, Console(file=written, width=120))
    again = summary(simulation)["redispatched"]
    assert again > 0
    assert f"1 times a worker died and started again; {again} dispatches were made anew" in written.getvalue()
