"""The vision tower of a model for text and images: its sizes and its tensors. Free of torch.

x = patches @ W (+ positions);  each layer:  x += o(attention(norm(x)));  x += mlp(norm(x))
rows of embeddings = projector(merge_size x merge_size patches of x side by side)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...transport.messages.images import MAX_PIXEL_BYTES
from ..errors import ModelConfigError, WeightsError
from ..model.config_values import read_json
from ..model.families import FAMILIES, architecture_of
from ..model.weight_headers import StoredTensor, stored_tensors
from .families import TOWERS
from .names import GATED, Tower, TowerNames
from .pixel_rules import CHANNELS

PLAIN = ("F32", "BF16", "F16")
COPIES = 12  # measured on a CPU: 10 to 12 beside the MLP of ROWS_AT_ONCE rows
_log = logging.getLogger(__name__)
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """``prefix``: of all its tensors' names; the rest: see ``Tower``."""

    prefix: str
    tower: Tower

    @property
    def names(self) -> TowerNames:
        return self.tower.names

    def expected_tensors(self) -> dict[str, Shape]:
        """Every tensor of the tower with its shape."""
        return dict(self._expected())

    def num_bytes(self, itemsize: int) -> int:
        """Return the size of all weights, at ``itemsize`` bytes a number."""
        return itemsize * sum(map(math.prod, self.expected_tensors().values()))

    def step_bytes(self, itemsize: int) -> int:
        """About what the largest image takes while it is computed, beside the weights: COPIES tensors of a
        row for each patch."""
        t = self.tower
        num_patches = MAX_PIXEL_BYTES // CHANNELS // t.patch_size**2
        widest = max(t.hidden_size, CHANNELS * t.num_frames * t.patch_size**2)
        return COPIES * num_patches * widest * itemsize

    def num_rows(self, height: int, width: int) -> int:
        """Rows of embeddings of an image. Raises ValueError where its sides do not fit."""
        side = of_row = self.tower.patch_size * self.tower.merge_size
        if self.names.class_token:
            side *= self.tower.window
        if not (height and width) or height % side or width % side:
            raise ValueError(f"an image of {height} rows of {width} pixels; both must be multiples of {side}")
        return (height // of_row) * (width // of_row)

    def layer(self, number: int) -> str:
        return f"{self.prefix}{self.names.layer.format(number)}"

    def _expected(self) -> Iterator[tuple[str, Shape]]:
        n, t = self.names, self.tower
        patch = (CHANNELS, *((t.num_frames,) if n.has_frames else ()), t.patch_size, t.patch_size)
        yield f"{self.prefix}{n.patches}.weight", (t.hidden_size, *patch)
        if n.patch_bias:
            yield f"{self.prefix}{n.patches}.bias", (t.hidden_size,)
        if n.patch_norm:
            yield from self._norm(f"{self.prefix}{n.patch_norm}", t.hidden_size)
        if n.class_token:
            yield f"{self.prefix}{n.class_token}", (1, 1, t.hidden_size)
            yield f"{self.prefix}{n.positions}", (1, 1 + t.grid**2, t.hidden_size)
        elif t.grid:
            places = (t.grid, t.grid) if n.square else (t.grid**2,)
            yield f"{self.prefix}{n.positions}.weight", (*places, t.hidden_size)
        for layer in map(self.layer, range(t.num_layers)):
            yield from self._norm(f"{layer}.{n.norm_1}", t.hidden_size)
            yield from self._norm(f"{layer}.{n.norm_2}", t.hidden_size)
            yield from ((f"{layer}.{name}", (t.hidden_size,)) for name in n.scales)
            yield from ((f"{layer}.{name}.weight", (t.hidden_size,)) for name in n.qk_norms)
            for name in n.qkv:
                outputs = 3 * t.hidden_size // len(n.qkv)
                yield from _linear(f"{layer}.{name}", outputs, t.hidden_size, n.biases and n.qkv_biases)
            linears = [(n.o, t.hidden_size, t.hidden_size), (n.down, t.hidden_size, t.intermediate_size)]
            linears += [(name, t.intermediate_size, t.hidden_size) for name in (n.gate, n.up) if name]
            for name, outputs, inputs in linears:
                yield from _linear(f"{layer}.{name}", outputs, inputs, n.biases)
        if n.final_norm:
            yield from self._norm(f"{self.prefix}{n.final_norm}", t.hidden_size)
        if n.gated:
            yield from self._gated_projector()
            return
        yield from self._projector(
            f"{self.prefix}{n.projector}", t.merged_size if n.merged_norm else t.hidden_size
        )
        for i in range(len(t.deep_layers)):
            yield from self._projector(f"{self.prefix}{n.deep_projector.format(i)}", t.merged_size)

    def _gated_projector(self) -> Iterator[tuple[str, Shape]]:
        n, t, name = self.names, self.tower, f"{self.prefix}{self.names.projector}"
        yield f"{self.prefix}{n.merge}.weight", (t.out_size, t.hidden_size, t.merge_size, t.merge_size)
        yield f"{self.prefix}{n.merge}.bias", (t.out_size,)
        yield f"{name}.{n.first}.weight", (t.out_size, t.out_size)
        yield from self._norm(f"{name}.{n.projector_norm}", t.out_size, layer_norm=True)
        yield from ((f"{name}.{of}.weight", (t.gated_size, t.out_size)) for of in GATED)
        yield f"{name}.{n.second}.weight", (t.out_size, t.gated_size)

    def _projector(self, name: str, norm: int) -> Iterator[tuple[str, Shape]]:
        n, t = self.names, self.tower
        yield from self._norm(f"{name}.{n.projector_norm}", norm, n.merged_norm)
        first = (t.out_size if n.merged_norm else t.merged_size, t.merged_size)
        if n.merge:
            yield f"{name}.{n.merge}.weight", (t.hidden_size, t.merged_size)
            first = (t.out_size, t.hidden_size)
        yield from _linear(f"{name}.{n.first}", *first, t.projector_bias)
        yield from _linear(f"{name}.{n.second}", t.out_size, first[0], t.projector_bias)

    def _norm(self, name: str, size: int, layer_norm: bool = False) -> Iterator[tuple[str, Shape]]:
        yield f"{name}.weight", (size,)
        if layer_norm or self.names.layer_norms:
            yield f"{name}.bias", (size,)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def tower_of(folder: Path) -> VisionConfig | None:
    """As ``vision_config``. Raises ModelConfigError where config.json is no JSON object."""
    return vision_config(folder, read_json(folder / "config.json"))


def vision_config(folder: Path, config: dict[str, Any]) -> VisionConfig | None:
    """Return the tower of the model in ``folder``, or None: its text is served, without images.

    ``config``: its config.json. A warning is logged where something is not built, or a tensor cannot be used.
    A folder without weights passes."""
    try:
        architecture = architecture_of(config)
        if architecture not in TOWERS or not config.get("vision_config"):
            return None
        text = FAMILIES[architecture].of(config).config(config)
        return _as_stored(folder, TOWERS[architecture](folder, config, text))
    except ModelConfigError as error:
        reason = f"{error}"
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        reason = f"config.json: a value of vision_config is of the wrong type ({error!r:.200})"
    _log.warning("%s: text alone is served, without images: %s", folder, reason)
    return None


def _as_stored(folder: Path, tower: Tower) -> VisionConfig:
    """Find the prefix of the folder's tensors. Raises ModelConfigError where one of them cannot be used."""
    found = [VisionConfig(prefix, tower) for prefix in tower.names.prefixes]
    try:
        stored = stored_tensors(folder)
    except WeightsError:  # ``check_model_folder`` raises it
        return found[0]
    first = next((each for each in found if f"{each.prefix}{tower.names.patches}.weight" in stored), found[0])
    _check(stored, first.expected_tensors())
    return first


def _check(stored: dict[str, StoredTensor], expected: dict[str, Shape]) -> None:
    for name, shape in expected.items():
        if name not in stored:
            raise ModelConfigError(f"the checkpoint has no tensor {name!r} of the vision tower")
        found = stored[name]
        if found.shape != shape:
            raise ModelConfigError(
                f"tensor {name!r} has shape {list(found.shape)}, config.json implies {list(shape)}"
            )
        if found.dtype not in PLAIN:
            raise ModelConfigError(
                f"tensor {name!r} is {found.dtype}; a vision tower with quantised weights is not built"
            )
