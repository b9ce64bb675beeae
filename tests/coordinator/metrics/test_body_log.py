"""The log of requests and answers: whole, private, bounded, and no condition of any request."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.http.call import Call
from splitserve.coordinator.listeners import ListenerFailures
from splitserve.coordinator.metrics.body_log import MAX_BYTES, BodyLog, JoinedStream
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.tenants.limits import ANONYMOUS
from splitserve.transport.process.private_files import OpenToOthers

KEY = "sk-split-" + "a1B2" * 10 + "xyz"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bodies.jsonl"


@pytest.fixture
def log(server: HttpServer, path: Path) -> Iterator[BodyLog]:
    made = BodyLog(path, 1 << 20, server.app.metrics.failures)
    server.app.generation.bodies = made
    return made


def lines(log: BodyLog, path: Path) -> list[dict[str, Any]]:
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


class OneCall:
    """What a log reads of a ``Call``."""

    endpoint, account = "/v1/completions", ANONYMOUS

    def __init__(self, body: bytes, authorization: bytes = b"") -> None:
        self.body, self.headers = body, {b"authorization": authorization}


def call(body: bytes, authorization: bytes = b"") -> Call:
    return OneCall(body, authorization)  # type: ignore[return-value]


async def test_an_answer_is_written_as_it_was(http: httpx.AsyncClient, log: BodyLog, path: Path) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "quick", "max_tokens": 5})
    [line] = lines(log, path)
    assert (line["request_id"], line["status"], line["endpoint"]) == (
        answer.headers["x-request-id"],
        "200",
        "/v1/completions",
    )
    assert line["request"] == {"prompt": "quick", "max_tokens": 5}
    assert line["answer"] == answer.json()
    assert oct(path.stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_is_joined(http: httpx.AsyncClient, log: BodyLog, path: Path, endpoint: str) -> None:
    prompt = (
        {"prompt": "quick"}
        if endpoint == "/v1/completions"
        else {"messages": [{"role": "user", "content": "quick"}]}
    )
    asked = {**prompt, "max_tokens": 5, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    streamed = await http.post(endpoint, json=asked)
    chunks = [json.loads(event[6:]) for event in streamed.text.split("\n\n") if event.startswith("data: {")]
    [line] = lines(log, path)
    for index, joined in enumerate(line["answer"]["choices"]):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        text = "".join(
            part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts
        )
        assert text
        assert joined["text" if endpoint == "/v1/completions" else "content"] == text
        assert joined["finish_reason"] == parts[-1]["finish_reason"] == "length"
    assert line["answer"]["usage"]["completion_tokens"] == 10


def test_tool_calls_are_joined() -> None:
    stream = JoinedStream()
    parts = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": " 1}"}},
    ]
    for part in parts:
        chunk = {"choices": [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None}]}
        stream.add(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    [choice] = stream.as_json()["choices"]
    assert choice["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]


async def test_refusals_and_clients_that_leave_are_written_too(
    http: httpx.AsyncClient, log: BodyLog, path: Path, dispatcher: FakeDispatcher
) -> None:
    await http.post("/v1/completions", content=b'{"prompt": 3', headers={"content-type": "application/json"})
    dispatcher.step_s = 0.01
    async with http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "quick", "stream": True, "max_tokens": 900, "ignore_eos": True},
    ):
        pass  # its head has come, and so has a token
    async with asyncio.timeout(60):
        while not dispatcher.cancelled:
            await dispatcher.changed.wait()
            dispatcher.changed.clear()
    refused, left = lines(log, path)
    assert (refused["status"], refused["request"]) == ("400", '{"prompt": 3')
    assert "error" in refused["answer"]
    assert left["status"] == "cancelled"


def test_no_key_is_written(path: Path) -> None:
    log = BodyLog(path, 1 << 20, ListenerFailures())
    other = "a-key-of-another-gateway"
    body = json.dumps({"prompt": f"my key is {KEY}, or {other}", "api_key": "anything", "user": "u"}).encode()
    log.refused(call(body, b"Bearer " + other.encode()), "cmpl-1", 400, b"{}")
    log.refused(call(b'{"prompt": "me"}', b"Bearer e"), "cmpl-2", 400, b"{}")
    first, second = lines(log, path)
    assert first["request"] == {
        "prompt": "my key is [redacted], or [redacted]",
        "api_key": "[redacted]",
        "user": "u",
    }
    assert second["request"] == {"prompt": "me"}, "a letter is no key"


def test_it_is_bounded_and_rotated(path: Path) -> None:
    log = BodyLog(path, 20_000, ListenerFailures())
    for number in range(200):
        log.refused(call(json.dumps({"prompt": "x" * 300}).encode()), f"cmpl-{number}", 400, b"{}")
    newest = lines(log, path)
    old = path.with_name("bodies.jsonl.1")
    assert path.stat().st_size + old.stat().st_size <= 20_000
    assert newest[-1]["request_id"] == "cmpl-199"
    numbers = [
        int(json.loads(line)["request_id"][5:]) for line in (old.read_text() + path.read_text()).splitlines()
    ]
    assert numbers == list(range(numbers[0], 200)), "none is missing between"
    assert {oct(file.stat().st_mode)[-3:] for file in (path, old)} == {"600"}
    assert BodyLog(path, 20_000, ListenerFailures()).close() is None, "a start appends to it"


def test_a_long_request_is_cut(path: Path) -> None:
    log = BodyLog(path, 8 << 20, ListenerFailures())
    log.refused(call(b"x" * (MAX_BYTES + 100)), "cmpl-1", 413, b"{}")
    [line] = lines(log, path)
    assert line["truncated"]
    assert len(line["request"]) == MAX_BYTES


def test_a_file_that_others_may_read_is_refused(path: Path) -> None:
    path.touch(0o644)
    path.chmod(0o644)
    with pytest.raises(OpenToOthers, match="chmod 600"):
        BodyLog(path, 1 << 20, ListenerFailures())


async def test_a_full_disk_costs_lines_and_no_request(
    http: httpx.AsyncClient, log: BodyLog, path: Path, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("splitserve.coordinator.metrics.body_log.os.write", full)
        assert (await http.post("/v1/completions", json={"prompt": "quick"})).status_code == 200
        async with asyncio.timeout(60):
            while not server.app.metrics.failures.counts["body log"]:
                await asyncio.sleep(0.01)
        assert (await http.get("/health")).json()["checks"]["listeners"]["status"] == "degraded"
    assert (await http.post("/v1/completions", json={"prompt": "quick"})).status_code == 200
    assert len(lines(log, path)) == 1


def test_half_a_line_is_taken_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, write = ListenerFailures(), os.write
    log = BodyLog(path, 1 << 20, failures)
    with monkeypatch.context() as patched:
        patched.setattr(
            "splitserve.coordinator.metrics.body_log.os.write", lambda file, line: write(file, line[:10])
        )
        log.refused(call(b"{}"), "cmpl-1", 400, b"{}")
        log.close()
    assert failures.counts["body log"] == 1
    assert path.read_bytes() == b""
