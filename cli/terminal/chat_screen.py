"""The chat's two ends. Questions: an editor of several lines in a terminal, otherwise the lines of standard
input. Answers: on a terminal as Markdown with words wrapped whole, elsewhere as they come."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.padding import Padding
from rich.text import Text

from .chat_commands import COMMANDS, KEYS, show

REFRESH_S = 0.05
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
UNSEEN = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters: an answer must not move the cursor or change the terminal's title."""


class AnswerScreen:
    """One answer. Only the Markdown block that grows is drawn again; finished ones scroll away."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._block, self._is_thought, self._num_blocks = "", False, 0
        self._live: Live | None = None
        self._begun = False
        self._drawn_at = float("-inf")

    def write(self, text: str, *, thought: bool = False) -> None:
        """Show more of the answer, or of the thought before it (on terminals alone)."""
        if not self._console.is_terminal:
            self._begun = self._begun or not thought
            print("" if thought else text, end="", flush=True)
            return
        if thought != self._is_thought:
            self._finish_block()
            self._is_thought = thought
        self._block += text.translate(UNSEEN)
        while not thought and (end := end_of_block(self._block)):
            rest = self._block[end:]
            self._block = self._block[:end]
            self._finish_block()
            self._block = rest
        if self._block.strip() and monotonic() >= self._drawn_at + REFRESH_S:
            self._draw()

    def end(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._console.is_terminal:
            self._finish_block()
        elif self._begun:
            print(flush=True)

    def _finish_block(self) -> None:
        if self._block.strip():
            self._draw()
        if self._live is not None:
            self._live.stop()
            self._num_blocks += 1
        self._live, self._block = None, ""

    def _draw(self) -> None:
        text = self._block.strip("\n")
        shown = Text(text, style="dim") if self._is_thought else Markdown(text)
        block = Padding(shown, (1 if self._num_blocks else 0, 0, 0, 0))
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(block, refresh=True)
        self._drawn_at = monotonic()


def end_of_block(text: str) -> int | None:
    """Return where the second Markdown block of a text begins: after a blank line outside of fenced code,
    where the next line is not indented. None: there is one block."""
    fence, blank, at = "", False, 0
    for line in text.splitlines(keepends=True):
        if blank and line.strip() and not line[0].isspace():
            return at
        if found := FENCE.match(line):
            fence = found[1] if not fence else "" if found[1].startswith(fence) else fence
        blank = not fence and not line.strip() and at > 0
        at += len(line)
    return None


async def lines() -> AsyncIterator[str]:
    """Yield what the user types, or the lines of standard input if it is no terminal."""
    if not sys.stdin.isatty():
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(f"> {line.rstrip()}", flush=True)
            yield line
        return
    from prompt_toolkit import PromptSession  # the extra `cli`
    from prompt_toolkit.completion import WordCompleter

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation="  ",
        completer=WordCompleter([*COMMANDS], sentence=True),
        complete_while_typing=False,
    )
    while True:
        try:
            yield await session.prompt_async()
        except EOFError:
            return
        except KeyboardInterrupt:
            show(KEYS, "dim")


def _keys() -> Any:
    """Return the keys that differ from the editor's own: Enter sends, also a text of several lines."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
