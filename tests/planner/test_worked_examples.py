"""The commands of docs/choosing_a_ratio.md run as they stand there, on a short trace of the same form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from splitserve.cli.main import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs/choosing_a_ratio.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
COMMANDS = [
    shlex.split(line)
    for kind, block in BLOCKS
    if not kind
    for line in block.replace("\\\n", " ").splitlines()
    if "h100.json" not in line
]
MODELS, HARDWARE = (block for kind, block in BLOCKS if kind == "yaml")
TRACES = re.findall(r"trace: ([\w.]+)", MODELS)


@pytest.mark.parametrize(
    "words", [*COMMANDS, ["", "plan", "--config", "models.yaml"]], ids=lambda words: " ".join(words[1:6])
)
def test_a_worked_example_runs(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dgx.yaml").write_text(HARDWARE, encoding="utf-8")
    rows = "".join(
        f"2023-11-16 18:{15 + i // 30}:{2 * (i % 30):02}.0000000,{300 + 97 * i % 900},{3 + i % 3}\n"
        for i in range(20)
    )
    Path("models.yaml").write_text(MODELS, encoding="utf-8")
    for trace in [words[words.index("--trace") + 1]] if "--trace" in words else TRACES:
        Path(trace).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    jobs = ["--jobs", "1"] if words[1] == "plan" else []
    result = CliRunner().invoke(cli, [*words[1:], *jobs], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "Recommended: " in result.output or "met by" in result.output
    for option in ("--launch-file", "--plot-file"):
        assert option not in words or Path(words[words.index(option) + 1]).stat().st_size > 0
