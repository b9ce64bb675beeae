"""Settings of the HTTP server: where it listens, what it accepts from the network, how much clients may ask
of it."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .access.url import listed
from .limits import HttpLimits
from .overload import MIN_HELD_BYTES, OverloadLimits

HOST_PATTERN = re.compile(r"[\w.*-]+|\[?[0-9A-Fa-f:.]+\]?")
ORIGIN_PATTERN = re.compile(r"\*|null|[\w.+-]+://[\w.*:\[\]-]+")


class HttpSettings(BaseModel):
    """The HTTP server."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which the HTTP server listens; 0.0.0.0: all.",
    )
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port of the HTTP server; 0: the system chooses."
    )
    open_access: bool = Field(
        default=False, description="Listen on --host without API keys, open to everyone."
    )
    allowed_hosts: str = Field(
        default="",
        max_length=65_536,
        description="Names of this server that requests may have in Host, with commas between; * stands "
        "for anything. Default: with API keys all, else IP addresses, localhost, this "
        "machine's name and --host; with --open-access also names of private domains.",
    )
    allowed_origins: str = Field(
        default="",
        max_length=65_536,
        description="Origins of web pages that may use the API (CORS), such as https://app.example, "
        "with commas between; * stands for anything. Default: pages of this server.",
    )
    trusted_proxies: str = Field(
        default="",
        max_length=65_536,
        description="Proxies whose X-Forwarded-For, X-Forwarded-Proto and Forwarded headers are "
        "trusted: addresses or networks, with commas between. Default: none.",
    )
    image_domains: str = Field(
        default="",
        max_length=65_536,
        description="Hosts that images of chats are fetched from, with commas between: example.com, "
        "*.example.com, example.com:8080, an IP address; + before a name: it may have a private address. "
        "Default: none.",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="Certificate with its chain, in PEM: all HTTP ports speak TLS only. It is read "
        "again when it changes.",
    )
    tls_key: Path | None = Field(
        default=None, description="Private key of --tls-cert in PEM. Default: it is in that file."
    )
    admin_key_file: Path | None = Field(
        default=None,
        description="File (mode 0600) with the operators' key. Default: a new key, in a file that the "
        "log names.",
    )
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the admin API; 0: the system chooses. Default: none; the HTTP port has "
        "drain, flip and log-level.",
    )
    admin_host: str = Field(
        default="127.0.0.1", min_length=1, description="Address on which the admin API listens."
    )
    request_timeout_s: float = Field(
        default=600,
        gt=0,
        le=86_400,
        description="Longest life of a request in seconds; then it ends with what it has generated, "
        "else with 504. A request may ask for less.",
    )
    shutdown_timeout_s: float = Field(
        default=5, ge=0, le=86_400, description="Seconds that open requests get after SIGTERM or Ctrl-C."
    )
    max_body_mib: float = Field(
        default=16, gt=0, le=1024, description="Largest HTTP request body in MiB; else 413."
    )

    @property
    def scheme(self) -> str:
        """The scheme of both HTTP ports."""
        return "http" if self.tls_cert is None else "https"

    @property
    def http_limits(self) -> HttpLimits:
        return HttpLimits(
            max_body_bytes=int(self.max_body_mib * 2**20), request_timeout_s=self.request_timeout_s
        )

    @property
    def overload_limits(self) -> OverloadLimits:
        return OverloadLimits(max_held_bytes=max(MIN_HELD_BYTES, 4 * self.http_limits.max_body_bytes))

    @model_validator(mode="after")
    def _consistent_http(self) -> Self:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("--tls-key is the key of a certificate: give --tls-cert, too")
        for host in listed(self.allowed_hosts):
            if not HOST_PATTERN.fullmatch(host):
                raise ValueError(
                    f"--allowed-hosts: {host!r} is no host's name; give it without scheme, port "
                    "and path: llm.example.org"
                )
        for origin in listed(self.allowed_origins):
            if not ORIGIN_PATTERN.fullmatch(origin):
                raise ValueError(
                    f"--allowed-origins: {origin!r} is no origin; SCHEME://HOST or SCHEME://HOST:PORT is: "
                    "https://app.example.org"
                )
        for network in listed(self.trusted_proxies):
            if not _is_network(network):
                raise ValueError(
                    f"--trusted-proxies: {network!r} is neither an address nor a network such as 10.0.0.0/8"
                )
        return self


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True
