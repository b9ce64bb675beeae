"""``splitserve trace ...`` from end to end: what it writes can be read, what is wrong is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.traces import AZURE, MOONCAKE, written

from splitserve.cli.config import ConfigError
from splitserve.cli.main import cli
from splitserve.traces.errors import TraceError
from splitserve.traces.readers import open_trace


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    return written(tmp_path / "azure.csv", AZURE)


@pytest.mark.parametrize("command", ["stats", "convert", "make", "fit"])
def test_every_command_has_help(command: str) -> None:
    result = trace(command, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli trace {command}")


def test_stats_writes_json_and_a_picture(tmp_path: Path, azure: Path) -> None:
    mooncake = written(tmp_path / "m.jsonl.gz", MOONCAKE)
    result = trace("stats", azure, mooncake, "--json-file", tmp_path / "s.json")
    assert result.exit_code == 0
    assert "azure.csv" in result.output
    first, second = json.loads((tmp_path / "s.json").read_text())
    assert (first["num_requests"], first["peak"]["60"], second["blocks"]["reuse"]) == (3, 2, 2 / 7)
    assert trace("stats", azure, "--plot-file", tmp_path / "s.png").exit_code == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_convert_cuts_mixes_and_scales(tmp_path: Path, azure: Path) -> None:
    mooncake, out = written(tmp_path / "m.jsonl.gz", MOONCAKE), tmp_path / "out.jsonl.gz"
    assert trace("convert", azure, mooncake, "--end-s", 10, "--rate", 100, "--output", out).exit_code == 0
    requests = list(open_trace(out))
    assert [one.num_prompt_tokens for one in requests] == [4808, 1100, 1030, 3180, 20]
    assert requests[-1].arrival_s == pytest.approx(5 / 100)
    assert [len(one.block_hashes) for one in requests] == [0, 3, 3, 0, 1]
    assert open_trace(out).block_size == 512


def test_make_then_fit_then_make_again(tmp_path: Path) -> None:
    first, second, workload = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "w.json"
    made = trace(
        "make",
        "--requests",
        500,
        "--rate",
        4,
        "--turns",
        3,
        "--system-prompts",
        2,
        "--diurnal-amplitude",
        0.5,
        "--output",
        first,
    )
    assert "wrote 500 requests" in made.output
    fitted = trace("fit", first, "--output", workload)
    assert "drawn from the fit" in fitted.output
    assert "Prefix reuse is not fitted" in fitted.output
    assert (
        trace("make", "--workload", workload, "--duration-s", 1000, "--output", second, "--rate", 5).exit_code
        == 0
    )
    assert 4000 < len(list(open_trace(second))) < 6000


def test_a_workload_written_by_hand_as_the_page_shows(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text()
    (tmp_path / "w.json").write_text(page.split("A workload file")[1].split("```")[1].removeprefix("json"))
    arguments = ("--workload", tmp_path / "w.json", "--requests", 50, "--output", tmp_path / "a.jsonl")
    made = trace("make", *arguments)
    assert made.exit_code == 0
    assert len(list(open_trace(tmp_path / "a.jsonl"))) == 50


def test_the_same_command_makes_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl.gz", "b.jsonl.gz")]
    for file in files:
        trace("make", "--requests", 200, "--burstiness", 3, "--seed", 5, "--output", file)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "--output", "x"], "--requests or --duration-s is needed"),
        (
            ["make", "--output", "x", "--requests", 1, "--workload", "w", "--turns", 2],
            "--turns cannot be given with --workload",
        ),
        (
            ["make", "--output", "x", "--requests", 1, "--prompt-len", "many"],
            "--prompt-len: 'many' cannot be used",
        ),
        (["make", "--requests", 1], "--output is needed"),
        (["convert", "FILE", "--output", "x", "--rate", 1, "--scale", 2], "give one of them"),
        (["convert", "FILE", "--output", "x", "--start-s", 5, "--end-s", 5], "--end-s must be after"),
        (["fit", "FILE", "FILE", "--output", "x"], "fitted to one trace, not to 2"),
        (["stats", "none.csv"], "none.csv: cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told(azure: Path, arguments: list[object], message: str) -> None:
    with pytest.raises((ConfigError, TraceError), match=message):
        trace(*(azure if one == "FILE" else one for one in arguments))


def test_a_bad_row_is_one_line_and_status_1(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.csv", AZURE + "2023-11-16 18:19:00,x,2\n")
    command = [sys.executable, "-m", "splitserve.cli.main", "trace", "stats", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (result.returncode, result.stderr) == (
        1,
        f"splitserve: {path}, line 5, ContextTokens: should be a number, not 'x'\n",
    )


def test_the_trace_tools_need_no_torch() -> None:
    code = "import sys, splitserve.traces.commands, splitserve.traces.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0
