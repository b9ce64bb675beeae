"""Settings of the planner's commands."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..coordinator.lifecycle.routing import Policy as Routing
from .slo import NOTATION
from .workload.notation import LENGTHS

DRAWN = {"rate", "output", "requests", "duration_s", "seed", "workload"}  # what may be given beside a workload file

IN_THE_FILE = {  # of `splitserve simulate`: what a cluster's file says
    "prefill": "a pool with `role: prefill` and `count`",
    "decode": "a pool with `role: decode` and `count`",
    "colocated": "a pool with `role: colocated` and `count`",
    "decode_profile": "`profile` of the decode pool",
    "max_batch_tokens": "`max_batch_tokens` of a pool",
    "max_num_seqs": "`max_num_seqs` of a pool",
    "routing": "`routing`",
    "max_queue": "`max_queue`",
    "workers_per_host": "`workers_per_host`",
    "mean_seconds_between_failures": "`mean_seconds_between_failures`",
}

UNSKETCHED = (  # of `splitserve simulate`: what its sketch does nothing with
    "routing", "max_queue", "workers_per_host", "mean_seconds_between_failures", "steer", "steer_profile", "seed", "records", "plot_file",
    "html_file",
)  # fmt: skip

WORKERS_PER_HOST = (
    "Workers on one host, of both roles as evenly as can be: they slow each other as far as their profile's `contention` says. "
    "`splitserve up` starts all of its workers on one."
)


class TraceReading(BaseModel):
    """How trace files are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disorder_s: float = Field(
        default=0, ge=0, le=31_536_000, description="Rows may stand so many seconds of arrival time too late; they are put in order."
    )
    drop_empty: bool = Field(default=False, description="Leave out requests without prompt or output tokens instead of refusing the file.")


class TraceStatsSettings(TraceReading):
    """Tells what traces are like: arrivals, bursts, lengths, and how much of the prompts a prefix cache would have known."""

    json_file: Path | None = Field(default=None, description="Write the statistics to this JSON file.")
    plot_file: Path | None = Field(default=None, description="Draw arrivals, gaps and lengths of every trace into this PNG file.")


class TraceConvertSettings(TraceReading):
    """Writes traces in splitserve's own format: thins and cuts each of them, mixes them if there are several, then scales time."""

    output: Path = Field(description="The file to write; gzip'ed if its name ends in .gz.")
    start_s: float = Field(default=0, ge=0, le=1e11, description="Leave out what arrives before this second; it becomes time 0.")
    end_s: float | None = Field(default=None, gt=0, le=1e11, description="Leave out what arrives from this second on.")
    max_requests: int | None = Field(default=None, ge=1, description="At most so many requests of each file.")
    keep: float = Field(default=1, gt=0, le=1, description="Share of the requests to keep at their own times; sessions stay whole.")
    scale: float | None = Field(default=None, gt=0, le=1e6, description="Compress time by this factor: so many times the rate.")
    rate: float | None = Field(default=None, gt=0, le=1_000_000, description="Scale time to this mean rate, in requests per second.")
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="Which requests --keep keeps.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scale is not None and self.rate is not None:
            raise ValueError("--scale and --rate both set the rate: give one of them")
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError("--end-s must be after --start-s")
        return self


