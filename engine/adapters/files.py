"""An adapter's folder, as `peft` writes it (Hu et al., LoRA, 2021): adapter_config.json and
adapter_model.safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import AdapterError, WeightsError
from ..model.weight_headers import StoredTensor, header_of
from ..model.weights import FLOATS

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_BYTES = {CONFIG: 1 << 20, WEIGHTS: 8 << 30}
MAX_RANK = 4096
MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 256
MAX_NAME_CHARS = 256
UNSERVED = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "transposed layers",
    "lora_bias": "biases",
    "modules_to_save": "whole modules",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained embeddings of tokens",
    "target_parameters": "parameters that are no linear layers",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "activation from a token on",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
}
"""Keys of the configuration that change the formula, and what they ask for."""
CHANGES_BASE = re.compile(r"(pissa|corda|olora|loftq|lora_ga)", re.IGNORECASE)
"""Ways to initialise that leave other base weights than the model's."""
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_SLOW = re.compile(r"\)[*+?{]|\\\d|([*+?{(].*){4}", re.DOTALL)
"""Patterns whose matching may take time beyond any measure."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    content: str  # blake2b over both files
    rank: int  # the largest of any layer
    layers: dict[str, tuple[Tensor, Tensor]]
    """By the layer's name in transformers: A [rank, in_features] as stored, B [out_features, rank] in float32
    with the scale. The update is B A."""


def read_adapter(folder: Path) -> AdapterFile:
    """Raises AdapterError with what is wrong, also while the files are being written."""
    try:
        before = stamp(folder)
        settings = _read(folder / CONFIG)
        config, pairs = _Config.of(_json(bytes(settings))), _pairs(header_of(folder / WEIGHTS))
        weights = _read(folder / WEIGHTS)
        if stamp(folder) != before:
            raise AdapterError("its files are being written")
        layers = {name: _layer(name, pair, weights, config) for name, pair in pairs.items()}
    except (AdapterError, WeightsError, OSError, MemoryError, RuntimeError) as error:  # the last: torch's
        reason = getattr(error, "strerror", None) or f"{error}" or "out of memory"
        raise AdapterError(reason) from error.__cause__ or error
    digest = blake2b(digest_size=16)
    for text in (settings, weights):
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return AdapterFile(digest.hexdigest(), max(len(a) for a, _ in layers.values()), layers)


def stamp(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Changes whenever one of the two files does. Raises AdapterError where one is missing, OSError."""
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        raise AdapterError(
            f"{PICKLED} is pickled, and never loaded: unpickling runs code from the file. Save it again with "
            "safe_serialization=True"
        )
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).exists():
            raise AdapterError(f"it has no {name}; copy the whole folder that peft saved")
    found = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)


class _Config(NamedTuple):
    rank: int
    alpha: float
    use_rslora: bool
    ranks: list[tuple[re.Pattern[str], Any]]
    alphas: list[tuple[re.Pattern[str], Any]]

    @classmethod
    def of(cls, config: dict[str, Any]) -> _Config:
        if config.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type {config.get('peft_type')!r:.100}; only 'LORA' is served")
        for key, what in UNSERVED.items():
            if config.get(key):
                raise AdapterError(f"{what} ({key}) are not served; train it without")
        if config.get("bias", "none") != "none":
            raise AdapterError(f"bias {config['bias']!r:.100}; only 'none' is served")
        if CHANGES_BASE.match(f"{config.get('init_lora_weights')}"):
            raise AdapterError(
                f"init_lora_weights {config['init_lora_weights']!r:.100} has changed the base weights; save "
                "it as a plain adapter, with path_initial_model_for_weight_conversion"
            )
        if type(rslora := config.get("use_rslora", False)) is not bool:
            raise AdapterError(f"use_rslora must be true or false, found {rslora!r:.100}")
        return cls(
            _rank(config.get("r", 8)),
            _alpha(config.get("lora_alpha", 8)),
            rslora,
            _patterns(config, "rank_pattern"),
            _patterns(config, "alpha_pattern"),
        )

    def rank_of(self, layer: str) -> int:
        return _rank(_first(self.ranks, layer, self.rank))

    def scale_of(self, layer: str) -> float:
        alpha, rank = _alpha(_first(self.alphas, layer, self.alpha)), self.rank_of(layer)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _rank(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"a rank must be a whole number from 1 to {MAX_RANK}, found {value!r:.100}")
    return value


