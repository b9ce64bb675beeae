"""Settings of the commands that are no serving role: the local supervisor, the chat, the doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..coordinator.metrics.objectives import Objectives
from ..coordinator.settings import CoordinatorSettings
from ..loadgen.settings import ApiServer, ServerUrl
from ..steering.settings import SteeringSettings
from ..transport.latency_bounds import attainment
from ..transport.messages.fields import MAX_TEMPERATURE
from ..transport.messages.messages import Role

DEMO_MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo_model"
PEER = r"^$|^(tcp://)?([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?$"
DEMO_MODEL_NAME = "splitserve-demo"


class ServerSettings(SteeringSettings, CoordinatorSettings):
    """Takes HTTP requests and sends them to the workers. Free of torch and of the model's weights."""

    @property
    def objectives(self) -> Objectives:
        """What requests may take, by --steer-slo or else --ttft-slo, for the dashboard."""
        bounds = self.slo_bounds
        seconds = {name: bound.seconds for name, bound in bounds.items()}
        return Objectives(seconds.get("ttft"), seconds.get("tpot"), attainment(bounds), self.ttft_slo_s)

    @model_validator(mode="after")
    def _sees_all_of_the_load(self) -> Self:
        if self.steer == "act" and self.processes > 1:
            raise ValueError(
                "one of several coordinator processes sees a part of the load only: --steer act "
                "needs --processes 1"
            )
        if self.steer_command is not None and self.other_models:
            raise ValueError(
                "--steer-command is not asked for workers of one of several models: leave it out, "
                "and --steer act flips workers alone"
            )
        return self


RAY_RESOURCES = r"^ *([\w:.-]+=[0-9]+(\.[0-9]+)? *)*$"


class PoolSettings(BaseModel):
    """Further workers of a role. ``options``: settings in which they differ from the others."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    role: Literal["prefill", "decode", "mixed"]
    model: str = ""  # a name of one of the coordinator's other models; empty: the first
    count: int = Field(ge=0, le=256)
    options: dict[str, Any] = {}
    sbatch: str = ""
    ray: str = Field(default="", pattern=RAY_RESOURCES)


class UpSettings(BaseModel):
    """Starts a coordinator and its workers, on this machine or by Slurm or Ray, and keeps them running."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    on: Literal["here", "slurm", "ray"] = Field(
        default="here",
        description="On this machine, as Slurm jobs, or as actors of the Ray cluster that RAY_ADDRESS "
        "names. Elsewhere it needs --run-dir and ends when the cluster serves.",
    )
    stop: bool = Field(default=False, description="With --on slurm or ray: drain and stop all.")
    roll: bool = Field(
        default=False,
        description="With --on slurm or ray: start each process again, one at a time, with the "
        "installed build and these settings.",
    )
    sbatch: str = Field(
        default="", description="Options of sbatch for every job, such as `-p gpu -t 8:00:00`."
    )
    sbatch_prefill: str = Field(default="", description="Further ones for prefill workers, such as `-G 1`.")
    sbatch_decode: str = Field(default="", description="Further ones for decode workers.")
    ray_prefill: str = Field(
        default="",
        pattern=RAY_RESOURCES,
        description="Ray's resources that each prefill worker needs besides its CPUs and GPU, such as "
        "`accelerator_type:H100=0.001`; spaces between several.",
    )
    ray_decode: str = Field(default="", pattern=RAY_RESOURCES, description="The same for each decode worker.")

    prefill: int = Field(default=1, ge=0, le=256, description="Number of prefill workers.")
    decode: int = Field(default=1, ge=0, le=256, description="Number of decode workers.")
    mixed: int = Field(default=0, ge=0, le=256, description="Number of workers of both roles, besides.")
    pools: tuple[PoolSettings, ...] = Field(
        default=(), description="Further workers, as `splitserve plan --launch-file` writes them."
    )
    flexible: bool = Field(
        default=False,
        description="Workers can change their roles (`splitserve flip`): `prefill` and `decode` count "
        "the first roles.",
    )
    borrow: bool = Field(
        default=False, description="Workers take work of the other role where it would otherwise wait."
    )
    run_dir: Path | None = Field(
        default=None,
        description="Folder for key, settings and logs; with --on slurm a shared one. Default: a "
        "temporary one.",
    )
    ready_timeout_s: float = Field(
        default=600, gt=0, le=86_400, description="Seconds until the first answer must have been possible."
    )
    grace_s: float = Field(
        default=10,
        ge=0,
        le=600,
        description="Seconds beyond --shutdown-timeout-s before a process is killed.",
    )
    hung_after_s: float = Field(
        default=15,
        gt=0,
        le=86_400,
        description="Seconds that a worker may run after the coordinator has given it up; then it is "
        "killed and started anew.",
    )
    chat: bool = Field(
        default=False, description="When ready, start a chat in this terminal; stop everything when it ends."
    )
    prompt: str | None = Field(
        default=None,
        min_length=1,
        max_length=1 << 20,
        description="When ready, print the answer to this question and stop everything.",
    )
    api_key_file: Path | None = Field(
        default=None, description="File with the API key for --chat and --prompt, with --tenants-file."
    )


