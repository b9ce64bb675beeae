"""A program in a terminal of its own, typed into and read as a person would."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>]|\x00")
ROWS, TIMEOUT_S = 40, 60
PROMPT = "\x1b[?2004h"
"""The beginning of an editor's prompt: it asks for pasted text to be marked."""
WHERE = "\x1b[6n"
"""A program's question where the cursor is; the answer is: in the last row."""


class Terminal:
    """``seen``: the output since the last that was waited for, without escape sequences."""

    def __init__(self, master: int) -> None:
        self._master, self._raw, self._changed = master, "", asyncio.Event()
        self._answered = self._num_prompts = self._num_forgotten = 0
        asyncio.get_running_loop().add_reader(master, self._read)

    @property
    def seen(self) -> str:
        text = ESCAPES.sub("", self._raw).replace("\r\n", "\n").replace("\r", "\n")
        return text[self._num_forgotten :]

    def type(self, text: str) -> None:
        """Press these keys: Enter is a carriage return."""
        os.write(self._master, text.encode())

    async def at_prompt(self, text: str) -> None:
        """Press these keys once the program's next prompt is there."""
        self._num_prompts += 1
        await self._wait(lambda: self._raw.count(PROMPT) >= self._num_prompts, "prompt")
        self.type(text)

    async def until(self, text: str) -> str:
        """Wait for output that has ``text``. Return all up to its end, and forget it."""
        await self._wait(lambda: text in self.seen, text)
        found = self.seen[: self.seen.index(text) + len(text)]
        self._num_forgotten += len(found)
        return found

    async def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"no {what!r} in {self.seen!r}") from None

    def _read(self) -> None:
        try:
            self._raw += os.read(self._master, 65_536).decode(errors="replace")
        except OSError:  # the program has ended
            asyncio.get_running_loop().remove_reader(self._master)
        while self._answered < self._raw.count(WHERE):
            self._answered += 1
            self.type(f"\x1b[{ROWS};1R")
        self._changed.set()


@asynccontextmanager
async def terminal(
    *command: str, columns: int = 80, env: dict[str, str] | None = None, folder: Path | None = None
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """Run a command in a terminal; end it afterwards."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    variables = {**inherited, "TERM": "xterm-256color", **(env or {})}

    def control() -> None:
        """Make it the program's controlling terminal, so that Ctrl-C is a signal."""
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=variables,
        cwd=folder,
        start_new_session=True,
        preexec_fn=control,
    )
    os.close(slave)
    shown = Terminal(master)
    try:
        yield shown, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)
