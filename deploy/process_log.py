"""How a process logs: to standard error, as text or as one JSON object a line, with a level that can be
changed while it runs."""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import Literal

import orjson

from .early_signals import deliver_signals

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)-7s %(message)s"


class JsonFormatter(logging.Formatter):
    """Formats records as JSON lines of ``process``. A record's own fields
    (``extra={"fields": {...}}``, such as request ids) stand beside the message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr(level: str, form: LogFormat, process: str) -> None:
    """Sets this process's log up. SIGUSR2 turns debug on, and off again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(process) if form == "json" else logging.Formatter(TEXT, datefmt="%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    signal.signal(signal.SIGUSR2, lambda *_: toggle_debug(level))
    deliver_signals()


def toggle_debug(level: str) -> None:
    """Between debug and ``level``."""
    root = logging.getLogger()
    root.setLevel(level.upper() if root.level == logging.DEBUG else "DEBUG")
    logging.getLogger(__name__).warning("log level is now %s", logging.getLevelName(root.level).lower())


def json_line(process: str, message: str) -> str:
    """Return a plain line of a process's output as JSON."""
    return orjson.dumps({"time": timestamp(time.time()), "process": process, "message": message}).decode()


def timestamp(seconds: float) -> str:
    """RFC 3339, UTC, with milliseconds."""
    whole = int(seconds)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{int((seconds - whole) * 1000):03d}Z"
