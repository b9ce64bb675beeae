"""Settings of the load generator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..traces.workload.notation import LENGTHS

SAID_BY_TRACE = {"rate", "prompt_len", "output_len", "shared_prefix_len", "num_prefixes", "prompts"}


def _root(url: str) -> str:
    """Return a server's address without the end that clients of the API give. Raises ValueError."""
    _ = urlsplit(url).port
    return url.rstrip("/").removesuffix("/v1")


ServerUrl = Annotated[str, Field(pattern=r"^https?://\S+$"), AfterValidator(_root)]


class ApiServer(BaseModel):
    """An OpenAI-compatible server, and how to reach it."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    url: ServerUrl = Field(default="http://127.0.0.1:8000", description="The server's address.")
    served_model_name: str = Field(
        default="", max_length=256, description="Model to ask for. Default: the first that the server lists."
    )
    api_key_file: Path | None = Field(
        default=None, description="File with the API key, where the server asks for one."
    )
    tls_ca: Path | None = Field(
        default=None,
        description="CA certificates in PEM for an https:// server. Default: the system's, and the "
        "certificate of a coordinator on this host.",
    )


class LoadSettings(ApiServer):
    """Sends requests to an OpenAI-compatible server and measures what its clients see."""

    requests: int = Field(
        default=100,
        ge=1,
        le=10_000_000,
        description="Requests to send and measure; with --trace at most this many, if given.",
    )
    trace: Path | None = Field(
        default=None,
        description="Replay this trace: its arrivals and lengths, with equal tokens for equal block hashes.",
    )
    warmup: int = Field(
        default=2, ge=0, le=100_000, description="Unmeasured requests that are sent first, one at a time."
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Requests open at any time. Default: 8, or no limit with --rate or --trace.",
    )
    rate: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Requests per second, arriving as a Poisson process."
    )
    prompt_len: str = Field(
        default="256",
        pattern=LENGTHS,
        description="Prompt tokens: N, uniform:LOW,HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA.",
    )
    output_len: str = Field(default="64", pattern=LENGTHS, description="Output tokens, in the same notation.")
    max_len: int = Field(
        default=1 << 20,
        ge=2,
        le=1 << 20,
        description="Most tokens of prompt and output together; longer ones are cut.",
    )
    shared_prefix_len: int = Field(
        default=0, ge=0, le=1 << 20, description="Leading prompt tokens that many requests share."
    )
    num_prefixes: int = Field(
        default=1, ge=1, le=1_000_000, description="Number of different shared prefixes."
    )
    prompts: Literal["ids", "text"] = Field(
        default="ids", description="Random token ids, or random words (lengths are then approximate)."
    )
    vocab_size: int = Field(
        default=1000, ge=16, le=1 << 24, description="Token ids are drawn from 10 up to this."
    )
    ignore_eos: bool = Field(default=True, description="Ask for exactly the drawn number of output tokens.")
    seed: int = Field(
        default=0, ge=0, le=4_294_967_295, description="Seed of lengths, prompts and arrival times."
    )
    timeout_s: float = Field(
        default=600, gt=0, le=86_400, description="Seconds until a request counts as failed."
    )
    slo: str = Field(
        default="",
        pattern=r"^$|^((ttft|tpot|itl|e2e)=\d+(\.\d+)?)(,(ttft|tpot|itl|e2e)=\d+(\.\d+)?)*$",
        description="Objectives in seconds for goodput, such as ttft=0.5,tpot=0.05 (itl: the request's "
        "longest gap).",
    )
    json_file: Path | None = Field(
        default=None, description="Write the results and every request's times to this JSON file."
    )
    plot_file: Path | None = Field(default=None, description="Draw the latencies into this PNG file.")

    @property
    def open_requests(self) -> int | None:
        """Limit on requests in flight; None: no limit."""
        return self.concurrency or (None if self.is_open else 8)

    @property
    def is_open(self) -> bool:
        """Requests come at times of their own, whether or not the server keeps up."""
        return self.rate is not None or self.trace is not None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shared_prefix_len >= self.max_len:
            raise ValueError("--shared-prefix-len must be below --max-len")
        given = sorted(self.model_fields_set & SAID_BY_TRACE)
        if self.trace is not None and given:
            raise ValueError(f"--{given[0].replace('_', '-')} cannot be given with --trace, which says it")
        return self
