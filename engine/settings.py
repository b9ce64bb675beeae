"""The settings that prefill and decode workers share: frozen, checked once."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..transport.messages.fields import MAX_ADAPTERS
from ..transport.process.settings import DNS, ClusterKeySettings, ReportSettings

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "fp8", "int8"]
Quantization = Literal["none", "fp8", "int8", "int4"]
Mover = Literal["auto", "cuda_ipc", "shm", "nccl", "nixl", "tcp"]
KV_STORE_URL = re.compile(r"(s3|gs|az)://[^/\s?#@]+(/[^\s?#]*)?")
_LIKE_A_URL = re.compile(r"[a-z0-9+]+:/|(s3|gs|az):|.*://")
CONTROL_ADDRESS = r"(?:tcp|dns)://(?:[^\s:,]+|\[[0-9a-fA-F:.]+\]):\d+"


class ComputeSettings(BaseModel):
    """The device that a model runs on, its number formats and the size of its KV cache."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N. auto: a GPU if there is one.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs of a worker, from `device` on. On CPUs: parts with `threads` threads each. "
        "Roles may differ.",
    )
    expert_parallel: bool = Field(
        default=False,
        description="Whole experts on each GPU, not a slice of each: for large steps. By itself where "
        "slices do not fit. Roles may differ.",
    )
    dtype: DType = Field(
        default="auto",
        description="Type of weights and KV cache. auto: bfloat16 on GPUs and on CPUs with AMX or "
        "AVX512-BF16; else the checkpoint's, bfloat16 or float32.",
    )
    kv_dtype: KVDType = Field(
        default="auto",
        description="Type of the KV cache, the same on all workers. auto: as dtype. int8: CPUs only. "
        "fp8: float8 (e4m3), not yet served on a GPU.",
    )
    quantization: Quantization = Field(
        default="none",
        description="Weights of linear layers, quantised as they load; the same on all workers. fp8: "
        "float8 (e4m3). Not yet served on a GPU.",
    )
    block_size: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Tokens per KV block, the same on all workers. 0: 16 on CPUs, 64 on GPUs.",
    )
    kv_cache_gib: float | None = Field(
        default=None, gt=0, le=65_536, description="Size of the KV cache in GiB. Default: by the free memory."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Most tokens of prompt and output. Default: the model's, or as many as the KV cache "
        "holds.",
    )
    exact: bool = Field(
        default=False,
        description="The same request gives the same tokens whatever shares its batch, is cached, or "
        "fails; on all workers or none.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        default=1,
        description="CPU threads for computing, 1 to 1024; auto: this worker's share of the host's free "
        "cores.",
    )
    runner: str = Field(
        default="model",
        pattern=r"^(model|paced:.+)$",
        description="model computes; paced:PROFILE.json takes the profile's time and computes nothing.",
    )


