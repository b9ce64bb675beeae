"""The floor for a Python server: one asyncio.Protocol on uvloop that writes a fixed chunk for every row of
every step it receives.

No HTTP parsing, no validation, no lifecycle, no text: what remains is the message, the loop and the socket.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from ...transport.channels.channels import RouterChannel
from ...transport.channels.event_loop import Attachment
from ...transport.messages.messages import FROM_WORKER, Message, StepTokens, from_u32

BODY = (
    b'data: {"id":"chatcmpl-'
    + b"0" * 32
    + b'","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":['
)
CHUNK = BODY + b'{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
FRAME = b"%x\r\n" % len(CHUNK) + CHUNK + b"\r\n"


class _Connection(asyncio.Protocol):
    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.append(cast(asyncio.Transport, transport))  # uvloop's is one in all but name
        self._transports[-1].write(FRAME)  # the client knows that its row exists


async def serve() -> None:
    """Prints its HTTP port and its control address; runs until it is terminated."""
    transports: list[asyncio.Transport] = []

    def receive(messages: list[tuple[bytes, Message]]) -> None:
        for _, message in messages:
            if isinstance(message, StepTokens):
                for row in from_u32(message.dispatches):
                    transports[row].write(FRAME)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(transports), "127.0.0.1", 0, backlog=2048)
    with RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER) as channel:
        attachment = Attachment(loop, channel, receive)
        print(server.sockets[0].getsockname()[1], channel.address, flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            attachment.close()


if __name__ == "__main__":
    sys.exit(uvloop.run(serve()))
