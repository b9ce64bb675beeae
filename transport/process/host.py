"""This machine's identity, as far as sharing memory goes, and the address it is reached at."""

from __future__ import annotations

import functools
import logging
import os
import resource
import socket
from pathlib import Path

from ..errors import AddressError

_log = logging.getLogger(__name__)


@functools.cache
def host_identity() -> str:
    """Equal in two processes exactly if one can map the other's memory: same boot, same process namespace,
    same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{socket.gethostname()}/{boot}/{namespace}/{os.getuid()}"


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as allowed: a connection is a file, even one that never
    authenticates."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


EVERYWHERE = ("0.0.0.0", "*", "[::]")
"""Hosts of an address that is listened on, which others cannot connect to."""


LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def host_towards(address: str) -> str:
    """Return this host's own address, as the listener at ``address`` (SCHEME://HOST:PORT) sees it. Nothing is
    sent. Raises OSError."""
    host, _, port = address.partition("://")[2].rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(target)
        return str(sock.getsockname()[0])


def advertised_address(bound: str, host: str) -> str:
    """Return the address to give to others: ``bound`` (tcp://anything:port) with ``host`` in it."""
    port = bound.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def advertised_host(listen: str, advertise_host: str, coordinator: str) -> str:
    """Return the host that prefill workers connect to. If the worker listens on all addresses and names none,
    it is the one that the coordinator sees. Raises AddressError where that cannot be found."""
    listened = listen.removeprefix("tcp://").rpartition(":")[0]
    if advertise_host or listened not in EVERYWHERE:
        if listened in LOOPBACK and not any(f"://{host}:" in coordinator for host in LOOPBACK):
            what = "other hosts cannot reach --listen %s: give 0.0.0.0 there and in --data-listen"
            _log.warning(what, listen)
        return advertise_host or listened.strip("[]")
    try:
        host = host_towards(coordinator)
    except OSError as error:
        raise AddressError(
            f"--listen {listen} names no address that prefill workers can connect to, and this host's own "
            f"cannot be told from the coordinator's, {coordinator} ({error}): give --advertise-host"
        ) from error
    _log.info(
        "listening on all addresses (%s): prefill workers are told %s; --advertise-host names another",
        listen,
        host,
    )
    return host