class TraceMakeSettings(BaseModel):
    """Draws a synthetic trace: from a fitted workload, or from the rate, burstiness, lengths and sessions given here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: Path = Field(description="The file to write; gzip'ed if its name ends in .gz.")
    requests: int | None = Field(default=None, ge=1, description="Stop after so many requests.")
    duration_s: float | None = Field(default=None, gt=0, le=1e9, description="Stop after so many seconds. This or --requests is needed.")
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="The same workload and seed give the same trace.")
    workload: Path | None = Field(default=None, description="Workload file as written by splitserve trace fit. Only --rate changes it.")
    rate: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Mean requests per second, all turns counted. Default: 1, or the workload's."
    )
    burstiness: float = Field(
        default=1, ge=0, le=1000, description="Coefficient of variation of the (gamma) gaps between arrivals; 1: Poisson, 0: even."
    )
    diurnal_amplitude: float = Field(default=0, ge=0, le=1, description="The rate swings by this share of itself, as a sine.")
    diurnal_period_s: float = Field(default=86_400, gt=0, le=1e9, description="Seconds of one swing.")
    prompt_len: str = Field(
        default="lognormal:512,1",
        pattern=LENGTHS,
        description="Prompt tokens (in sessions: a turn's new ones): N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA.",
    )
    output_len: str = Field(default="lognormal:128,1", pattern=LENGTHS, description="Output tokens, in the same notation.")
    length_correlation: float = Field(default=0, ge=-1, le=1, description="Of prompt and output lengths (Gaussian copula).")
    turns: float = Field(default=1, ge=1, le=10_000, description="Mean turns of a session; each turn's prompt holds the turns before it.")
    think_s: float = Field(default=30, ge=0, le=1e6, description="Mean seconds from the arrival of a turn to the next's.")
    system_prompts: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="System prompts that sessions share; the k-th is used 1/k as often as the first.",
    )
    system_prompt_len: int = Field(default=512, ge=1, le=1 << 20, description="Tokens of each of them.")
    block_size: int = Field(default=16, ge=1, le=1 << 16, description="Tokens of a block, of which sessions have hashes.")
    max_len: int = Field(default=1 << 20, ge=2, le=1 << 20, description="Sessions end before prompt and output are longer than this.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.requests is None and self.duration_s is None:
            raise ValueError("--requests or --duration-s is needed: else the trace would have no end")
        fixed = sorted(self.model_fields_set - DRAWN)
        if self.workload is not None and fixed:
            flag = "--" + fixed[0].replace("_", "-")
            raise ValueError(f"{flag} cannot be given with --workload, whose file says it")
        if self.system_prompts and self.system_prompt_len + 2 > self.max_len:
            raise ValueError("--max-len must leave room for two tokens after --system-prompt-len")
        return self


class TraceFitSettings(TraceReading):
    """Fits a workload to a trace, and shows beside the trace what is drawn from it."""

    output: Path = Field(description="The workload file (JSON) to write, for splitserve trace make --workload.")
    step_s: float = Field(
        default=10,
        gt=0,
        le=1e9,
        description="Seconds of one step of the rate over time. Short steps repeat bursts where they were, long ones leave them to chance.",
    )
    plot_file: Path | None = Field(default=None, description="Draw the trace and what is drawn from its fit into this PNG file.")
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="Seed of what is shown beside the trace.")


class ProfileSettings(BaseModel):
    """Measures how long a worker's steps take on this machine, or imports published measurements, and writes a profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: Path = Field(default=Path("profile.json"), description="The profile to write.")
    name: str = Field(default="", max_length=200, description="What the profile is called. Default: by model and device.")
    hardware: str = Field(default="", max_length=200, description="The hardware: for people, or which one to take of published data.")
    plot_file: Path | None = Field(default=None, description="With --model: draw the fit against the measured points into this PNG file.")
    model: Path | None = Field(default=None, description="Checkpoint folder to measure. This or --published is needed.")
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N. auto: a GPU if there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and KV cache, as the workers' option."
    )
    kv_dtype: Literal["auto", "fp8"] = Field(default="auto", description="Type of the KV cache, as the workers' option.")
    quantization: Literal["none", "fp8"] = Field(default="none", description="Of linear layers, as the workers' option.")
    block_size: int = Field(default=0, ge=0, le=4096, description="Tokens per KV block. 0: 16 on CPUs, 64 on GPUs.")
    num_blocks: int | None = Field(default=None, ge=2, le=1 << 24, description="Blocks in the KV cache.")
    kv_cache_gib: float | None = Field(
        default=None, gt=0, le=65_536, description="Size of the KV cache in GiB, as the workers will have it."
    )
    max_model_len: int | None = Field(default=None, ge=1, le=1 << 20, description="Most tokens of prompt and output together.")
    exact: bool = Field(default=False, description="Measure the batch-invariant kernels.")
    threads: int = Field(default=1, ge=1, le=1024, description="CPU threads for computing.")
    runner: str = Field(default="model", pattern=r"^(model|paced:.+)$", description="As the workers' option: what is measured.")
    max_batch_tokens: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="Largest prefill step that is measured. As the prefill workers' option, whose default on GPUs is 2048.",
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="Largest decode batch that is measured.")
    precision: float = Field(
        default=0.02, gt=0, le=1, description="A step is measured until its time is known to this share of itself (95%)."
    )
    budget_s: float = Field(
        default=180, gt=0, le=86_400, description="Seconds after which measuring stops, however well the times are known."
    )
    contention_s: float = Field(
        default=120,
        ge=0,
        le=86_400,
        description="On CPUs: seconds after which measuring ends how much slower steps get while another worker of this host computes, a "
        "process of its own. 0: it is not measured.",
    )
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="Order of the steps, and which ones test the fit.")
    published: Path | None = Field(
        default=None,
        description="Import instead: splitwise-sim's perf_model.csv, or a DistServe profile (with max_num_tokens.csv beside it).",
    )
    published_model: str = Field(default="llama2-70b", max_length=200, description="With --published: which model of it.")
    tensor_parallel: int = Field(default=8, ge=1, le=1024, description="With --published: GPUs that one worker spans.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.published is None):
            raise ValueError("give --model to measure, or --published to import")
        if self.published is not None and self.plot_file is not None:
            raise ValueError("--plot-file draws measured points, and what is imported has none here: leave it out, or give --model")
        return self


class SimulateSettings(BaseModel):
    """Runs a trace through a cluster under virtual time: the real schedulers and protocols, with profiled times in place of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path = Field(description="The requests: any trace that `splitserve trace` reads.")
    rate: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Scale the trace's time to this mean rate, requests per second."
    )
    duration_s: float | None = Field(default=None, gt=0, le=1e9, description="Only the trace's first so many seconds, before scaling.")
    cluster: Path | None = Field(default=None, description="YAML file that describes the cluster (docs/planning.md). This or --profile.")
    profile: Path | None = Field(default=None, description="Profile of the workers, as written by `splitserve profile`.")
    decode_profile: Path | None = Field(default=None, description="Profile of the decode workers, where they are other hardware.")
    prefill: int = Field(default=0, ge=0, le=100_000, description="Prefill workers.")
    decode: int = Field(default=0, ge=0, le=100_000, description="Decode workers.")
    colocated: int = Field(default=0, ge=0, le=100_000, description="Workers of both roles, as `splitserve up --mixed` starts them.")
    max_batch_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="As the prefill workers' option, whose default on GPUs is 2048."
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="As the decode workers' option.")
    routing: Routing = Field(default="hybrid", description="As the coordinator's option.")
    max_queue: int = Field(default=1024, ge=0, le=1_000_000, description="As the coordinator's option.")
    workers_per_host: int = Field(default=1, ge=1, le=100_000, description=WORKERS_PER_HOST)
    mean_seconds_between_failures: float = Field(
        default=inf, gt=0, description="Of each worker; it starts again after the profile's start time. inf: none fails."
    )
    slo: str = Field(
        default="",
        pattern=NOTATION,
        description="Bounds in seconds that make a request good: ttft=0.5,tpot=0.05; e2e is known as well. With ttft=0.5@p90 it is also "
        "said whether so many of a hundred were.",
    )
    sketch: bool = Field(
        default=False,
        description="Only sketch it, thirty times as fast or more: prompts queue, sequences share a device, and nothing else is there. For "
        "very many requests, or a first look.",
    )
    steer: bool = Field(
        default=False,
        description="Let the pool controller change the roles of flexible workers, as the coordinator's `--steer act`: with --profile all "
        "prefill and decode workers, with --cluster those of pools with `flexible: true`. Its objectives are those of --slo. It tells of "
        "its changes, and what they brought beside a second run without.",
    )
    steer_profile: Path | None = Field(
        default=None, description="With --steer: the profile by which the controller predicts. Default: that of the workers themselves."
    )
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="The same cluster, trace and seed give the same results.")
    records: Path | None = Field(default=None, description="Write one row for each request to this CSV file; gzip'ed if it ends in .gz.")
    json_file: Path | None = Field(default=None, description="Write the results to this JSON file.")
    plot_file: Path | None = Field(default=None, description="Draw the timeline into this PNG file.")
    html_file: Path | None = Field(default=None, description="Write a page to scrub through: every worker's KV cache and queue over time.")

    @model_validator(mode="after")
    def _one_cluster(self) -> Self:
        if (self.cluster is None) == (self.profile is None):
            raise ValueError("give --cluster, or --profile with numbers of workers")
        if self.steer_profile is not None and not self.steer:
            raise ValueError("--steer-profile is for --steer: give that too")
        for name in UNSKETCHED if self.sketch else ():
            if name in self.model_fields_set:
                raise ValueError(f"--{name.replace('_', '-')} means nothing to --sketch: leave one of them out")
        for name, place in IN_THE_FILE.items() if self.cluster is not None else ():
            if name in self.model_fields_set:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} cannot be given with --cluster, whose file says it: write it there, as {place}")
        return self


class PlanSettings(BaseModel):
    """Finds out how many prefill and decode workers, of which kind and with which options, serve a load best, by simulating it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path = Field(description="The requests to plan for: any trace that `splitserve trace` reads.")
    profile: Path | None = Field(default=None, description="Profile of a worker, as written by `splitserve profile`. This or --hardware.")
    hardware: Path | None = Field(
        default=None, description="YAML file with several kinds of workers: profiles, prices, watts (docs/planning.md)."
    )
    gpus: int = Field(ge=2, le=4096, description="Most GPUs that may be used.")
    gpus_per_worker: int | None = Field(
        default=None, ge=1, le=1024, description="With --profile: GPUs that one profiled worker spans. Default: what the profile says."
    )
    slo: str = Field(
        pattern=NOTATION.removeprefix("^$|"),
        description="Bounds in seconds, and which share of the requests must meet all of them at once: ttft=0.5@p90,tpot=0.05@p90. Of "
        "different shares the largest holds for all.",
    )
    objective: Literal["goodput", "cost", "energy"] = Field(
        default="goodput",
        description="goodput: the highest rate; cost, energy: what serves --rate for the lowest price or energy.",
    )
    rate: float | None = Field(
        default=None, gt=0, le=1_000_000, description="For cost and energy: requests per second to serve. Default: the trace's own rate."
    )
    max_price_per_hour: float | None = Field(default=None, gt=0, description="Highest price of all workers together.")
    max_watts: float | None = Field(default=None, gt=0, description="Highest power of all workers together, each at what its role draws.")
    workers_per_host: int = Field(default=1, ge=1, le=100_000, description=WORKERS_PER_HOST)
    requests: int = Field(
        default=1000,
        ge=20,
        le=10_000_000,
        description="Plan on the trace's first so many requests: it takes time in proportion, and says where so few cannot tell.",
    )
    chunk_budgets: str = Field(
        default="512,2048", pattern=r"^[1-9]\d{0,6}(,[1-9]\d{0,6})*$", description="Prompt tokens in a step to choose from, with commas."
    )
    jobs: int | None = Field(default=None, ge=1, le=1024, description="Processes that simulate. Default: one a core.")
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="Of the simulations' noise.")
    json_file: Path | None = Field(default=None, description="Write the plan to this JSON file.")
    plot_file: Path | None = Field(
        default=None,
        description="Draw goodput over ratio, attainment over rate, utilisation, and size against latency into this PNG file.",
    )
    launch_file: Path | None = Field(default=None, description="Write the configuration for `splitserve up --config` to this YAML file.")

    @property
    def chunks(self) -> tuple[int, ...]:
        """The budgets, each once."""
        return tuple(sorted({int(one) for one in self.chunk_budgets.split(",")}))

    @model_validator(mode="after")
    def _one_hardware(self) -> Self:
        if (self.profile is None) == (self.hardware is None):
            raise ValueError("give --profile, or --hardware for several kinds of workers")
        if self.hardware is not None and self.gpus_per_worker is not None:
            raise ValueError("--gpus-per-worker stands in the file of --hardware")
        if self.rate is not None and self.objective == "goodput":
            raise ValueError("--rate is for --objective cost or energy; goodput finds the rate")
        return self
