"""The chat's commands: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import httpx
import orjson
from rich.console import Console

COMMANDS = {
    "/help": "this list",
    "/system": "show the system message; with TEXT set it, with - remove it",
    "/model": "show the models; with NAME choose one",
    "/tokens": "count the tokens of the conversation",
    "/save": "write the conversation to FILE: Markdown, or JSON if it ends in .json",
    "/reset": "forget the conversation",
    "/quit": "end, as Ctrl-D does",
}
KEYS = (
    "Enter sends; Alt-Enter, or a backslash before Enter, begins a new line. Ctrl-C stops an answer. "
    "/help shows the commands."
)


def show(text: str, style: str = "") -> None:
    """Print a text, on a terminal with words wrapped whole."""
    console = Console()
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


class Talk(Protocol):
    """The conversation that the commands act on."""

    client: httpx.AsyncClient
    model: str
    messages: list[dict[str, str]]

    @property
    def system(self) -> str:
        """The system message; empty: none."""

    @system.setter
    def system(self, text: str) -> None: ...

    def reset(self) -> None:
        """Forget everything but the system message."""


class ChatCommands:
    """Runs commands. ``models``: returns the names that the server lists."""

    def __init__(self, talk: Talk, models: Callable[[], Awaitable[list[str]]]) -> None:
        self._talk, self._models = talk, models

    async def run(self, line: str) -> bool:
        """Run one, and print its answer. Return False where it ends the chat."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/system":
                show(self._system(rest))
            case "/model":
                show(await self._model(rest))
            case "/tokens":
                show(await self._tokens())
            case "/save":
                show(self._save(rest))
            case "/reset":
                self._talk.reset()
                show("the conversation starts anew")
            case _:
                show(self._help(name))
        return True

    def _help(self, name: str) -> str:
        known = "" if name == "/help" else f"There is no command {name[:40]}.\n"
        rows = [f"  {command:<8} {text}" for command, text in COMMANDS.items()]
        return known + "\n".join([*rows, KEYS])

    def _system(self, text: str) -> str:
        if text:
            self._talk.system = "" if text == "-" else text
        return f"system message: {self._talk.system}" if self._talk.system else "there is no system message"

    async def _model(self, name: str) -> str:
        names = await self._models()
        if name and name not in names:
            return f"there is no model {name!r} here; there are: {', '.join(names)}"
        self._talk.model = name or self._talk.model or names[0]
        return "\n".join(f"{'*' if each == self._talk.model else ' '} {each}" for each in names)

    async def _tokens(self) -> str:
        """Ask the server, which has the tokenizer and the template."""
        if not self._talk.messages:
            return "0 tokens: the conversation is empty"
        body = {"messages": self._talk.messages}
        try:
            response = await self._talk.client.post("/tokenize", json=body)
            response.raise_for_status()
            counted = response.json()
            return f"{counted['count']} of {counted['max_model_len']} tokens"
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return f"the server does not count tokens: {error}"

    def _save(self, name: str) -> str:
        if not name:
            return "name a file: /save FILE"
        path, messages = Path(name).expanduser(), self._talk.messages
        if path.suffix == ".json":
            text = orjson.dumps(messages, option=orjson.OPT_INDENT_2).decode() + "\n"
        else:
            text = "\n\n".join(f"## {message['role']}\n\n{message['content']}" for message in messages) + "\n"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return f"{path} exists already; name another file"
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}"
        return f"wrote {len(messages)} messages to {path}"
