"""The floor for answered requests: uvicorn with an application that reads the body and answers a fixed
JSON."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

ANSWER = (
    b'{"id":"chatcmpl-0","object":"chat.completion","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"word"}}]}'
)
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
Message = MutableMapping[str, Any]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """ASGI."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


def main() -> None:
    """Prints its port; runs until it is terminated."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], "none", flush=True)
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
        )
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
