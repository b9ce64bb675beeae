"""What others measured, to hold computed profiles against: steps and servers, read from ../shared/data."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ...engine.analytic.content import CURRENT, MODELS, weight_bytes
from ...engine.analytic.shapes import shape_of
from ...engine.analytic.step_times import GPUS, Machine

LLAMA2 = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}


def _plain(layers: int, hidden: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A model without gated MLPs and without grouped heads."""
    numbers = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return numbers | {"intermediate_size": 4 * hidden, "gated": False, "vocab_size": vocabulary,
                      "tie_word_embeddings": True}  # fmt: skip


CONFIGS = MODELS | {
    "llama2-70b": LLAMA2 | {"intermediate_size": 28672, "vocab_size": 32000},
    "bloom-176b": _plain(70, 14336, 112, 250880),
    "facebook/opt-13b": _plain(40, 5120, 40, 50272),
    "facebook/opt-66b": _plain(64, 9216, 72, 50272),
}


REPOSITORIES = {
    "deepseek-ai/DeepSeek-R1": "deepseek-v3", "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3", "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5", "moonshotai/Kimi-K2.5": "kimi-k2",
    "Qwen/Qwen3-32B": "qwen3-32b", "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "openai/gpt-oss-120b": "gpt-oss-120b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
}  # fmt: skip


BITS = {"": 16.0, "bf16": 16.0, "fp8": 8.0, "fp4": 4.5}


class Step(NamedTuple):
    """A measured step. ``args``: units, reads, sequences and cached tokens."""

    model: str
    gpu: str
    gpus: int
    role: str
    args: tuple[float, ...]
    seconds: float

    @property
    def group(self) -> str:
        return f"{self.model} {self.gpus}x{self.gpu}"


def vllm_steps(data: Path) -> Iterable[Step]:
    for gpus in (1, 2, 4, 8):
        with (data / f"aiconfigurator/steps_qwen3-32b_tp{gpus}.csv").open() as file:
            for row in csv.DictReader(file):
                if row["chunks"]:
                    cached, new = map(int, row["chunks"].split("+"))
                    args = (new, new * cached + new * (new + 1) / 2, 1, cached)
                    yield Step("qwen3-32b", "b200", gpus, "prefill", args, float(row["seconds"]))
                else:
                    seqs, context = int(row["num_seqs"]), int(row["num_context_tokens"])
                    yield Step(
                        "qwen3-32b", "b200", gpus, "decode", (seqs, context, seqs, 0), float(row["seconds"])
                    )


def splitwise_steps(data: Path) -> Iterable[Step]:
    with (data / "splitwise-sim/perf_model_compact.csv").open() as file:
        for row in csv.DictReader(file):
            prompt, batch, output, gpus = (
                int(row[n]) for n in ("prompt_size", "batch_size", "token_size", "tensor_parallel")
            )
            if not row["hardware"].endswith("pcap"):
                where = row["model"], row["hardware"].split("-")[0], gpus
                args = (prompt * batch, batch * prompt * (prompt + 1) / 2, batch, 0)
                yield Step(*where, "prefill", args, float(row["prompt_ms"]) / 1e3)
                args = (batch, batch * (prompt + output / 2), batch, 0)
                yield Step(*where, "decode", args, float(row["token_ms"]) / 1e3)


def distserve_steps(path: Path) -> Iterable[Step]:
    """Its fitted lines, at sizes within what it measured."""
    for model, by_gpus in json.loads(path.read_text()).items():
        for gpus, fitted in by_gpus.items():
            a, b, c = (x / 1e3 for x in fitted["prefill"])
            for n in (64, 128, 256, 512, 1024, 2048):
                yield Step(
                    model, "a100", int(gpus), "prefill", (n, n * (n + 1) / 2, 1, 0), a + b * n + c * n * n
                )
            for n in (1, 8, 32, 64, 128, 256):
                small = n < fitted["decoding_large_small_bs_threshold"]
                a, b, c = (x / 1e3 for x in fitted["decoding_smallbs" if small else "decoding_largebs"])
                for context in (256 * n, 768 * n):
                    yield Step(
                        model, "a100", int(gpus), "decode", (n, context, n, 0), a + b * context + c * n
                    )


class Point(NamedTuple):
    """A measured server. ``source``: whose benchmark; ``gpu``: with how many, as a profile's name has it."""

    source: str
    backend: str
    model: str
    precision: str
    gpus: int
    gpu: str
    prompt: int
    output: int
    clients: int


Measured = dict[Point, list[tuple[float, float]]]
"""TTFT and TPOT in seconds, of each run."""


def measured(path: Path) -> Measured:
    """Read AIConfigurator's points that can be asked."""
    found = defaultdict[Point, list[tuple[float, float]]](list)
    with path.open() as file:
        for row in csv.DictReader(file):
            gpu, model = row["system"].split("_")[0], REPOSITORIES.get(row["model_path"])
            clients, gpus = (int(float(row[n] or 0)) for n in ("batch_size", "tp_size"))
            match = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source", ""))
            if match and int(match[1]) != clients:  # of one of several workers or ranks
                continue
            alone = float(row["attention_dp_size"] or 1) == 1 and float(row["pp_size"] or 1) == 1
            known = model in CONFIGS and gpu in GPUS and row["precision"] in BITS and "_c_" not in row["id"]
            if row["mode"] != "agg" or not (alone and known and 0 < gpus <= 8 and clients) or model is None:
                continue
            inferencemax = re.match("20|.*(_cfg|gap_analysis)", row["id"])  # copies of InferenceMAX's, too
            source = "InferenceMAX" if inferencemax else "AIConfigurator"
            machine = Machine(shape_of(CONFIGS[model]), GPUS[gpu], gpus, BITS[row["precision"]], CURRENT)
            if weight_bytes(machine) > gpus * GPUS[gpu].memory:
                continue
            lengths = int(row["isl"]), int(row["osl"])
            point = Point(source, row["backend"], model, row["precision"], gpus, gpu, *lengths, clients)
            found[point].append((float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3))
    return {
        point: runs
        for point, runs in found.items()
        if median(t for t, _ in runs) <= (point.output - 1) * median(t for _, t in runs)
    }
