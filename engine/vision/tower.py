"""A vision tower in memory: an image's pixels become rows that stand in place of tokens' embeddings.

One image at a time: the bits of its features never depend on other images. Each rank computes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.select import cpu_multiplies_bfloat16
from ..model.layers import LayerLoader
from .config import VisionConfig
from .encoder import GatedProjector, Layer, Projector, linear, norm
from .patches import grid_of, patches_of, places_of, windows_of
from .positions import learned_positions, stretched_positions, turns_of


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Rows in the order of the image's tokens, [rows, hidden_size] each. ``deep``: to be added to the hidden
    states behind the decoder's first layers, one behind each."""

    rows: Tensor
    deep: tuple[Tensor, ...]


class VisionTower:
    def __init__(self, config: VisionConfig, load: LayerLoader) -> None:
        names, prefix, tower = config.names, config.prefix, config.tower
        self.config, self._device, self._dtype = config, load.device, load.dtype
        widens = load.device.type == "cpu" and not cpu_multiplies_bfloat16()
        self._inner = torch.float32 if widens else load.dtype  # weights stay as they are, half as large
        self._patches = linear(f"{prefix}{names.patches}", names.patch_bias, load)
        self._norm = norm(config, f"{prefix}{names.patch_norm}", load) if names.patch_norm else None
        self._class = load.whole_tensor(f"{prefix}{names.class_token}")[0] if names.class_token else None
        self._table = self._positions(load) if tower.grid else None
        self._layers = [Layer(config, i, load) for i in range(tower.num_layers)]
        self._final = norm(config, f"{prefix}{names.final_norm}", load) if names.final_norm else None
        self._projector: Projector | GatedProjector
        if names.gated:
            self._projector = GatedProjector(config, load)
        else:
            self._projector = Projector(config, f"{prefix}{names.projector}", load, names.merged_norm)
        deep = (f"{prefix}{names.deep_projector.format(i)}" for i in range(len(tower.deep_layers)))
        self._deep = {
            layer: Projector(config, name, load, merged=True)
            for layer, name in zip(tower.deep_layers, deep, strict=True)
        }
        load.checkpoint.drop_pages()

    def __call__(self, pixels: Tensor) -> ImageFeatures:
        """``pixels``: uint8 [height, width, 3]. Raises ValueError where the sides do not fit."""
        with torch.inference_mode():
            return self._features(pixels)

    def _features(self, pixels: Tensor) -> ImageFeatures:
        self.config.num_rows(*pixels.shape[:2])
        tower = self.config.tower
        rows, columns = grid_of(pixels, tower)
        places = places_of(rows, columns, tower.merge_size)
        x = self._patches(patches_of(pixels.to(self._device), tower, self._inner))
        if self._norm is not None:
            x = self._norm(x)
        if self._table is not None:
            x = x + self._learned(self._table, places, rows, columns).to(x.dtype)
        windows = windows_of(rows, columns, tower)
        x, places = x[windows.order.to(self._device)], places[windows.order]
        turns = turns_of(places, tower, self.config.names.column_rope, self._device)
        deep, runs = [], windows.runs
        if self._class is not None and self._table is not None:
            ((number, size),) = runs  # all windows are whole
            first = (self._class + self._table[0]).to(x.dtype).expand(number, 1, -1)
            x, runs = torch.cat((first, x.view(number, size, -1)), dim=1).flatten(0, 1), ((number, size + 1),)
        for i, layer in enumerate(self._layers):
            x = layer(x, turns, ((1, len(x)),) if i in tower.full_layers else runs)
            if i in self._deep:
                deep.append(self._deep[i](x))
        if self._class is not None:
            x = x.view(number, size + 1, -1)[:, 1:].flatten(0, 1)
        x = x if self._final is None else self._final(x)
        back = windows.back.to(self._device)
        features = [each[back].to(self._dtype) for each in (self._projector(x), *deep)]
        return ImageFeatures(features[0], tuple(features[1:]))

    def _positions(self, load: LayerLoader) -> Tensor:
        name = f"{self.config.prefix}{self.config.names.positions}"
        return load.whole_tensor(f"{name}.weight") if self._class is None else load.whole_tensor(name)[0]

    def _learned(self, table: Tensor, places: Tensor, rows: int, columns: int) -> Tensor:
        if self._class is not None:
            within = (places % self.config.tower.grid).to(table.device)
            return table[1 + within[:, 0] * self.config.tower.grid + within[:, 1]]
        positions_of = stretched_positions if self.config.names.bicubic else learned_positions
        return positions_of(table, places, rows, columns)