class ChatSettings(ApiServer):
    """Talks to a running server in the terminal, where Markdown is rendered; elsewhere each line of standard
    input is a question. Enter sends, Alt-Enter or a backslash before Enter begins a new line; `/system`,
    `/model`, `/tokens`, `/save FILE`, `/reset` and `/quit` are explained by `/help`."""

    system: str = Field(
        default="", max_length=1 << 20, description="System message at the start of the conversation."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Longest answer in tokens. Default: what the context leaves.",
    )
    temperature: float = Field(
        default=0,
        ge=0,
        le=MAX_TEMPERATURE,
        description="Sampling temperature; 0 always takes the likeliest token.",
    )


class AdminServer(BaseModel):
    """A coordinator's operators' pages, and how to reach them."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    url: ServerUrl = Field(
        default="http://127.0.0.1:8000",
        description="The coordinator's address; `flip` asks the admin port of one on another host, where it "
        "has one.",
    )
    admin_key_file: Path | None = Field(
        default=None,
        description="File with the coordinator's admin key. Default: found by itself for a coordinator "
        "that you run on this host.",
    )
    tls_ca: Path | None = Field(
        default=None,
        description="CA certificates in PEM for an https:// server. Default: the system's, and the "
        "certificate of a coordinator on this host.",
    )


class TopSettings(AdminServer):
    """Shows a running coordinator's workers, latencies and newest requests in this terminal; q quits."""

    show: str = Field(
        default="", max_length=256, description="Name of the model, of several. Default: the first."
    )


class FlipSettings(AdminServer):
    """Has a worker that can change its role change it, and reports how long it took."""

    to: Role = Field(description="The role that it is to have.")
    timeout_s: float | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="Seconds for what it runs; what is left then goes on elsewhere. Default: the worker's.",
    )


class DoctorSettings(BaseModel):
    """Checks whether this machine can serve, and names a remedy where it cannot."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    model: Path | None = Field(
        default=None,
        description="Model to check: folder, hub model or s3:// as of the roles. Default: the bundled "
        "demo model.",
    )
    revision: str = Field(
        default="", max_length=256, description="Branch, tag or commit of a hub model. Default: main."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address of the HTTP server.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP server.")
    control_address: str = Field(
        default="tcp://127.0.0.1:7700",
        pattern=r"^tcp://\S+:\d+$",
        description="The coordinator's control address.",
    )
    key_file: Path | None = Field(default=None, description="The cluster's key, if there is one already.")
    listen: str = Field(
        default="",
        pattern=PEER,
        description="Wait here for `doctor --peer` of another host, until Ctrl-C: HOST or HOST:PORT, such "
        "as 0.0.0.0. KV blocks come to the port after it. Default port: 7710. Needs --key-file.",
    )
    peer: str = Field(
        default="",
        pattern=PEER,
        description="Check the way to another host where `doctor --listen` runs, or a worker or coordinator: "
        "ports, key, clock, movers and "
        "bandwidth. HOST or HOST:PORT. Default port: 7710. Needs --key-file.",
    )

    @model_validator(mode="after")
    def _with_key(self) -> Self:
        if (self.listen or self.peer) and self.key_file is None:
            raise ValueError(
                "--listen and --peer need --key-file: the same key on both hosts (`splitserve "
                "keygen FILE` makes one)"
            )
        return self
