"""A worker's answers to an orchestrator's probes, such as Kubernetes', over plain HTTP.

    GET /health   200 while the process computes; 503 while it loads the model, and when it hangs
    GET /ready    200 if a coordinator sends it work and a worker of the other role fits it; else 503

The body is the reason. Nothing else is answered, and nothing can be changed, because there is no key here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

from ..transport.errors import AddressError
from .loop import Worker

HUNG_AFTER_S = 30.0
"""A loop that has not turned for this time hangs, and so does a step that has run for it: as for the
coordinator."""
READ_S = 5.0


class Health:
    """The reasons why a worker is not healthy or not ready; empty: it is. Called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worker: Worker | None = None
        self._step: object | None = None
        self._step_since = 0.0

    def watch(self, worker: Worker) -> None:
        """The model is there, and this worker is about to loop."""
        worker.turned_at, self._worker = self._clock(), worker

    def fault(self) -> str:
        """A step counts from the first call that sees it, so a single late probe finds no fault."""
        worker, now = self._worker, self._clock()
        if worker is None:
            return "the model is being loaded"
        if (step := worker.running_step) is not self._step:
            self._step, self._step_since = step, now
        if step is not None and now - self._step_since >= HUNG_AFTER_S:
            return f"a step has been running for {now - self._step_since:.0f} s"
        silent_s = now - worker.turned_at
        return f"the worker's loop has stood still for {silent_s:.0f} s" if silent_s >= HUNG_AFTER_S else ""

    def gap(self) -> str:
        """What is missing between a request and this worker."""
        if fault := self.fault():
            return fault
        assert self._worker is not None, "fault() has looked"
        roles = self._worker.roles.copy()
        if any(role.departure.has_begun for role in roles.values()) or not roles:
            return "the worker drains"
        for name, role in roles.items():
            misfits = role.links.misfits
            if not misfits:
                why = f": {refusal}" if (refusal := role.links.refusal) else ""
                return f"no coordinator has taken in the {name} worker{why}"
            if all(misfits):
                return misfits[0]
        return ""


class _Server(ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


class HealthServer:
    """Answers probes in threads of its own until the process ends."""

    def __init__(self, port: int, health: Health) -> None:
        """Raises AddressError."""
        pages = {"/health": health.fault, "/ready": health.gap}

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_S  # of a client's silence

            def do_GET(self) -> None:
                page = pages.get(self.path)
                status, reason = (404, "GET /health or /ready") if page is None else (200, page())
                body = f"{reason or 'ok'}\n".encode()
                self.send_response(503 if reason and page else status)
                self.send_header("content-type", "text/plain; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: a probe comes every few seconds."""

        try:
            self._server = _Server(("", port), Handler)
        except OSError as error:
            raise AddressError(f"--health-port {port}: {error.strerror}; choose another port") from None
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
