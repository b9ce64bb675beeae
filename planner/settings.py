"""Settings of `splitserve profile`, `simulate` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..engine.settings import ComputeSettings
from .search.hardware_file import ModelLoad
from .simulator.slo import NOTATION

IN_THE_FILE = {  # options of `splitserve simulate` that a cluster's file replaces
    "prefill": "a pool with `role: prefill` and `count`",
    "decode": "a pool with `role: decode` and `count`",
    "colocated": "a pool with `role: colocated` and `count`",
    "max_batch_tokens": "`max_batch_tokens` of a pool",
    "max_num_seqs": "`max_num_seqs` of a pool",
}

UNSKETCHED = (  # of `splitserve simulate`: what its sketch does nothing with
    "steer", "steer_profile", "seed", "records", "plot_file", "html_file",
)  # fmt: skip

WORKERS_PER_HOST = (
    "Workers on one host, which slow each other by their profile's `contention`. `splitserve up` starts all "
    "workers on one."
)


class ProfileSettings(ComputeSettings):
    """Measures how long a worker's steps take on this machine, or imports published measurements, and writes
    a profile."""

    output: Path = Field(default=Path("profile.json"), description="The profile to write.")
    name: str = Field(
        default="", max_length=200, description="What the profile is called. Default: by model and device."
    )
    hardware: str = Field(
        default="",
        max_length=200,
        description="The hardware: for people, or which one to take of published data.",
    )
    plot_file: Path | None = Field(
        default=None, description="With --model: draw the fit against the measured points into this PNG file."
    )
    model: Path | None = Field(
        default=None, description="Checkpoint folder to measure. This or --published is needed."
    )
    max_batch_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="Largest prefill step that is measured."
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=65_536, description="Largest decode batch that is measured."
    )
    budget_s: float = Field(
        default=180,
        gt=0,
        le=86_400,
        description="Seconds after which measuring stops, however well the times are known.",
    )
    contention_s: float = Field(
        default=120,
        ge=0,
        le=86_400,
        description="On CPUs: seconds for measuring how much another worker of this host slows steps. 0: not "
        "measured.",
    )
    published: Path | None = Field(
        default=None,
        description="Import instead: splitwise-sim's perf_model.csv, or a DistServe profile (with "
        "max_num_tokens.csv beside it); with --like also steps or benchmarks of a server (docs/planning.md).",
    )
    like: Path | None = Field(
        default=None,
        description="With --published: profile of the same model on like workers, for what the file lacks; "
        "how far steps are from it is printed.",
    )
    published_model: str = Field(
        default="llama2-70b", max_length=200, description="With --published: which model of it."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.published is None):
            raise ValueError("give --model to measure, or --published to import")
        if self.like is not None and self.published is None:
            raise ValueError("--like is for --published: give a file to import too")
        if self.published is not None and self.plot_file is not None:
            raise ValueError("--plot-file draws measured points: leave it out, or give --model")
        return self


class SimulateSettings(BaseModel):
    """Runs a trace through a cluster under virtual time: the real schedulers and protocols, with profiled
    times in place of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path = Field(description="The requests: any trace that `splitserve trace` reads.")
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Scale the trace's time to this mean rate, requests per second.",
    )
    duration_s: float | None = Field(
        default=None, gt=0, le=1e9, description="Seconds of the trace to use, before scaling."
    )
    cluster: Path | None = Field(
        default=None,
        description="YAML file that describes the cluster (docs/planning.md). This or --profile.",
    )
    profile: Path | None = Field(
        default=None,
        description="Profile of the workers: a file, or a name such as llama-3.1-70b-fp8@8xh100.",
    )
    prefill: int = Field(default=0, ge=0, le=100_000, description="Number of prefill workers.")
    decode: int = Field(default=0, ge=0, le=100_000, description="Number of decode workers.")
    colocated: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Workers of both roles, as `splitserve up --mixed` starts them.",
    )
    max_batch_tokens: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="As the prefill workers' option, whose default on GPUs is 2048.",
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="As the decode workers' option.")
    slo: str = Field(
        default="",
        pattern=NOTATION,
        description="Bounds in seconds that make a request good: ttft=0.5,tpot=0.05, also tpot_all, e2e. "
        "ttft=0.5@p90: the report states whether that share was good. By percentile and relative ones: see "
        "docs/choosing_a_ratio.md.",
    )
    sketch: bool = Field(
        default=False,
        description="Only sketch it, about ten times as fast: the coordinator decides as it does live, "
        "workers are formulas.",
    )
    steer: bool = Field(
        default=False,
        description="Let the pool controller change the roles of flexible workers, with the objectives of "
        "--slo. The report compares a run without.",
    )
    steer_profile: Path | None = Field(
        default=None,
        description="With --steer: the profile that the controller predicts with. Default: that of the "
        "workers.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=4_294_967_295,
        description="The same cluster, trace and seed give the same results.",
    )
    records: Path | None = Field(
        default=None,
        description="Write one row for each request to this CSV file; gzip'ed if it ends in .gz.",
    )
    json_file: Path | None = Field(default=None, description="Write the results to this JSON file.")
    plot_file: Path | None = Field(default=None, description="Draw the timeline into this PNG file.")
    html_file: Path | None = Field(
        default=None,
        description="Write a page to scrub through: every worker's KV cache and queue over time.",
    )

    @model_validator(mode="after")
    def _one_cluster(self) -> Self:
        if (self.cluster is None) == (self.profile is None):
            raise ValueError("give --cluster, or --profile with numbers of workers")
        if self.steer_profile is not None and not self.steer:
            raise ValueError("--steer-profile is for --steer: give that too")
        for name in UNSKETCHED if self.sketch else ():
            if name in self.model_fields_set:
                raise ValueError(
                    f"--{name.replace('_', '-')} means nothing to --sketch: leave one of them out"
                )
        for name, place in IN_THE_FILE.items() if self.cluster is not None else ():
            if name in self.model_fields_set:
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"{flag} cannot be given with --cluster, whose file says it: write it there, as {place}"
                )
        return self


