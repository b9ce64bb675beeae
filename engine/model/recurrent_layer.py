"""A layer of the decoder that keeps a state in place of keys and values (``decoder.py``): a gated delta net,
Mamba-2's, or a short convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...kernels.interface import Linear
from ...kernels.state_shape import StatePlace
from ...kernels.states import StateInputs
from .config import ModelConfig
from .delta_net_config import DeltaNetConfig
from .delta_net_layer import delta_net_mixer
from .layer_mlp import LayerMlp, ResidualNorm
from .layers import LayerLoader
from .mamba_config import MambaConfig
from .mamba_layer import mamba_mixer
from .ranks import of_rank
from .short_conv_layer import short_conv_mixer


@dataclass(frozen=True, slots=True)
class Mixer:
    """What stands in place of attention: ``out`` of ``kernel`` of ``projections``. ``kernel`` gets their
    output [T, columns], the pool and where the states lie in it."""

    projections: Linear
    kernel: Callable[[Tensor, Tensor, StatePlace, StateInputs], Tensor]
    out: Linear


class RecurrentLayer:
    def __init__(self, config: ModelConfig, index: int, load: LayerLoader) -> None:
        """``config``: of all ranks."""
        own = of_rank(config, load.rank)
        names, layer = config.tensors_of(index), config.tensors.layer_name(index)
        assert config.recurrent is not None
        assert own.recurrent is not None
        assert own.states is not None
        input_norm = load.norm(f"{layer}.{names.input_norm}", float(config.unit_norms))
        self._input_norm = ResidualNorm(load.kernels, input_norm, config.residual_eps)
        self._place = own.states.place(index)
        match config.recurrent:
            case DeltaNetConfig() as recurrent:
                self._mixer = Mixer(*delta_net_mixer(recurrent, load, layer, config.rms_norm_eps))
            case MambaConfig() as recurrent:
                self._mixer = Mixer(*mamba_mixer(recurrent, load, layer, config.rms_norm_eps))
            case recurrent:
                self._mixer = Mixer(*short_conv_mixer(recurrent, load, layer))
        self._mlp = LayerMlp(config, index, load) if config.tensors.mlp_name(index) else None

    def run(self, hidden: Tensor | None, residual: Tensor, pool: Tensor, inputs: StateInputs) -> Tensor:
        """Write the states of the step's sequences to ``pool``; return the layer's output, not yet added to
        ``residual``.

        ``hidden`` [T, E] is the last layer's output, not yet added to ``residual`` [T, E], which takes it in.
        """
        return self.finish(self.mix(hidden, residual, pool, inputs), residual)

    def mix(self, hidden: Tensor | None, residual: Tensor, pool: Tensor, inputs: StateInputs) -> Tensor:
        """What ``run`` does for all tokens of the step: the rest needs no state."""
        projected = self._input_norm.into(self._mixer.projections, hidden, residual)
        return self._mixer.kernel(projected, pool, self._place, inputs)

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """The rest of the layer, for rows of ``mix`` and of ``residual``."""
        out = self._mixer.out(mixed)
        return out if self._mlp is None else self._mlp(out, residual)


def run_recurrent(
    layers: Sequence[RecurrentLayer],
    hidden: Tensor | None,
    residual: Tensor,
    pool: Tensor,
    inputs: StateInputs | None,
) -> Tensor | None:
    """Run these layers, if there are any. Arguments and result as of ``DecoderModel.run_layers``."""
    for layer in layers:
        assert inputs is not None, "a model with recurrent layers needs the places of their states"
        hidden = layer.run(hidden, residual, pool, inputs)
    return hidden
