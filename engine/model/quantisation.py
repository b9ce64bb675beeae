"""How a checkpoint's files describe its quantisation: compressed-tensors, GPTQ, AWQ, float8, ModelOpt, MXFP4,
GGUF. Free of torch.

``quantised_tensors.py`` reads the tensors that are named here. A scheme that is not known is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..errors import ModelConfigError
from .gguf_types import BLOCKS, packed_bytes

Shape = tuple[int, ...]
WORD_BITS = 32
MXFP4_GROUP = 32
BESIDE = (
    ".input_scale",
    ".activation_scale",
    "_activation_scale",
    ".weight_shape",
    ".g_idx",
    ".weight_g_idx",
    ".k_scale",
    ".v_scale",
)
"""Endings of tensors that are read where they are there, or not at all."""


@dataclass(frozen=True, slots=True)
class TensorScheme:
    """The form of one linear layer's weight.

    form         packed: compressed-tensors' words; plain: a number an element; mxfp4: of all experts
    group_size   inputs that share a scale; 0: all of a row
    whole        one scale for the whole matrix
    block        rows and inputs that share a scale; None: see group_size
    rounds_x     inputs are rounded to int8
    v2           zeros are stored as they are, not less 1
    kind         GGUF's type
    """

    form: Literal["packed", "gptq", "awq", "plain", "mxfp4", "gguf"]
    bits: Literal[4, 8]
    group_size: int = 0
    whole: bool = False
    block: tuple[int, int] | None = None
    symmetric: bool = True
    float8: bool = False
    rounds_x: bool = False
    v2: bool = False
    scale: str = "weight_scale"
    kind: str = ""

    def experts(self, name: str, shape: Shape, outputs_first: bool) -> dict[str, Shape]:
        """Names and shapes of a tensor of all experts. Raises ModelConfigError where they do not divide."""
        if outputs_first and self.float8 and self.whole and self.scale == "weight_scale_inv":
            return {name: shape, f"{name}_scale_inv": (shape[0], 1, 1)}
        count, columns, rows = shape
        if self.form != "mxfp4" or columns % self.group_size:
            raise _missing(f"experts of {rows} x {columns} in one tensor ({name}) in the form {self.form!r}")
        groups = columns // self.group_size
        return {
            f"{name}_blocks": (count, rows, groups, self.group_size // 2),
            f"{name}_scales": (count, rows, groups),
        }

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Shape]:
        """Names and shapes. Raises ModelConfigError where they do not divide."""
        if self.form == "gguf":
            return {f"{name}.weight": (rows, columns)}
        group, a_word = self.group_size or columns, WORD_BITS // self.bits
        in_words = {"packed": columns, "gptq": columns, "awq": rows, "plain": 0}[self.form]
        if columns % group or in_words % a_word or (not self.symmetric and rows % a_word):
            raise ModelConfigError(
                f"{name}: {rows} x {columns} numbers of {self.bits} bits do not fill words, or "
                f"groups of {group}"
            )
        groups, found = columns // group, dict[str, Shape]()
        if self.form == "packed":
            found = {"weight_packed": (rows, columns // a_word), self.scale: (rows, groups)}
            if not self.symmetric:
                found["weight_zero_point"] = (rows // a_word, groups)
        elif self.form in ("gptq", "awq"):
            words = (columns // a_word, rows) if self.form == "gptq" else (columns, rows // a_word)
            found = {"qweight": words, "qzeros": (groups, rows // a_word), "scales": (groups, rows)}
        else:
            scales: Shape = () if self.whole else (rows, 1)
            if self.block is not None:
                scales = (-(-rows // self.block[0]), -(-columns // self.block[1]))
            found = {"weight": (rows, columns), self.scale: scales}
        return {f"{name}.{of}": shape for of, shape in found.items()}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """``schemes``: by patterns of module names; the first that matches holds. ``ignored``: modules left as
    they are. ``named``: by the modules' whole names, before all else."""

    schemes: tuple[tuple[str, TensorScheme], ...]
    ignored: tuple[str, ...]
    named: Mapping[str, TensorScheme] = field(default_factory=dict)

    def of(self, module: str) -> TensorScheme | None:
        if module in self.named:
            return self.named[module]
        left_out = module.endswith(("embed_tokens", "embeddings", "norm", "conv1d"))
        if left_out or any(_matches(pattern, module) for pattern in self.ignored):
            return None
        return next((scheme for pattern, scheme in self.schemes if _matches(pattern, module)), None)

    @property
    def float8(self) -> bool:
        """Some weights are."""
        return any(scheme.float8 for _, scheme in self.schemes)

    def odd_group(self, unit: int) -> int:
        """A number of inputs that share a scale and is no multiple of ``unit``; 0: there is none."""
        groups = (s.block[1] if s.block else s.group_size for _, s in self.schemes)
        return next((group for group in groups if group % unit), 0)

    def expected(self, tensors: Mapping[str, Shape], outputs_first: bool = False) -> dict[str, Shape]:
        """``tensors`` of a checkpoint that is not quantised, as they are in this one. ``outputs_first``: in
        tensors of all experts."""
        return dict(self._expected(tensors, outputs_first))

    def _expected(self, tensors: Mapping[str, Shape], outputs_first: bool) -> Iterator[tuple[str, Shape]]:
        for name, shape in tensors.items():
            module = name.removesuffix(".weight")
            experts, matrix = len(shape) == 3, len(shape) == 2 and module != name
            scheme = self.of(module) if experts or matrix else None
            if scheme is None:
                yield name, shape
            elif experts:
                yield from scheme.experts(module, shape, outputs_first and module == name).items()
            else:
                yield from scheme.tensors(module, *shape).items()

    def element_bytes(self, name: str, itemsize: int) -> float:
        """Bytes of an element of this tensor; ``itemsize``: of one that is not quantised."""
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in self.named:
            return packed_bytes(self.named[module].kind)
        if kind in ("weight_packed", "qweight", "qzeros", "weight_zero_point"):
            return WORD_BITS // 8
        if kind.endswith(("_blocks", "_scales")):
            return 1
        weight = module if kind == "weight" else name if kind.endswith("_proj") else ""
        return 1 if weight and self.of(weight) is not None else itemsize


