"""The coordinator's settings: frozen, checked once; ``cli/config.py`` fills them from flags, environment and
file."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..transport.process.settings import ClusterKeySettings
from .chat_output.style import ReasoningOption, ToolParserOption
from .http.access.url import is_loopback, listed
from .http.settings import HttpSettings
from .images.hosts import ImageHosts
from .lifecycle.limits import LifecycleLimits
from .metrics.objectives import Objectives
from .metrics.settings import RecordSettings
from .tenants.settings import REDIS_URL, SQLITE, TenantSettings

Routing = Literal["hybrid", "round_robin", "least_loaded", "prefix", "sticky"]
CONTROL_ADDRESS = r"^tcp://[^\s:]+:\d+$|^tcp://\[[0-9a-fA-F:.]+\]:\d+$"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
NAMES = "^[^,]{1,256}(,[^,]{1,256})*$"
_CLASS_SECONDS = r"(premium|standard|free|batch)=\d+(\.\d+)?"


class ModelSettings(BaseModel):
    """One model, and where its workers are."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    model: Path = Field(
        description="Checkpoint folder, a model of the hub such as Qwen/Qwen3-0.6B, a GGUF file (needs "
        "splitserve[gguf]), or s3://BUCKET/PREFIX (needs splitserve[s3]). Only its config, "
        "tokenizer and chat template are read."
    )
    revision: str = Field(
        default="", max_length=256, description="Branch, tag or commit of a hub model. Default: main."
    )
    served_model_name: str = Field(
        default="",
        max_length=4096,
        pattern=rf"^$|{NAMES}",
        description="Model name in the API; after commas further names. Default: the name of the "
        "model's folder.",
    )
    control_address: str = Field(
        default="tcp://127.0.0.1:7700",
        pattern=CONTROL_ADDRESS,
        description="Where workers reach the coordinator: tcp://HOST:PORT, HOST an address of this "
        "machine or 0.0.0.0.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Most tokens of prompt and output. Default: the model's, or as many as every worker "
        "holds.",
    )
    image_max_pixels: int | None = Field(
        default=None,
        ge=1,
        le=1 << 31,
        description="Most pixels of an image as the model takes it; larger ones are made smaller. Default: "
        "the checkpoint's processor decides.",
    )
    tool_call_parser: ToolParserOption = Field(
        default="auto", description="How the model writes tool calls. auto: by its chat template."
    )
    reasoning_parser: ReasoningOption = Field(
        default="auto",
        description="How an answer marks its thought, which becomes reasoning_content. auto: by the "
        "chat template.",
    )

    @property
    def model_name(self) -> str:
        """The name under which the API serves the model."""
        if self.served_model_name:
            return self.served_model_name.partition(",")[0]
        if self.model.is_dir():
            return self.model.resolve().name
        return str(self.model) if HUB_ID.fullmatch(str(self.model)) else self.model.name.removesuffix(".gguf")

    @property
    def names(self) -> list[str]:
        """All names under which the API serves the model, without adapters; answers have the first."""
        return [self.model_name, *self.served_model_name.split(",")[1:]]


class OtherModel(ModelSettings):
    """A model beside the first."""

    served_model_name: str = Field(max_length=4096, pattern=NAMES)
    control_address: str = Field(default="tcp://127.0.0.1:0", pattern=CONTROL_ADDRESS)