class PlanSettings(BaseModel):
    """Finds out how many prefill and decode workers, of which kind and with which options, serve a load best,
    by simulating it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path = Field(description="The requests to plan for: any trace that `splitserve trace` reads.")
    profile: Path | None = Field(
        default=None,
        description="Profile of a worker: a file, or a name such as llama-3.1-70b-fp8@8xh100; or some with "
        "commas, to choose from. This or --hardware.",
    )
    hardware: Path | None = Field(
        default=None,
        description="YAML file with several kinds of workers: profiles, prices, watts (docs/planning.md).",
    )
    inventory: str | None = Field(
        default=None,
        pattern=r"^[1-9]\d*x\w+(:\d+(\.\d+)?)?([ ,]+[1-9]\d*x\w+(:\d+(\.\d+)?)?)*$",
        description="GPUs that there are, such as '16xh100:2.5 8xa100' (2.5 an hour each), with --profile "
        "naming only models (llama-3.1-70b-fp8): every degree of tensor parallelism that fits is tried.",
    )
    other_models: tuple[ModelLoad, ...] = Field((), description="Further models that share --inventory.")
    gpus: int | None = Field(
        default=None, ge=2, le=4096, description="Most GPUs that may be used. Default: all of --inventory."
    )
    gpus_per_worker: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="With --profile: GPUs that one profiled worker spans. Default: the profile's.",
    )
    slo: str = Field(
        pattern=NOTATION.removeprefix("^$|"),
        description="Bounds in seconds, and the share of requests that must meet all of them: "
        "ttft=0.5@p90,tpot=0.05@p90. The largest share holds for all. By percentile: "
        "ttft=0.5@p50,ttft=2@p99; relative to a request alone: ttft=2x@p50,of=PROFILE.",
    )
    objective: Literal["goodput", "cost", "energy"] = Field(
        default="goodput",
        description="goodput: the highest rate; cost, energy: what serves --rate for the lowest price or "
        "energy.",
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="For cost and energy: requests per second to serve. Default: the trace's own rate.",
    )
    max_price_per_hour: float | None = Field(
        default=None, gt=0, description="Highest price of all workers together."
    )
    max_watts: float | None = Field(
        default=None, gt=0, description="Highest power of all workers together, each at what its role draws."
    )
    workers_per_host: int = Field(default=1, ge=1, le=100_000, description=WORKERS_PER_HOST)
    requests: int | None = Field(
        default=None,
        ge=20,
        le=10_000_000,
        description="Number of the trace's requests to plan on. Default: until more do not change the "
        "goodput, at most 4,000.",
    )
    chunk_budgets: str = Field(
        default="512,2048",
        pattern=r"^[1-9]\d{0,5}(,[1-9]\d{0,5})*$",
        description="Prompt tokens in a step to choose from, with commas.",
    )
    jobs: int | None = Field(
        default=None, ge=1, le=1024, description="Processes that simulate. Default: one a core."
    )
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="Of the simulations' noise.")
    json_file: Path | None = Field(default=None, description="Write the plan to this JSON file.")
    plot_file: Path | None = Field(
        default=None,
        description="Draw goodput over ratio, attainment over rate, utilisation, and size against latency "
        "into this PNG file.",
    )
    launch_file: Path | None = Field(
        default=None, description="Write the configuration for `splitserve up --config` to this YAML file."
    )

    @property
    def chunks(self) -> tuple[int, ...]:
        """The budgets, each once."""
        return tuple(sorted({int(one) for one in self.chunk_budgets.split(",")}))

    @model_validator(mode="after")
    def _one_hardware(self) -> Self:
        if (self.profile is None) == (self.hardware is None):
            raise ValueError("give --profile, or --hardware for several kinds of workers")
        if self.inventory is None and self.gpus is None:
            raise ValueError("give --gpus, or --inventory with the GPUs that there are")
        if self.inventory is not None and (self.profile is None or "@" in str(self.profile)):
            raise ValueError(
                "--inventory names the GPUs and --profile only the model: "
                "--profile llama-3.1-70b-fp8 --inventory 16xh100"
            )
        if self.other_models and (self.inventory is None or self.objective != "goodput"):
            raise ValueError("several models share an --inventory, for the highest goodput")
        if (self.hardware or self.inventory) and self.gpus_per_worker is not None:
            raise ValueError("--gpus-per-worker: --hardware's file says it, --inventory tries 1, 2, 4 and 8")
        if self.rate is not None and self.objective == "goodput":
            raise ValueError("--rate is for --objective cost or energy; goodput finds the rate")
        return self
