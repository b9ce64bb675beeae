"""The examples of docs/api.md, run as they stand there."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_fakes import ANSWER, CITY

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
FORM = "application/x-www-form-urlencoded"  # curl's default for a body
CURL = re.compile(
    r"curl http://127\.0\.0\.1:8000(?P<path>\S+)(?P<headers>.*?) -d '(?P<body>.*?)'$",
    re.DOTALL | re.MULTILINE,
)
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}]},
}


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [block.replace("splitserve-demo", "tiny") for block in found]


def test_python(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They go on from each other."""
    (tmp_path / "requests.jsonl").write_text(json.dumps(LINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(seconds / 100))
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block.replace("http://127.0.0.1:8000/v1", base_url), names)
    names["client"].close()
    printed = capsys.readouterr().out
    assert printed.startswith(ANSWER)
    assert (names["call"].name, names["call"].arguments) == ("weather", CITY)
    assert names["batch"].status == "completed"
    assert (
        json.loads(printed.removeprefix(ANSWER))["response"]["body"]["choices"][0]["message"]["content"]
        == ANSWER
    )


def test_curl(base_url: str) -> None:
    examples = [found for block in blocks("sh") if (found := CURL.search(block))]
    assert len(examples) == PAGE.count("curl http") > 1
    for found in examples:
        kind = "application/json" if "content-type: application/json" in found["headers"] else FORM
        url = base_url.removesuffix("/v1") + found["path"]
        answer = httpx.post(url, content=found["body"], headers={"content-type": kind}, timeout=60)
        assert answer.status_code == 200, answer.text