class CoordinatorSettings(RecordSettings, TenantSettings, HttpSettings, ClusterKeySettings, ModelSettings):
    """Takes HTTP requests and sends them to the workers. Free of torch and of the model's weights."""

    other_models: tuple[OtherModel, ...] = Field(
        default=(),
        max_length=64,
        description="Further models, each with workers of its own: a list of `model`, `served_model_name`, "
        "`control_address` (port 0: any) and, where wanted, `revision`, `max_model_len`, "
        "`image_max_pixels`, `tool_call_parser`, `reasoning_parser`.",
    )
    routes_file: Path | None = Field(
        default=None,
        description="YAML file of routes: names that stand for shares of several models, with fallbacks and "
        "shadows. It is read again when it changes.",
    )
    trust_request_chat_template: bool = Field(
        default=False, description="Requests may bring their own chat_template, which runs in a sandbox."
    )
    ollama: bool = Field(default=False, description="Speak Ollama's API too.")
    routing: Routing = Field(default="hybrid", description="How workers are chosen for a request.")
    max_queue: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="Requests that may wait for a worker; more are refused with 429.",
    )
    queue_timeout_s: float = Field(
        default=300, gt=0, le=86_400, description="Longest wait for a worker with room, each time; then 504."
    )
    min_pull_tokens: int = Field(
        default=128,
        ge=0,
        le=1 << 20,
        description="A prefill worker gets KV blocks that another worker has cached if they hold this "
        "many prompt tokens; fewer are computed. 0: all are.",
    )
    prefill_timeout_s: float = Field(
        default=300, gt=0, le=86_400, description="Longest time to compute a prompt; then 504."
    )
    ttft_slo: str = Field(
        default="",
        pattern=rf"^$|^{_CLASS_SECONDS}(,{_CLASS_SECONDS})*$",
        description="Seconds to the first token by priority class, such as premium=0.5,standard=2: a "
        "request that would take longer gets 429 at once.",
    )
    heartbeat_s: float = Field(
        default=0.25, ge=0.01, le=60, description="Seconds between the workers' reports."
    )
    dead_after_s: float = Field(
        default=1.5, ge=0.05, le=600, description="Seconds of silence after which a worker is dead."
    )
    progress_timeout_s: float = Field(
        default=30,
        ge=0.1,
        le=3600,
        description="Seconds without a finished step after which a busy worker is dead.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=48,
        description="Processes that share the HTTP port; their control and admin ports are counted from "
        "the given ones.",
    )
    batch_file: Path | None = Field(
        default=None,
        description="SQLite file of /v1/files and /v1/batches; coordinators of one host may share it. "
        "Default: no batches.",
    )
    responses_file: str | None = Field(
        default=None,
        min_length=1,
        description="SQLite file of stored /v1/responses; for several hosts redis://HOST:6379/0. "
        "Default: a temporary file.",
    )
    retention_days: float = Field(
        default=30,
        gt=0,
        le=36_500,
        description="Days after which stored responses, files and ended batches are deleted.",
    )

    @property
    def ttft_slo_s(self) -> dict[str, float]:
        """Seconds by priority class."""
        return {
            name: float(seconds)
            for part in self.ttft_slo.split(",")
            if part
            for name, seconds in (part.split("="),)
        }

    @property
    def objectives(self) -> Objectives:
        """What requests may take, for the dashboard."""
        return Objectives(ttft_by_class=self.ttft_slo_s)

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that the coordinator writes to, by option."""
        usage = self.metered_to or ""
        files = {
            "--tenants-file": self.tenants_file,
            "--usage-url": Path(usage.removeprefix(SQLITE)) if usage.startswith(SQLITE) else None,
            "--batch-file": self.batch_file,
            "--responses-file": self._responses_path,
            "--log-bodies": self.log_bodies,
        }
        folders = {option: path.absolute().parent for option, path in files.items() if path is not None}
        if self.trace_folder is None:
            return folders
        return {**folders, "--trace-folder": self.trace_folder.absolute()}

    @property
    def counted_files(self) -> dict[str, Path]:
        """The SQLite files that count each tenant's stored bytes, by their contents."""
        files = {"files": self.batch_file, "responses": self._responses_path}
        return {what: path for what, path in files.items() if path is not None}

    @property
    def _responses_path(self) -> Path | None:
        where = self.responses_file
        return None if where is None or re.match(REDIS_URL, where) else Path(where)

    @property
    def image_hosts(self) -> ImageHosts | None:
        """Hosts that images are fetched from. Raises ValueError."""
        return ImageHosts(found) if (found := listed(self.image_domains)) else None

    def lifecycle_limits(self, siblings: tuple[str, ...]) -> LifecycleLimits:
        """The lifecycle's bounds; ``siblings``: where the other coordinator processes of this host listen to
        workers."""
        return LifecycleLimits(
            max_queue=self.max_queue,
            dead_after_s=self.dead_after_s,
            progress_timeout_s=self.progress_timeout_s,
            heartbeat_s=self.heartbeat_s,
            lost_after_s=max(1.0, 4 * self.heartbeat_s),
            queue_timeout_s=self.queue_timeout_s,
            prefill_timeout_s=self.prefill_timeout_s,
            ttft_slo_s=self.ttft_slo_s,
            min_pull_tokens=self.min_pull_tokens,
            siblings=siblings,
        )

    @property
    def listen_host(self) -> str:
        """The HTTP server's host: loopback, unless API keys or --open-access allow --host."""
        if self.tenants_file is not None or self.open_access or is_loopback(self.host):
            return self.host
        return "::1" if ":" in self.host else "127.0.0.1"

    def each_model(self) -> list[Self]:
        """Return the settings of each model's part of the coordinator. Traces of others have folders of their
        own."""
        models = [self]
        for other in self.other_models:
            values: dict[str, Any] = {name: getattr(other, name) for name in ModelSettings.model_fields}
            if self.trace_folder is not None:
                values["trace_folder"] = self.trace_folder / re.sub(r"/|^\.", "_", other.model_name)
            models.append(self.model_copy(update=values))
        return models

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"--dead-after-s must be at least three heartbeats: {3 * self.heartbeat_s:g} or more"
            )
        if self.redis_url is not None and self.tenants_file is None:
            raise ValueError("--redis-url keeps the limits of --tenants-file: give that, too")
        try:
            _ = self.image_hosts
        except ValueError as error:
            raise ValueError(f"--image-domains: {error}") from error
        models = self.each_model()
        names = Counter(name for one in models for name in {*one.names})
        if shared := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two models have the name {shared[0]!r}: give another by served_model_name")
        ports = [  # option, host, first port, number of ports
            ("--port", self.listen_host, self.port, 1)
        ]
        for model in models:
            control_host, _, control_port = model.control_address.removeprefix("tcp://").rpartition(":")
            option = "--control-address" if model is self else f"control_address of {model.model_name}"
            ports.append((option, control_host.strip("[]"), int(control_port), self.processes))
            if model is not self and self.processes > 1 and not int(control_port):
                raise ValueError(f"{option}: --processes {self.processes} needs a port, not 0")
        ports.append(("--admin-port", self.admin_host, self.admin_port or 0, self.processes))
        for (one, host, first, num), (other, other_host, second, more) in combinations(ports, 2):
            meet = first and second and first < second + more and second < first + num
            if meet and (host == other_host or {host, other_host} & {"0.0.0.0", "::"}):
                counted = f", counted on for --processes {self.processes}" if self.processes > 1 else ""
                raise ValueError(
                    f"{one} and {other} both take port {max(first, second)}{counted}: choose others"
                )
        return self
