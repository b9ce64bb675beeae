"""The chat as it is typed in a terminal, against a real server."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from support.fake_openai import fake_openai
from support.http_fakes import FakeDispatcher, write_tiny_model
from support.terminal import Terminal, terminal

from splitserve.cli.terminal.chat_screen import AnswerScreen, end_of_block
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

PROSE = "The **quick** brown fox jumps over the lazy dog, again and again, while naïve cats watch it."
CODE = "```python\ndef join(path):\n\n    return path\n```"
ANSWER = f"# Foxes\n\n{PROSE}\n\n{CODE}\n\n1. one\n2. two\x1b]0;taken\x07\n"
WIDTH = 40


@asynccontextmanager
async def chat(
    folder: Path, answer: str, step_s: float = 0.0
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process, FakeDispatcher, ServedModel]]:
    """The chat in a terminal, and the server that it talks to, which always answers the same."""
    write_tiny_model(folder)
    model = ServedModel.load(folder, "tiny")
    ids = model.tokenizer.fast.encode(answer, add_special_tokens=False).ids
    dispatcher = FakeDispatcher(lambda request: ids, step_s=step_s)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=dispatcher.system)))
    await server.start()
    command = (sys.executable, "-m", "splitserve.cli", "chat", "--url", f"http://127.0.0.1:{server.port}")
    try:
        async with terminal(*command, columns=WIDTH, folder=folder) as (screen, process):
            yield screen, process, dispatcher, model
    finally:
        await server.stop(grace_s=0)


async def test_a_session(tmp_path: Path) -> None:
    async with chat(tmp_path, ANSWER) as (screen, process, dispatcher, model):
        await screen.until("/help shows the")
        await screen.at_prompt("first line\x1b\r")  # Alt-Enter: a new line
        screen.type("second\\\r")  # a backslash and Enter: another one
        screen.type("third\r")
        shown = await screen.until("prompt tokens")
        answer = shown[shown.rindex("third") :]  # before it the editor draws lines again, at the same place
        lines = [line.rstrip() for line in answer.split("\n")[1:]]
        assert max(map(cell_len, lines)) <= WIDTH
        assert "The quick brown fox jumps over the lazy" in lines  # no mark of Markdown, no word cut
        assert "dog, again and again, while naïve cats" in lines
        assert any("    return path" in line for line in lines)
        assert any(line.strip() == "2 two]0;taken" for line in lines)  # no escape sequence passes
        (request,) = dispatcher.requests
        prompt = model.tokenizer.fast.decode(request.prompt_token_ids)
        assert "first line\nsecond\nthird" in prompt

        await screen.at_prompt("/system Be brief.\r")
        await screen.until("system message: Be brief.")
        await screen.at_prompt("/model other\r")
        await screen.until("there is no model 'other'")
        await screen.at_prompt("/model\r")
        await screen.until("* tiny")
        await screen.at_prompt("/tokens\r")
        await screen.until("of 2048 tokens")
        await screen.at_prompt("/sa\t")
        await screen.until("/save")  # completed
        screen.type(" talk.json\r")
        await screen.until("wrote 3 messages to")
        saved = json.loads((tmp_path / "talk.json").read_text())
        assert [message["role"] for message in saved] == ["system", "user", "assistant"]
        await screen.at_prompt("/save talk.json\r")
        await screen.until("exists already")
        await screen.at_prompt("/nonsense\r")
        await screen.until("There is no command /nonsense.")
        await screen.at_prompt("/quit\r")
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_no_prompt_opens_where_no_server_answers(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "splitserve.cli", "chat", "--served-model-name", "a", "--url")
    async with terminal(*command, "http://127.0.0.1:9", columns=WIDTH, folder=tmp_path) as (screen, process):
        await screen.until("start a server with `splitserve up`")
        assert await asyncio.wait_for(process.wait(), 60) == 1


async def test_a_named_model_needs_no_list(tmp_path: Path) -> None:
    async with fake_openai(lists=False) as server:
        command = (sys.executable, "-m", "splitserve.cli", "chat", "--url", server.url)
        async with terminal(*command, "--served-model-name", "a", folder=tmp_path) as (screen, process):
            await screen.at_prompt("hi\r")
            await screen.until("one two three")
            await screen.at_prompt("\x04")
            assert await asyncio.wait_for(process.wait(), 60) == 0
        async with terminal(*command, columns=WIDTH, folder=tmp_path) as (screen, process):
            await screen.until("the server answered 404")
            assert await asyncio.wait_for(process.wait(), 60) == 1


async def test_control_c_stops_an_answer_and_not_the_chat(tmp_path: Path) -> None:
    async with chat(tmp_path, "again " * 500, step_s=0.02) as (screen, process, dispatcher, _):
        await screen.at_prompt("hi\r")
        await screen.until("again again")
        screen.type("\x03")
        await screen.until("[stopped]")
        await dispatcher.until(lambda: bool(dispatcher.cancelled))
        await screen.at_prompt("/tokens\r")
        await screen.until("of 2048 tokens")
        await screen.at_prompt("\x04")
        assert await asyncio.wait_for(process.wait(), 60) == 0


def test_a_thought_stands_before_the_answer() -> None:
    shown = io.StringIO()
    screen = AnswerScreen(Console(file=shown, force_terminal=True, width=WIDTH))
    screen.write("They ask about *foxes*.", thought=True)
    screen.write("Foxes are **quick**.")
    screen.end()
    text = shown.getvalue()
    assert "They ask about *foxes*." in text  # as it was thought
    assert text.index("They ask") < text.index("Foxes are")
    assert "**" not in text


def test_blocks_of_markdown() -> None:
    def blocks(text: str) -> list[str]:
        end = end_of_block(text)
        return [text] if end is None else [text[:end], *blocks(text[end:])]

    assert blocks("a\nb\n\nc") == ["a\nb\n\n", "c"]
    assert blocks("a\n\n") == ["a\n\n"]  # the next line may belong to it
    assert blocks("- a\n\n  more of it\n\nb") == ["- a\n\n  more of it\n\n", "b"]
    fenced = "```py\nx\n\ny\n```\n\n"
    assert blocks(f"{fenced}z") == [fenced, "z"]
    assert blocks("~~~~\n\n```\n\n~~~\n\nx") == ["~~~~\n\n```\n\n~~~\n\nx"]  # not closed yet
