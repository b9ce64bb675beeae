"""``splitserve top``: the dashboard's live picture in a terminal, from the same feed."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from collections import deque
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..config import CommandError
from ..server_access import operator_access, trust
from ..settings import TopSettings
from .top_view import Picture, render, trouble

MAX_POINTS = 450
MAX_REQUESTS = 120
PATIENCE_S = 4.0
EVERY_S = 1.0  # between two pictures; the coordinator samples once a second
MIN_WIDTH = 100  # of a picture that goes to a file or a pipe
QUIT = ("q", "Q", "\x04")


class Feed:
    """What has been seen so far, and how to ask for the rest."""

    def __init__(self, client: httpx.Client, model: str = "") -> None:
        """``model``: of several; empty: the first."""
        self._client, self._asked = client, {"model": model} if model else {}
        self._boot = ""
        self.points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        self.requests: deque[dict[str, Any]] = deque(maxlen=MAX_REQUESTS)

    def picture(self) -> Picture:
        """Return the state with everything new since the last call. Raise CommandError."""
        state = self._ask()
        if state["boot"] != self._boot:  # the coordinator has started anew, and numbers from one
            again, self._boot = bool(self._boot), state["boot"]
            self.points.clear()
            self.requests.clear()
            state = self._ask() if again else state
        self.points.extend(state["points"])
        self.requests.extend(state["requests"])
        return Picture(str(self._client.base_url), state, list(self.points), list(self.requests))

    def _ask(self) -> dict[str, Any]:
        after = self._asked | {
            "after_point": self.points[-1]["n"] if self.points else 0,
            "after_request": self.requests[-1]["n"] if self.requests else 0,
        }
        try:
            response = self._client.get("/dashboard/feed", params=after)
            state: dict[str, Any] = response.json()
        except httpx.HTTPError as error:
            raise CommandError(
                f"no answer from {self._client.base_url} ({error or type(error).__name__}); does a "
                "coordinator run there? --url names another one"
            ) from error
        except ValueError as error:
            raise CommandError(
                f"{self._client.base_url} answers, but is no splitserve coordinator: --url names another"
            ) from error
        if response.status_code != 200:
            raise CommandError(
                str(state.get("error", {}).get("message", f"the server answered {response.status_code}"))
            )
        return state


def main(settings: TopSettings) -> int:
    """Shows the picture until q or Ctrl-C; once where standard output is no terminal. Returns the exit
    status."""
    url, headers = operator_access(settings.url, settings.admin_key_file)
    console = Console()
    verify = trust(url, settings.tls_ca)
    with httpx.Client(
        base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=verify
    ) as client:
        feed = Feed(client, settings.show)
        if not console.is_terminal:
            wide = Console(width=max(MIN_WIDTH, console.width))
            wide.print(render(feed.picture(), wide.width, 60, _is_coloured(wide)))
            return 0
        live = Live(Text("asking ..."), console=console, screen=True, auto_refresh=False)
        with _keys() as pressed, live, contextlib.suppress(KeyboardInterrupt):
            live.update(_look(feed, console), refresh=True)
            while pressed(EVERY_S) not in QUIT:
                live.update(_look(feed, console), refresh=True)
    return 0


def _look(feed: Feed, console: Console) -> Any:
    try:
        return render(feed.picture(), console.width, console.height, _is_coloured(console))
    except CommandError as error:
        return trouble(str(error))


def _is_coloured(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """While inside, single keys are read as they are pressed: ``pressed(timeout_s)`` gives one, or
    nothing."""
    terminal = os.open("/dev/tty", os.O_RDONLY)  # also where standard input is redirected
    before = termios.tcgetattr(terminal)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([terminal], [], [], timeout_s)
        return os.read(terminal, 1).decode(errors="replace") if ready else ""

    tty.setcbreak(terminal)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        os.close(terminal)
