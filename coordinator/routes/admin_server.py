"""The admin API on a port of its own: what operators may ask and tell, and nothing that clients need."""

from __future__ import annotations

import uvicorn

from ..http.access.gate import AccessGate
from ..http.access.tls import TlsFiles
from ..http.listening_server import ListeningServer, bind, context_of
from ..http.protocol import HttpProtocol


def admin_server(app: AccessGate, host: str, port: int, tls: TlsFiles | None = None) -> ListeningServer:
    """Binds at once. Raises OSError. ``app`` checks who asks."""
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=context_of(tls),
    )
    return ListeningServer(config, bind(host, port))