def _alpha(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e9:
        raise AdapterError(f"an alpha must be a number up to 1e9, found {value!r:.100}")
    return float(value)


def _patterns(config: dict[str, Any], key: str) -> list[tuple[re.Pattern[str], Any]]:
    """``peft.utils.other.get_pattern_key``: a regular expression for the end of a layer's name."""
    patterns = config.get(key) or {}
    if type(patterns) is not dict or len(patterns) > MAX_PATTERNS:
        raise AdapterError(f"{key} must be an object of up to {MAX_PATTERNS} patterns")
    for text in patterns:
        if len(text) > MAX_PATTERN_CHARS or _SLOW.search(text):
            raise AdapterError(f"{key} has {text!r:.100}; write each layer's name there")
    try:
        return [(re.compile(rf"(.*\.)?({text})$"), value) for text, value in patterns.items()]
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{key} has a pattern that is none: {error}") from None


def _first(patterns: list[tuple[re.Pattern[str], Any]], layer: str, default: float) -> Any:
    return next((value for pattern, value in patterns if pattern.match(layer)), default)


def _json(text: bytes) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is no JSON ({error!s:.100})") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} is no JSON object")
    return config


def _read(file: Path) -> memoryview:
    # a pipe would wait for its writer
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as handle:
        status, most = os.fstat(handle.fileno()), MAX_BYTES[file.name]
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise AdapterError(f"{file.name} is no regular file of up to {most:,} bytes")
        text = np.empty(status.st_size, np.uint8).data  # a bytearray is zeroed under the GIL
        if handle.readinto(text) != len(text):
            raise AdapterError(f"{file.name} is being written")
        return text


def _pairs(tensors: dict[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Each layer's tensors, ``A`` and ``B``, of shapes that fit each other."""
    pairs: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or len(name) > MAX_NAME_CHARS:
            raise AdapterError(
                f"{WEIGHTS} has {name!r:.300}; only lora_A and lora_B of linear layers are served, no "
                "embeddings and no whole modules"
            )
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise AdapterError(f"{WEIGHTS} has no tensors; save it again")
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise AdapterError(f"{name} has one of lora_A and lora_B; save it again")
        a, b = pair["A"], pair["B"]
        if not {a.dtype, b.dtype} <= FLOATS.keys():
            raise AdapterError(f"{name} is in {a.dtype}; save it in float32, bfloat16 or float16")
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in a.shape + b.shape:
            raise AdapterError(f"{name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; save it again")
    return pairs


def _layer(
    name: str, pair: dict[str, StoredTensor], text: memoryview, config: _Config
) -> tuple[Tensor, Tensor]:
    a, b = _tensor(pair["A"], text), _tensor(pair["B"], text)
    if len(a) != config.rank_of(name):
        raise AdapterError(f"{name} has rank {len(a)}, {CONFIG} says {config.rank_of(name)}; save it again")
    scaled = b.float() * config.scale_of(name)
    if not (a.isfinite().all() and scaled.isfinite().all()):
        raise AdapterError(f"{name} has numbers that are not finite; its training has failed")
    return a, scaled


def _tensor(stored: StoredTensor, text: memoryview) -> Tensor:
    dtype = FLOATS[stored.dtype]
    if stored.begin % dtype.itemsize:  # no writer that we know leaves one unaligned
        text = memoryview(bytearray(text[stored.begin : stored.end]))
        stored = StoredTensor(stored.dtype, stored.shape, 0, 0)
    count = math.prod(stored.shape)
    return torch.frombuffer(text, dtype=dtype, count=count, offset=stored.begin).view(stored.shape)
