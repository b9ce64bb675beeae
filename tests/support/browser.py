"""A headless Chromium, driven over its DevTools protocol:
https://chromedevtools.github.io/devtools-protocol/"""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
    ),
)
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowUp": 38,
    "ArrowDown": 40,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "Home": 36,
    "End": 35,
}
TIMEOUT_S = 60


class Page:
    """One page. What it logs as an error, throws or is forbidden by its Content-Security-Policy is in
    ``problems``."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self._loaded = asyncio.Event()
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = len(self._answers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            message = await answer
        assert "error" not in message, message["error"]
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str, width: int = 1366, height: int = 900, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.look(width, height, scheme)
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(TIMEOUT_S):
            await self._loaded.wait()

    async def look(self, width: int, height: int, scheme: str) -> None:
        """The window's size, and whether its user prefers light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def value(self, expression: str) -> Any:
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Waits until this is true in the page."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := await self.value(expression)):
                    await asyncio.sleep(0.05)
                return found
        except TimeoutError:
            raise AssertionError(
                f"not true in {timeout_s:g} s: {expression}; problems: {self.problems}"
            ) from None

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str) -> None:
        """One key, as a person presses it."""
        parameters: dict[str, Any] = {
            "key": key,
            "windowsVirtualKeyCode": KEYS.get(key) or ord(key.upper()[0]),
        }
        if len(key) == 1:
            parameters["text"] = key
        elif key == "Enter":
            parameters["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", **parameters)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path, whole: bool = False) -> None:
        more: dict[str, Any] = {}
        if whole:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            more = {
                "captureBeyondViewport": True,
                "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
            }
        shot = await self.call("Page.captureScreenshot", format="png", **more)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._answers[data["id"]].set_result(data)
            elif data["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif data["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.problems.append(str(data["params"]["entry"]["text"]))


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Page]:
    """A new browser with a new profile and one page."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(process)
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(await _page(http, port), max_msg_size=0) as socket,
        ):
            yield Page(socket)
    finally:
        process.terminate()
        await process.communicate()


async def _page(http: aiohttp.ClientSession, port: int) -> str:
    """Return the address where the page listens, which opens about when the browser itself does."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            async with http.get(f"http://127.0.0.1:{port}/json") as response:
                found = [str(t["webSocketDebuggerUrl"]) for t in await response.json() if t["type"] == "page"]
            if found:
                return found[0]
            await asyncio.sleep(0.05)


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        async for line in process.stderr:
            if found := re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
                return int(found[1])
    raise AssertionError("Chromium ended before it listened")
