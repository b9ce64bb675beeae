"""The admin API on a port of its own: what operators may ask and tell, and nothing that clients need."""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from .listening_server import ListeningServer, bind


def admin_server(app: ASGIApp, host: str, port: int) -> ListeningServer:
    """Binds at once. Raises OSError. ``app`` checks who asks."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False)
    return ListeningServer(config, bind(host, port))
