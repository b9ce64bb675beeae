"""The host names and the web pages' origins that a server answers to, and its CORS headers. Pure.

A web page that is open anywhere can make its browser send requests to any address the browser reaches. Two
headers stop it:

Host     DNS rebinding points a page's own name at this server's address, and the browser then takes both for
         one site: so names are checked. IP addresses are always accepted: no page can make its name look like
         one, and probes and balancers use them.
Origin   Browsers send it with everything that another site's page changes. It must be this server's own, or
         an allowed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from ...errors import Forbidden, InvalidRequest

Headers = Sequence[tuple[bytes, bytes]]
SAFE_METHODS = frozenset(["GET", "HEAD", "OPTIONS"])
LOOPBACK_NAMES = ("localhost", "*.localhost")
PRIVATE_NAMES = ("*.local", "*.internal", "*.svc", "*.cluster.local", "*.home.arpa")
"""Ends of names that no public registry gives out, so no page of the Internet has them."""
METHODS = b"GET, POST, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S = 600
MAX_KNOWN = 1024
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:\d{1,5})?")
_FIELD_NAMES = re.compile(rb"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+)*")


class Access:
    """``hosts``, ``origins``: allowed ones; ``*`` in them stands for anything, alone for all.
    ``private_names``: names without a dot and those of ``PRIVATE_NAMES`` are allowed hosts, too."""

    def __init__(
        self, hosts: Iterable[str] = (), origins: Iterable[str] = (), *, private_names: bool = False
    ) -> None:
        self._all_origins = "*" in (origins := list(origins))
        self._origins = _pattern(origins)
        self._has_origins = bool(origins)
        self._hosts = _pattern([*LOOPBACK_NAMES, *hosts, *(PRIVATE_NAMES if private_names else ())])
        self._private_names = private_names
        # values of the header that were allowed; none comes with HTTP/1.0 only
        self._known_hosts: set[bytes | None] = {None}

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises InvalidRequest where Host is none, Forbidden where host or origin is not allowed."""
        host = headers.get(b"host")
        if host not in self._known_hosts:
            self._check_host(host or b"")
            if len(self._known_hosts) < MAX_KNOWN:
                self._known_hosts.add(host)
        if method not in SAFE_METHODS and b"origin" in headers:
            self.check_origin(headers)

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Forbidden where the request comes from a page that is neither this server's nor of an
        allowed origin."""
        origin = headers.get(b"origin")
        if origin is None or self._allows(origin) or origin.partition(b"://")[2] == headers.get(b"host"):
            return
        name = _readable(origin)
        raise Forbidden(
            f"Web pages of origin {name!r} may not use this server; `--allowed-origins {name}` lets them.",
            code="origin_not_allowed",
        )

    def cors(self, headers: Mapping[bytes, bytes]) -> Headers:
        """What is added to an answer, an error too, so that pages of allowed origins may read it."""
        if not self._has_origins:
            return ()
        if self._all_origins:
            return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))
        origin = headers.get(b"origin")
        if origin is None or not self._allows(origin):
            return ((b"vary", b"Origin"),)
        return (
            (b"vary", b"Origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"*"),
        )

    def preflight(self, headers: Mapping[bytes, bytes]) -> Headers:
        """What answers a browser's question whether a page may send a request, beside ``cors``. Raises
        Forbidden."""
        self.check_origin(headers)
        answer = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_MAX_AGE_S),
        ]
        asked = headers.get(b"access-control-request-headers", b"")
        if _FIELD_NAMES.fullmatch(asked):
            answer.append((b"access-control-allow-headers", asked))  # whatever a client's library adds
        return answer

    def _check_host(self, host: bytes) -> None:
        found = _HOST.fullmatch(host.decode("latin-1"))
        if found is None:
            raise InvalidRequest(f"Host: {_readable(host)!r} is not the name or address of a host.")
        name = found[1].lower().rstrip(".")
        if _is_address(name) or self._hosts.fullmatch(name) or (self._private_names and "." not in name):
            return
        raise Forbidden(
            f"This server does not answer to the host name {name!r}; `--allowed-hosts {name}` lets it. "
            "(Names are checked where no API keys are asked for, against DNS rebinding.)",
            code="host_not_allowed",
        )

    def _allows(self, origin: bytes) -> bool:
        return self._has_origins and self._origins.fullmatch(origin.decode("latin-1").lower()) is not None


def is_preflight(headers: Mapping[bytes, bytes]) -> bool:
    """Whether an OPTIONS request is a browser's, which asks if a page may send another one."""
    return b"origin" in headers and b"access-control-request-method" in headers


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name.lower()).replace(r"\*", ".*") for name in names) or r"(?!)")


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _readable(value: bytes) -> str:
    return value.decode("latin-1")[:100]