class WorkerSettings(ComputeSettings, ClusterKeySettings, ReportSettings):
    """What every worker needs to load the model, reach the coordinator and hold a KV cache."""

    role: ClassVar[str] = "worker"

    model: Path = Field(
        description="Checkpoint folder, a model of the hub such as Qwen/Qwen3-0.6B, a GGUF file (needs "
        "splitserve[gguf]), or s3://BUCKET/PREFIX (needs splitserve[s3])."
    )
    revision: str = Field(
        default="", max_length=256, description="Branch, tag or commit of a hub model. Default: main."
    )
    name: str = Field(
        default="",
        max_length=200,
        description="The worker's name, unique in the cluster. Default: role, host and process number.",
    )
    coordinator: str = Field(
        default="tcp://127.0.0.1:7700",
        pattern=rf"^{CONTROL_ADDRESS}(,{CONTROL_ADDRESS})*$",
        description="The coordinator's control address, tcp://HOST:PORT; several with commas between. "
        "dns://HOST:PORT: every address of HOST.",
    )
    num_blocks: int | None = Field(
        default=None, ge=2, le=1 << 24, description="Blocks in the KV cache; instead of kv_cache_gib."
    )
    kv_cache_shrink: bool = Field(
        default=False,
        description="If num_blocks or kv_cache_gib do not fit, start with what fits, if it holds one "
        "sequence of max_model_len.",
    )
    kv_store: str = Field(
        default="",
        description="Folder for encrypted KV blocks that the cache evicts; every worker with this "
        "folder reads them back, also after a restart. Or an object store (needs "
        "splitserve[object-store]): s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
        "az://CONTAINER/PREFIX.",
    )
    kv_store_gib: float | None = Field(
        default=None,
        gt=0,
        le=1 << 20,
        description="Size of the whole folder kv_store in GiB. Default: 10. Not for an object store.",
    )
    lora_folder: Path | None = Field(
        default=None,
        description="Folder with an adapter (LoRA) in each subfolder, as peft saves it; requests name "
        "the subfolder as their model.",
    )
    max_loras: int = Field(default=8, ge=1, le=MAX_ADAPTERS, description="Most adapters served at a time.")
    max_lora_rank: int = Field(default=16, ge=1, le=512, description="Largest rank of an adapter.")
    mtp: bool = Field(
        default=False,
        description="Load the layer by which the model itself drafts tokens (DeepSeek-V3, GLM-4.5 to 5.2, "
        "ERNIE 4.5); the same on all workers.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the GPU's whole memory for this worker. `splitserve up` divides it among "
        "workers that share a GPU.",
    )
    cpu_memory_utilization: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the host's (or container's) free memory, less weights, for the KV caches "
        "of memory_shared_by workers.",
    )
    memory_shared_by: int = Field(
        default=1, ge=1, le=4096, description="Workers on this host: each takes an equal part of the memory."
    )
    mover: Mover = Field(
        default="auto",
        description="How KV blocks travel. auto: the first that both workers have and that passes a "
        "self-test: cuda_ipc, nccl, shm, nixl, tcp.",
    )
    plaintext_kv: bool = Field(
        default=False, description="Send KV blocks between hosts in the clear; needed on both workers."
    )
    step_log: Path | None = Field(
        default=None, description="Folder for a file with each step's content and duration."
    )
    drain_timeout_s: float = Field(
        default=10,
        ge=0,
        le=3600,
        description="Seconds that a draining worker gets to finish or move its sequences.",
    )
    orphaned_after_s: float = Field(
        default=10,
        ge=1,
        le=3600,
        description="Seconds without a message of the coordinator after which a worker frees its requests.",
    )

    health_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="HTTP port for probes, on all addresses: GET /health, /ready. Default: none.",
    )

    @property
    def coordinators(self) -> list[str]:
        """The control addresses that do not change."""
        return [one for one in self.coordinator.split(",") if one not in self.coordinator_names]

    @property
    def coordinator_names(self) -> list[str]:
        """The names that stand for the addresses of any number of coordinators."""
        return [one for one in self.coordinator.split(",") if one.startswith(DNS)]

    @property
    def worker_id(self) -> str:
        """``name``, or one that is unique among running processes."""
        return self.name or f"{self.role}-{socket.gethostname()}-{os.getpid()}"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mover in ("nccl", "nixl") and not (self.plaintext_kv or self.insecure):
            raise ValueError(
                f"the mover {self.mover} sends KV blocks in the clear: set --plaintext-kv in a network that "
                "you trust, or choose tcp"
            )
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            raise ValueError("--num-blocks and --kv-cache-gib both size the KV cache: give one")
        if self.mtp and self.runner != "model":
            raise ValueError("--mtp needs --runner model: a paced worker computes nothing")
        if self.lora_folder is not None and self.runner != "model":
            raise ValueError("--lora-folder needs --runner model: a paced worker computes nothing")
        if _LIKE_A_URL.match(self.kv_store):
            self._require_object_store()
        return self

    def _require_object_store(self) -> None:
        if not KV_STORE_URL.fullmatch(self.kv_store):
            raise ValueError(
                "--kv-store: of URLs only s3://BUCKET/PREFIX, gs://BUCKET/PREFIX and "
                "az://CONTAINER/PREFIX are taken, with two slashes; credentials come from the environment. A "
                "folder of such a name is written ./NAME"
            )
        if self.kv_store_gib is not None:
            raise ValueError(
                "--kv-store-gib: an object store is not trimmed; leave this out, and set a lifecycle rule on "
                "the bucket that removes objects some days after they were written"
            )
