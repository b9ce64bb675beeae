"""``splitserve coordinator``: the coordinator together with its pool controller."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from ..coordinator.errors import CannotStart
from ..coordinator.http.access.operators import admin_key
from ..coordinator.lifecycle.lifecycle import Lifecycle
from ..coordinator.lifecycle.snapshot import snapshot_of
from ..coordinator.main import run, run_one
from ..coordinator.processes import CANNOT_START, Place
from ..coordinator.socket_dispatcher import SocketDispatcher
from ..coordinator.tenants.errors import TenantsError
from ..deploy.process_log import log_to_stderr
from ..engine.errors import EngineError
from ..engine.latency_profile import Profile
from ..steering.shell import Hooks, SteeringShell
from ..steering.steering import Steering
from ..transport.errors import TransportError
from .checks import require_models, require_port
from .config import ConfigError
from .model_source import with_folders
from .settings import ServerSettings

_log = logging.getLogger(__name__)


def main(settings: ServerSettings) -> None:
    """Run the coordinator until a signal. Raises ConfigError where these settings do not let it serve."""
    log_to_stderr(settings.log_level, settings.log_format, "coordinator")
    settings = with_folders(settings, weights=False)
    require_models(settings, weights=False)
    require_port(settings.listen_host, settings.port)
    if settings.admin_key_file is not None:
        try:
            admin_key(settings.admin_key_file)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None)
            why = f"cannot read {settings.admin_key_file} ({reason})" if reason else error
            raise ConfigError(f"--admin-key-file: {why}") from error
    try:
        run(settings, run_one_of_several, controller_of)
    except CannotStart as error:
        raise ConfigError(str(error)) from error
    except OSError as error:  # an address in use, a file that cannot be written
        raise ConfigError(_reason(error, settings)) from error


def run_one_of_several(settings: ServerSettings, place: Place) -> None:
    """Run one of several coordinator processes, from its first line. Exit status CANNOT_START: its settings
    are wrong."""
    log_to_stderr(settings.log_level, settings.log_format, f"coordinator-{place.number}")
    try:
        run_one(settings, place, controller_of)
    except (CannotStart, EngineError, TenantsError, TransportError, OSError) as error:
        _log.error("cannot start: %s", _reason(error, settings) if isinstance(error, OSError) else error)
        sys.exit(CANNOT_START)


def _reason(error: OSError, settings: ServerSettings) -> str:
    """Return what is wrong, with the option that names the file."""
    if error.filename is None:
        return error.strerror or str(error)
    path = Path(error.filename).absolute()
    options = [option for option, folder in settings.folders.items() if path.is_relative_to(folder)]
    return f"{', '.join([*options, str(path)])}: {error.strerror}; name another place"


def controller_of(
    settings: ServerSettings, lifecycle: Lifecycle, dispatcher: SocketDispatcher
) -> SteeringShell | None:
    """Make the pool controller; None: it is off. Raises ProfileError."""
    options = settings.steering
    if options is None:
        return None
    profile = Profile.read(settings.steer_profile) if settings.steer_profile is not None else None
    steering = Steering(options, profile)
    of_model = settings.model_name if settings.other_models else ""
    hooks = Hooks(options.mode, settings.steer_webhook, settings.steer_command, of_model)
    return SteeringShell(steering, partial(snapshot_of, lifecycle), dispatcher, hooks)
