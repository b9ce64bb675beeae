"""The chat prints what arrives, keeps the conversation, and accounts for the time of every answer."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import ssl
import sys
from pathlib import Path

import pytest
from support.certificates import write_certificate
from support.fake_openai import USAGE, fake_openai

from splitserve.cli import start
from splitserve.cli.config import ConfigError, Value, build
from splitserve.cli.settings import ChatSettings
from splitserve.cli.terminal.chat import account, answer_once, converse
from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.bodies.completion import CompletionRequest
from splitserve.coordinator.validation import validated
from splitserve.loadgen.settings import LoadSettings
from splitserve.transport.process.private_files import write_private


async def test_one_answer_is_streamed_and_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_openai() as server:
        assert await answer_once(ChatSettings(url=server.url), "count") == 0
        printed = capsys.readouterr().out
        assert "> count\n\none two three four\n" in printed
        assert "8 of 12 prompt tokens cached" in printed.replace("\n", " ")
        assert server.requests[0]["model"] == "fake"
        assert server.requests[0]["stream_options"] == {"include_usage": True}


async def test_the_key_of_a_file_is_shown(tmp_path: Path) -> None:
    write_private(tmp_path / "key", "sk-split-abc\n")
    async with fake_openai() as server:
        assert await answer_once(ChatSettings(url=server.url, api_key_file=tmp_path / "key"), "count") == 0
        await asyncio.to_thread(
            start.bench, LoadSettings(url=server.url, api_key_file=tmp_path / "key", requests=1, warmup=0)
        )
        assert set(server.keys) == {"Bearer sk-split-abc"}
        assert len(server.keys) >= 2


def test_the_account_names_every_stage() -> None:
    line = account(USAGE, "length")
    assert line.startswith(
        "queue 1.0 ms · prefill 20 ms · KV handoff 3.0 ms · decode 1.50 s · 2 tokens/s · 8 of 12 "
        "prompt tokens cached"
    )
    assert line.endswith("cut at the length limit")


async def test_a_conversation_remembers_until_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fake_openai() as server:
        monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n/reset\nthird\n/quit\nnever\n"))
        assert await converse(ChatSettings(url=server.url, system="be brief")) == 0
        assert [[message["content"] for message in request["messages"]] for request in server.requests] == [
            ["be brief", "first"],
            ["be brief", "first", "one two three four", "second"],
            ["be brief", "third"],
        ]
        assert "anew" in capsys.readouterr().out


async def test_input_without_a_question_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    assert await converse(ChatSettings()) == 1
    assert "standard input held no question" in capsys.readouterr().err


async def test_bytes_that_are_not_utf_8_are_replaced_and_no_input_is_none() -> None:
    async with fake_openai() as server:
        for shell, question in (("printf 'a\\377b\\n' | \"$@\"", "a\ufffdb"), ('"$@" <&-', None)):
            command = (sys.executable, "-m", "splitserve.cli", "chat", "--url", server.url)
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", shell, "bash", *command), stderr=asyncio.subprocess.PIPE
            )
            _, error = await asyncio.wait_for(process.communicate(), 100)
            if question is None:
                assert b"splitserve: standard input held no question" in error
            else:
                assert process.returncode == 0, error
                assert server.requests.pop()["messages"][-1]["content"] == question


async def test_interrupt_stops_the_answer_and_cancels_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_openai() as server:
        server.gap_s = 30
        answer = asyncio.create_task(answer_once(ChatSettings(url=server.url), "count"))
        async with asyncio.timeout(60):
            printed = ""
            while "one" not in printed:
                await asyncio.sleep(0.01)
                printed += capsys.readouterr().out
            os.kill(os.getpid(), signal.SIGINT)
            assert await answer == 0
            await server.cancelled.wait()
        assert "[stopped]" in capsys.readouterr().out


async def test_the_servers_refusal_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_openai() as server:
        server.failing = True
        assert await answer_once(ChatSettings(url=server.url), "count") == 1
        assert capsys.readouterr().err == "splitserve: the server answered 429: too many requests\n"


async def test_the_base_url_of_other_clients_will_do() -> None:
    async with fake_openai() as server:
        for url in (server.url + "/v1", server.url + "/v1/"):
            assert await answer_once(ChatSettings(url=url), "count") == 0
            assert await asyncio.to_thread(start.bench, LoadSettings(url=url, requests=1, warmup=0)) == 0


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--url: .*:99999' cannot be used: port out of range 0-65535"):
        build(ChatSettings, [{"url": Value("http://127.0.0.1:99999", "--url")}])


def test_what_the_server_refuses_is_refused_here() -> None:
    over = {"prompt": "a", "temperature": 3}
    with pytest.raises(InvalidRequest, match="must be at most 2"):
        validated(CompletionRequest, json.dumps(over).encode())
    with pytest.raises(ConfigError, match="less than or equal to 2"):
        build(ChatSettings, [{"temperature": Value("3", "--temperature")}])


async def test_https_and_http_taken_for_each_other_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with fake_openai() as plain:
        assert await answer_once(ChatSettings(url=plain.url.replace("http:", "https:")), "count") == 1
    assert "does its --url begin with http://?" in capsys.readouterr().err
    certificate, key = write_certificate(tmp_path, "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        assert await answer_once(ChatSettings(url=f"http://127.0.0.1:{port}"), "count") == 1
        assert "does its --url begin with https://?" in capsys.readouterr().err
        assert await answer_once(ChatSettings(url=f"https://127.0.0.1:{port}"), "count") == 1
        assert "--tls-ca FILE names its certificate" in capsys.readouterr().err


async def test_no_server_is_one_sentence_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert await answer_once(ChatSettings(url="http://127.0.0.1:9"), "count") == 1
    assert "start a server with `splitserve up`" in capsys.readouterr().err
