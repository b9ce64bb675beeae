"""What a command checks and fetches before another folder's entry point runs it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from ..deploy.process_log import log_to_stderr
from ..transport.process.heap import seldom_collected
from .checks import read_key, require_model
from .model_source import with_folder
from .server_access import trust

if TYPE_CHECKING:  # a command imports its own settings alone
    from ..loadgen.settings import LoadSettings
    from ..planner.settings import ProfileSettings
    from ..worker.settings import DecodeSettings, PrefillSettings

TERMINATED = 128 + signal.SIGTERM
_log = logging.getLogger(__name__)


def worker(settings: PrefillSettings | DecodeSettings) -> None:
    """Run a worker in the roles that its settings name."""
    # while it loads; the first process of a container would ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    log_to_stderr(settings.log_level, settings.log_format, settings.worker_id)
    _end_with_any_thread()
    settings = with_folder(settings, weights=settings.runner == "model")
    require_model(settings.model, weights=settings.runner == "model")
    with seldom_collected(0):  # imports leave no garbage: to look for some takes a sixth of their time
        from ..worker.main import run

    run(settings)


def bench(settings: LoadSettings) -> int:
    """Send load to a server. Return the exit status."""
    from ..loadgen.load import main

    key = read_key("--api-key-file", settings.api_key_file)
    return main(settings, key, trust(settings.url, settings.tls_ca) or None)


def profile(settings: ProfileSettings) -> int:
    """Measure a model's steps on this machine, or import a profile. Return the exit status."""
    from ..planner.profile_commands import profile as make_profile

    settings = with_folder(settings, weights=settings.runner == "model")
    if settings.model is not None:
        require_model(settings.model, weights=settings.runner == "model")
    return make_profile(settings)


def _end_with_any_thread() -> None:
    """Let an exception that ends a thread end this process, which would go on half alive without the
    thread."""

    def end(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        _log.critical("background work has failed (%s), this process ends", name, exc_info=args.exc_value)
        os._exit(1)  # as if killed, which loses no stream

    threading.excepthook = end
