"""The second half of a decoder layer (``decoder.py``, which names the sizes), the same for all kinds of
layers: a dense MLP, a mixture of experts, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ...kernels.interface import DenseMlp, Kernels, Linear, RoundingLinear
from ...kernels.mixture_shape import num_inputs
from ...kernels.mixture_weights import Mixture
from .config import ModelConfig
from .experts import load_mixture
from .layers import LayerLoader


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """The RMSNorm of the residual, or the residual itself where ``weight`` is None."""

    kernels: Kernels
    weight: Tensor | None
    eps: float

    def __call__(self, hidden: Tensor | None, residual: Tensor) -> Tensor:
        """Add ``hidden`` to ``residual`` first."""
        if self.weight is None:
            return residual if hidden is None else residual.add_(hidden)
        if hidden is None:
            return self.kernels.rms_norm(residual, self.weight, self.eps)
        return self.kernels.add_rms_norm(hidden, residual, self.weight, self.eps)

    def into(self, linear: Linear, hidden: Tensor | None, residual: Tensor) -> Tensor:
        """The same, and ``linear`` of it."""
        if self.weight is not None and isinstance(linear, RoundingLinear):
            return linear.of_norm(hidden, residual, self.weight, self.eps)
        return linear(self(hidden, residual))


class MixtureBeside(NamedTuple):
    """A mixture of experts beside a dense MLP, with the norms of this one's output and of both its own
    ends."""

    mixture: Mixture
    mlp_norm: Tensor
    input_norm: Tensor
    out_norm: Tensor


class LayerMlp:
    def __init__(self, config: ModelConfig, index: int, load: LayerLoader) -> None:
        t, name, rank = config.tensors_of(index), config.tensors.mlp_name(index), load.rank
        self._kernels, self._eps = load.kernels, config.residual_eps
        self._inner_eps = config.rms_norm_eps
        offset = float(config.unit_norms)
        post_norm, out_norm = (
            load.norm(f"{name}.{of}", offset) if of else None for of in (t.post_norm, t.mlp_out_norm)
        )
        self.norm, self.out_norm = ResidualNorm(load.kernels, post_norm, self._eps), out_norm
        self.mlp: DenseMlp | Mixture
        self.beside: MixtureBeside | None = None
        experts = config.mixture if config.mixture is not None and config.mixture.layers[index] else None
        if experts is not None and experts.names.beside:
            norms = [load.norm(f"{name}.{of}") for of in experts.names.beside]
            self.beside = MixtureBeside(load_mixture(load, name, experts), *norms)
        if experts is not None and self.beside is None:
            self.mlp = load_mixture(load, name, experts)
            if t.mixture_out_norm:
                self.out_norm = load.norm(f"{name}.{t.mixture_out_norm}", offset)
        else:
            size, names = config.intermediate_size, [f"{name}.{of}" for of in (t.gate, t.up) if of]
            rows = rank.rows(*[size] * num_inputs(config.activation))
            gate_up = load.column(names, config.mlp_bias, rows)
            down = load.row(f"{name}.{t.down}", config.mlp_bias, config.layer_norms)
            self.mlp = DenseMlp(gate_up, config.activation, down, size // rank.size)

    def __call__(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """``hidden`` [n, E], of the layer's first half, is not yet added to ``residual``, which takes it in;
        returns the layer's output, not yet added, either."""
        k = self._kernels
        hidden = self.of(self.norm, hidden, residual)
        if self.beside is not None:
            mixture, mlp_norm, input_norm, out_norm = self.beside
            experts = mixture(k.rms_norm(residual, input_norm, self._eps))
            hidden = k.rms_norm(hidden, mlp_norm, self._inner_eps)
            hidden += k.rms_norm(experts, out_norm, self._inner_eps)
        return hidden if self.out_norm is None else k.rms_norm(hidden, self.out_norm, self._inner_eps)

    def of(self, norm: ResidualNorm, hidden: Tensor | None, residual: Tensor) -> Tensor:
        """What the MLP or the experts add, of this norm."""
        mlp = self.mlp
        if not isinstance(mlp, DenseMlp):
            return mlp(norm(hidden, residual))
        gate_up = norm.into(mlp.gate_up, hidden, residual)
        if isinstance(mlp.down, RoundingLinear):
            return mlp.down.of_gate(gate_up, mlp.activation)
        return mlp.down(self._kernels.gate_mul(gate_up, mlp.activation))
