"""The coordinator's settings: frozen, checked once; ``cli/config.py`` fills them from flags, environment and file."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..steering.latency_bounds import LatencyBound, attainment, notation, parse_bounds
from ..steering.options import SteeringOptions
from .metrics.objectives import Objectives

Routing = Literal["hybrid", "round_robin", "least_loaded", "prefix", "sticky"]
LogLevel = Literal["debug", "info", "warning", "error"]
HOST_PATTERN = re.compile(r"[\w.*-]+|\[?[0-9A-Fa-f:.]+\]?")
ORIGIN_PATTERN = re.compile(r"\*|null|[\w.+-]+://[\w.*:\[\]-]+")
LogFormat = Literal["text", "json"]


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach what listens there."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_network(text: str) -> bool:
    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _bounds(name: str, text: str) -> dict[str, LatencyBound]:
    """Raises ValueError that names the option."""
    try:
        return parse_bounds(text)
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')}: {error}") from None


class CoordinatorSettings(BaseModel):
    """Takes HTTP requests and sends them to the workers. Free of torch and of the model's weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(
        description="Hugging Face checkpoint folder, a model of the hub such as Qwen/Qwen3-0.6B, or s3://BUCKET/PREFIX (needs "
        "splitserve[s3]); the coordinator reads only its config, tokenizer and chat template."
    )
    revision: str = Field(default="", max_length=256, description="Branch, tag or commit of a hub model. Default: main.")
    served_model_name: str = Field(
        default="", max_length=256, description="Model name in the API. Default: the name of the model's folder."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address on which the HTTP server listens; 0.0.0.0 for all.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP server; 0 lets the system choose.")
    control_address: str = Field(
        default="tcp://127.0.0.1:7700",
        pattern=r"^tcp://[^\s:]+:\d+$|^tcp://\[[0-9a-fA-F:.]+\]:\d+$",
        description="Where workers reach the coordinator: it listens here. tcp://HOST:PORT, HOST an address of this machine or 0.0.0.0.",
    )
    key_file: Path | None = Field(
        default=None, description="The cluster's key, made by `splitserve keygen`; the same file for all processes."
    )
    insecure: bool = Field(default=False, description="Use no key: control connections are neither authenticated nor encrypted.")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Most tokens of prompt and output together. Default: the model's, or as many as every worker holds.",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral"] = Field(
        default="auto", description="How the model writes tool calls: hermes is Qwen's way too. Default: told by its chat template."
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        default="auto",
        description="Whether a chat's answer may begin with a thought in <think></think>, which then is its reasoning_content. Default: "
        "told by the chat template.",
    )
    routing: Routing = Field(default="hybrid", description="How workers are chosen for a request.")
    max_queue: int = Field(default=1024, ge=0, le=1_000_000, description="Requests that may wait for a worker; more are refused with 429.")
    request_timeout_s: float = Field(
        default=600,
        gt=0,
        le=86_400,
        description="Longest life of a request in seconds; then it ends with what it has generated, or with 504 where that is nothing. A "
        "request may ask for less.",
    )
    deadline_error: bool = Field(
        default=False,
        description="A request that passes a deadline is a 504, or in mid-stream an error event, whatever it has generated; a request may "
        "ask for its text all the same (`on_timeout`).",
    )
    receive_timeout_s: float = Field(
        default=30,
        gt=0,
        le=86_400,
        description="Longest time in seconds that a client may take to send a request, and one second more for each 16 KiB of its body; "
        "then 408.",
    )
    queue_timeout_s: float = Field(default=300, gt=0, le=86_400, description="Longest wait for a worker with room, each time; then 504.")
    prefill_timeout_s: float = Field(default=300, gt=0, le=86_400, description="Longest time to compute a prompt; then 504.")
    handoff_timeout_s: float = Field(
        default=120, gt=0, le=86_400, description="Longest time from the first token until a decode worker has the KV blocks; then 504."
    )
    ttft_slo: str = Field(
        default="",
        pattern=r"^$|^(premium|standard|free|batch)=\d+(\.\d+)?(,(premium|standard|free|batch)=\d+(\.\d+)?)*$",
        description="Seconds to the first token by priority class, such as premium=0.5,standard=2: a request that would take longer, by "
        "what prefill workers have been measured to compute, is refused at once with 429. Its deadline is held to in any case.",
    )
    steer: Literal["off", "advise", "act"] = Field(
        default="off",
        description="The pool controller. advise: say which workers should change their roles, and whether there should be more or fewer; "
        "act: also do it. Needs --steer-slo and --steer-profile.",
    )
    steer_slo: str = Field(
        default="",
        pattern=notation("ttft", "tpot"),
        description="What requests may take, in seconds, and how many of a hundred must keep both at once, as `splitserve plan --slo` has "
        "it: ttft=2,tpot=0.05@p90 or ttft=2@p90,tpot=0.05@p90; of several percentiles the largest counts.",
    )
    steer_profile: Path | None = Field(
        default=None, description="The workers' latency model, made by `splitserve profile`: by it the pool controller predicts."
    )
    steer_min_workers: int = Field(default=2, ge=2, le=65_536, description="The pool controller never has fewer workers than these.")
    steer_max_workers: int = Field(
        default=0, ge=0, le=65_536, description="Nor more. 0: it only changes roles, and leaves the number of workers alone."
    )
    steer_queue_depth: int = Field(
        default=50,
        ge=1,
        le=1_000_000,
        description="More requests than these waiting for --steer-scale-up-after-s: one more worker is wanted.",
    )
    steer_scale_up_above: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="One more worker is wanted too where even the best ratio is predicted to be loaded more than this: 1 just meets the "
        "objectives.",
    )
    steer_scale_down_below: float = Field(
        default=0.6, ge=0, le=10, description="One fewer will do where the best ratio without it is predicted to be loaded less than this."
    )
    steer_scale_up_latency: str = Field(
        default="",
        pattern=notation("ttft", "tpot"),
        description="One more worker is wanted too where what was measured is slower: with ttft=1@p95,tpot=0.08@p99 where more than 5 of a "
        "hundred had their first token after 1 s (then a prefill worker), or more than 1 a longer time per token (a decode worker).",
    )
    steer_scale_up_utilisation: float = Field(
        default=1,
        gt=0,
        le=1,
        description="One more worker of a role is wanted too where more of its workers is in use: of prefill workers the share of time "
        "with prompts to compute, of decode workers that of rows or KV blocks taken. 1: it never is.",
    )
    steer_scale_up_after_s: float = Field(default=10, ge=0, le=86_400, description="Seconds for which more must have been wanted.")
    steer_scale_down_after_s: float = Field(default=120, ge=0, le=86_400, description="Seconds for which fewer must have been enough.")
    steer_cooldown_s: float = Field(
        default=60, ge=1, le=86_400, description="Seconds after a proposal of more or fewer workers before the next one."
    )
    steer_keep: str = Field(
        default="",
        max_length=65_536,
        description="Workers that scaling down leaves alone, such as those that something starts again: names with commas between, in "
        "which * stands for anything. `splitserve up` adds the workers that it starts itself.",
    )
    steer_webhook: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="Every decision of the pool controller is posted here, as JSON."
    )
    steer_command: str | None = Field(
        default=None,
        min_length=1,
        description="Starts and stops workers for --steer act: run with `up ROLE`, and with `down WORKER` once that has drained and ended.",
    )
    token_timeout_s: float = Field(
        default=120, gt=0, le=86_400, description="Longest time between two tokens, whatever fails and recovers meanwhile; then 504."
    )
    heartbeat_s: float = Field(default=0.25, ge=0.01, le=60, description="Seconds between the workers' reports.")
    dead_after_s: float = Field(default=1.5, ge=0.05, le=600, description="A worker silent for so many seconds is dead.")
    progress_timeout_s: float = Field(
        default=30, ge=0.1, le=3600, description="A busy worker that ends no step for so many seconds is dead."
    )
    max_attempts: int = Field(
        default=4,
        ge=1,
        le=100,
        description="How often in a row a request may fail on workers before it ends with an error; its handoff three times more.",
    )
    suspect_after: int = Field(
        default=2, ge=1, le=100, description="A request that ran on so many workers in a row when they died is then run apart from others."
    )
    max_deaths: int = Field(
        default=4,
        ge=1,
        le=100,
        description="A request that ran on so many workers in a row when they died ends with an error. In a row: fewer than 16 tokens came "
        "between them; that number doubles with each death after so many in all.",
    )
    allowed_hosts: str = Field(
        default="",
        max_length=65_536,
        description="Names of this server that requests may have in Host, with commas between; * in one stands for anything, alone for "
        "all. Always allowed: IP addresses, localhost, the name of this machine, --host; with --open-access on other than loopback also "
        "names without a dot or of a private domain (.svc, .cluster.local, .internal, .local, .home.arpa). Default: all where API keys are "
        "asked for, else no others.",
    )
    allowed_origins: str = Field(
        default="",
        max_length=65_536,
        description="Origins of web pages that may use the API from browsers (CORS), with commas between, such as https://app.example; * "
        "in one stands for anything, alone for all. Default: pages of this server alone.",
    )
    trusted_proxies: str = Field(
        default="",
        max_length=65_536,
        description="Addresses or networks of proxies, with commas between, whose X-Forwarded-For, X-Forwarded-Proto and Forwarded headers "
        "are believed. Default: none are.",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="Certificate in PEM, with its chain: HTTP, WebSocket and the admin port then speak TLS only. It is read again when it "
        "changes.",
    )
    tls_key: Path | None = Field(default=None, description="Private key of --tls-cert in PEM. Default: it is in that file, too.")
    admin_key_file: Path | None = Field(
        default=None,
        description="File (mode 0600) with the key that operators' pages ask for: /metrics, /debug/state, the dashboard's data, /admin. "
        "Default: a new key, in a file that the log names; commands on this host find it by themselves.",
    )
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the admin API (tenants, keys, usage, drain, metrics); 0 lets the system choose. Default: no such port, and "
        "only /admin/drain, on the HTTP server's.",
    )
    admin_host: str = Field(default="127.0.0.1", min_length=1, description="Address on which the admin API listens.")
    tenants_file: Path | None = Field(
        default=None,
        description="Tenants and API keys, made by `splitserve keys`. Default: no keys are asked for, and the HTTP server listens "
        "on this host's loopback only.",
    )
    usage_url: str | None = Field(
        default=None,
        pattern=r"^(sqlite:///|postgres(ql)?://).+$",
        description="Database for one record of each request: sqlite:///PATH or postgresql://USER@HOST/DATABASE (needs `pip install "
        "splitserve[postgres]`). Default: a SQLite file beside the tenants file, where there is one; else nothing is metered.",
    )
    usage_retention_days: float | None = Field(
        default=None, gt=0, le=36_500, description="Days after which usage records are deleted. Default: they are kept for good."
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=48,
        description="Processes that share the HTTP port; each listens to workers on a port of its own, from --control-address's on, and "
        "has its own admin port, from --admin-port's on.",
    )
    redis_url: str | None = Field(
        default=None,
        pattern=r"^rediss?://\S+$|^unix://\S+$",
        description="Redis that keeps what keys and tenants have left of their limits, for coordinators on several hosts: "
        "redis://HOST:6379/0 (needs `pip install splitserve[redis]`). Default: a file beside the tenants file, for one host.",
    )
    open_access: bool = Field(default=False, description="Without API keys, listen on --host all the same: whoever reaches it may use it.")
    batch_file: Path | None = Field(
        default=None,
        description="SQLite file of /v1/files and /v1/batches, made where it is not there; several coordinators of one host may share it. "
        "Default: no batches.",
    )
    batch_max_running: int = Field(
        default=16, ge=1, le=4096, description="Requests of batches that run at a time, behind everybody else's."
    )
    batch_retention_days: float = Field(
        default=30, gt=0, le=36_500, description="Days after which files, and batches that are over, are deleted from --batch-file."
    )
    max_body_mib: float = Field(default=16, gt=0, le=1024, description="Largest HTTP request body in MiB; beyond it 413.")
    max_held_mib: float = Field(
        default=64,
        gt=0,
        le=65_536,
        description="Bytes in MiB of all clients' request bodies that may be held at a time, and of their WebSocket messages as many "
        "again; beyond it the slowest unfinished ones are given up with 503. Half of it: large requests that wait to be read; then 429.",
    )
    max_connections: int = Field(
        default=20_000,
        ge=16,
        le=1_000_000,
        description="Most client connections, as far as the process may open so many files; beyond it idle ones are closed, and where "
        "there are none new ones are refused with 503, but for health checks.",
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="Price of one GPU for an hour, or of one worker that has none, in any currency; /metrics then says what a million "
        "output tokens cost.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        description="Send traces to this OTLP receiver over HTTP, http://HOST:4318/v1/traces; needs splitserve[otel].",
    )
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of requests that are traced, where the client does not say by its traceparent."
    )
    log_level: LogLevel = Field(default="info", description="Least level that is logged; SIGUSR2 turns debug on, and off again.")
    trace_folder: Path | None = Field(
        default=None,
        description="Write the load as a trace for `splitserve trace`, `simulate` and `plan` into this folder: arrivals, lengths and "
        "keyed block hashes, never text. One file a start.",
    )
    trace_token_times: bool = Field(
        default=False, description="With --trace-folder: write when each token came, in seconds after its request's arrival."
    )
    log_requests: bool = Field(default=False, description="Log a line for each request that is over, with where its time went.")
    log_bodies: Path | None = Field(
        default=None,
        description="Write every request for tokens and its answer into this file, as JSON lines: personal data. Mode 0600, no API keys; "
        "rotated to FILE.1. Of several coordinator processes each writes a file of its own, FILE-N.",
    )
    log_bodies_mib: float = Field(default=100, gt=0, le=1 << 20, description="Most MiB that --log-bodies keeps, rotated file included.")
    log_format: LogFormat = Field(default="text", description="text, or json: one object a line, with request ids where there are any.")

    @property
    def model_name(self) -> str:
        """The name under which the API serves the model."""
        return self.served_model_name or self.model.resolve().name

    @property
    def scheme(self) -> str:
        """Of both HTTP ports."""
        return "http" if self.tls_cert is None else "https"

    @property
    def metered_to(self) -> str | None:
        """The database for usage records; None: nothing is metered."""
        if self.usage_url is None and self.tenants_file is not None:
            return f"sqlite:///{self.tenants_file}-usage"
        return self.usage_url

    @property
    def ttft_slo_s(self) -> dict[str, float]:
        """Seconds by priority class."""
        return {name: float(seconds) for part in self.ttft_slo.split(",") if part for name, seconds in (part.split("="),)}

    @property
    def objectives(self) -> Objectives:
        """What requests may take, by --steer-slo or else --ttft-slo: for the dashboard."""
        bounds = _bounds("steer_slo", self.steer_slo)
        seconds = {name: bound.seconds for name, bound in bounds.items()}
        return Objectives(seconds.get("ttft"), seconds.get("tpot"), attainment(bounds), self.ttft_slo_s)

    @property
    def steering(self) -> SteeringOptions | None:
        """None: off."""
        if self.steer == "off":
            return None
        bounds, slow = (_bounds(name, getattr(self, name)) for name in ("steer_slo", "steer_scale_up_latency"))
        return SteeringOptions(
            bounds["ttft"].seconds,
            bounds["tpot"].seconds,
            attainment(bounds),
            self.steer,
            min_workers=self.steer_min_workers,
            max_workers=self.steer_max_workers,
            queue_depth=self.steer_queue_depth,
            scale_up_above=self.steer_scale_up_above,
            scale_up_ttft=slow.get("ttft"),
            scale_up_tpot=slow.get("tpot"),
            scale_up_utilisation=self.steer_scale_up_utilisation,
            scale_down_below=self.steer_scale_down_below,
            scale_up_after_s=self.steer_scale_up_after_s,
            scale_down_after_s=self.steer_scale_down_after_s,
            scale_cooldown_s=self.steer_cooldown_s,
            keep=tuple(filter(None, self.steer_keep.split(","))),
        )

    @property
    def listen_host(self) -> str:
        """Where the HTTP server listens: on loopback where neither keys nor --open-access allow more."""
        if self.tenants_file is not None or self.open_access or is_loopback(self.host):
            return self.host
        return "::1" if ":" in self.host else "127.0.0.1"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.key_file is None) == (not self.insecure):
            raise ValueError("give either --key-file (make one with `splitserve keygen FILE`) or --insecure, which uses no key")
        if self.max_held_mib < 2 * self.max_body_mib:
            raise ValueError(f"--max-held-mib must be at least twice --max-body-mib: {2 * self.max_body_mib:g} or more")
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(f"--dead-after-s must be at least three heartbeats: {3 * self.heartbeat_s:g} or more")
        if self.steer != "off" and not (self.steer_slo and self.steer_profile):
            raise ValueError("--steer needs to know what is good enough and how fast workers are: give --steer-slo and --steer-profile")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("--tls-key is the key of a certificate: give --tls-cert, too")
        for host in listed(self.allowed_hosts):
            if not HOST_PATTERN.fullmatch(host):
                raise ValueError(f"--allowed-hosts: {host!r} is no host's name; give it without scheme, port and path: llm.example.org")
        for origin in listed(self.allowed_origins):
            if not ORIGIN_PATTERN.fullmatch(origin):
                raise ValueError(
                    f"--allowed-origins: {origin!r} is no origin; SCHEME://HOST or SCHEME://HOST:PORT is: https://app.example.org"
                )
        for network in listed(self.trusted_proxies):
            if not _is_network(network):
                raise ValueError(f"--trusted-proxies: {network!r} is neither an address nor a network such as 10.0.0.0/8")
        _bounds("steer_scale_up_latency", self.steer_scale_up_latency)
        if self.steer_slo and set(_bounds("steer_slo", self.steer_slo)) != {"ttft", "tpot"}:
            raise ValueError("--steer-slo needs a bound for each, ttft and tpot, as in ttft=2,tpot=0.05@p90")
        if self.steer_scale_down_below >= self.steer_scale_up_above:
            raise ValueError("--steer-scale-down-below must be less than --steer-scale-up-above: else one worker would come and go")
        if self.trace_token_times and self.trace_folder is None:
            raise ValueError("--trace-token-times writes into the trace file: give --trace-folder")
        if self.steer == "act" and self.processes > 1:
            raise ValueError("one of several coordinator processes sees a part of the load only: --steer act needs --processes 1")
        return self
