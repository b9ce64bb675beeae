"""A WebSocket client that waits long, and sees the server's Close also behind messages that were not read."""

from __future__ import annotations

from functools import partial

from websockets.asyncio import client

connect = partial(client.connect, proxy=None, open_timeout=60, close_timeout=60, max_queue=None)