def parse_quantisation(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> Quantisation | None:
    """``config``: config.json's ``quantization_config``; ``modelopt``: hf_quant_config.json. Raises
    ModelConfigError."""
    if modelopt:
        return _modelopt(modelopt.get("quantization") or {})
    if not config:
        return None
    readers = {
        "compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "fp8": _fp8,
        "modelopt": _modelopt, "mxfp4": _mxfp4, "gguf": _gguf,
    }  # fmt: skip
    method = config.get("quant_method")
    if method not in readers:
        raise _missing(f"quant_method {method!r:.100} (known: {', '.join(readers)})")
    return readers[method](config)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    if config.get("transform_config"):
        raise _missing("rotations of compressed-tensors (transform_config)")
    groups = list(config["config_groups"].values())
    schemes = [
        (target, _compressed_group(group, config.get("format")))
        for group in groups
        for target in group["targets"]
    ]
    schemes.sort(key=lambda scheme: scheme[0] == "Linear")  # names come before classes, whatever their order
    return Quantisation(tuple(schemes), tuple(config.get("ignore") or ()))


def _compressed_group(group: Mapping[str, Any], whole_format: str | None) -> TensorScheme:
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind, strategy = weights["num_bits"], weights["type"], weights["strategy"]
    form = group.get("format") or whole_format
    symmetric = bool(weights.get("symmetric", True))
    size = int(weights.get("group_size") or 0) if strategy == "group" else 0
    what = f"format {form!r} of compressed-tensors with {kind} of {bits} bits by {strategy}"
    order = weights.get("actorder")
    if order not in (None, False, "weight", "group", "static"):
        raise _missing(f"{what} with actorder {order!r}")
    if strategy not in ("group", "channel", "tensor", "block"):
        raise _missing(what)
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        if inputs:
            raise _missing("pack-quantized weights of compressed-tensors with quantised inputs")
        return TensorScheme("packed", bits, max(size, 0), symmetric=symmetric)
    rows = strategy == "channel"
    if (
        form in ("int-quantized", "naive-quantized")
        and kind == "int"
        and bits == 8
        and strategy in ("channel", "tensor")
    ):
        if not symmetric or (inputs and not inputs.get("dynamic")):
            raise _missing("int8 of compressed-tensors that is not symmetric, or with static inputs")
        return TensorScheme("plain", 8, whole=not rows, rounds_x=bool(inputs))
    if form in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8 and symmetric:
        block = weights.get("block_structure") if strategy == "block" else None
        if strategy != "group":
            sides = (int(block[0]), int(block[1])) if block else None
            return TensorScheme("plain", 8, whole=strategy == "tensor", block=sides, float8=True)
    raise _missing(what)


def _gptq(config: Mapping[str, Any]) -> Quantisation:
    dynamic = list(config.get("dynamic") or ())
    if not all(pattern.startswith("-:") for pattern in dynamic):
        raise _missing("GPTQ with schemes by module (dynamic)")
    form = config.get("checkpoint_format") or "gptq"
    if config["bits"] not in (4, 8) or form not in ("gptq", "gptq_v2"):
        raise _missing(f"GPTQ of {config['bits']} bits in the format {form!r}")
    scheme = TensorScheme(
        "gptq", config["bits"], max(0, int(config["group_size"])), symmetric=False, v2=form == "gptq_v2"
    )
    left_out = [f"re:{pattern.removeprefix('-:')}" for pattern in dynamic]
    return Quantisation((("Linear", scheme),), ("lm_head", *left_out))


def _awq(config: Mapping[str, Any]) -> Quantisation:
    version = str(config.get("version", "gemm")).lower()
    if config["bits"] != 4 or version != "gemm":
        raise _missing(f"AWQ of {config['bits']} bits in version {version!r}")
    scheme = TensorScheme("awq", 4, max(0, int(config["group_size"])), symmetric=False)
    return Quantisation((("Linear", scheme),), ("lm_head", *(config.get("modules_to_not_convert") or ())))


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _missing(f"float8 in {config['fmt']}")
    block = config.get("weight_block_size")  # null in files of transformers: a scale for the whole matrix
    scale = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
    sides = (int(block[0]), int(block[1])) if block else None
    scheme = TensorScheme("plain", 8, whole=sides is None, block=sides, float8=True, scale=scale)
    return Quantisation((("Linear", scheme),), ("lm_head", *(config.get("modules_to_not_convert") or ())))


def _mxfp4(config: Mapping[str, Any]) -> Quantisation:
    """Experts alone are in it."""
    scheme = TensorScheme("mxfp4", 4, MXFP4_GROUP)
    return Quantisation((("experts", scheme),), tuple(config.get("modules_to_not_convert") or ()))


def _modelopt(config: Mapping[str, Any]) -> Quantisation:
    if config.get("quant_algo") != "FP8":
        raise _missing(f"quant_algo {config.get('quant_algo')!r:.100} of ModelOpt (known: FP8)")
    ignored = config.get("exclude_modules") or config.get("ignore") or ()
    return Quantisation(
        (("Linear", TensorScheme("plain", 8, whole=True, float8=True)),), ("lm_head", *ignored)
    )


def _gguf(config: Mapping[str, Any]) -> Quantisation:
    """The form that engine/gguf/folder.py writes."""
    schemes = {
        module: TensorScheme("gguf", 8, kind=kind)
        for kind in BLOCKS
        for module in config["types"].get(kind, ())
    }
    return Quantisation((), (), schemes)


def _matches(pattern: str, module: str) -> bool:
    """``Linear``: any; ``re:``: a regular expression; ``*``: a wildcard; else a part of its name, which files
    of AWQ may end with a dot: ``model.layers.0.``."""
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern)
    return f".{pattern.strip('.')}." in f".{module}."


def _missing(what: str) -> ModelConfigError:
    return ModelConfigError(
        f"config.json: quantised weights: {what} is not supported; use another version of this checkpoint"
    )
