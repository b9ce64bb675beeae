"""The chat's questions: an editor of several lines in a terminal, otherwise the lines of standard input."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from .chat_commands import COMMANDS, KEYS, show


async def lines() -> AsyncIterator[str]:
    """Yield what the user types, or the lines of standard input if it is no terminal."""
    if not sys.stdin.isatty():
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(f"> {line.rstrip()}", flush=True)
            yield line
        return
    from prompt_toolkit import PromptSession  # the extra `chat`
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
