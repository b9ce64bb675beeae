"""A model's mixtures of experts, as config.json gives them. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...kernels.mixture_shape import Activation, MixtureShape
from ..errors import ModelConfigError
from .config_values import positive_int

MOST_EXPERTS = 1 << 17  # of all layers: several times those of any model


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Names of a mixture's tensors within its layer, without ``.weight`` and ``.bias``; ``{}``: an expert's
    number.

    Where ``up`` is "", ``gate`` and ``down`` hold those of all experts, inputs before outputs, gate and up by
    turns, and with ``_bias`` their biases; the router has one too (gpt-oss).
    ``shared``: gate, up and down of the expert of all tokens; ``shared_gate``: its weight in the sum.
    """

    router: str
    gate: str
    up: str
    down: str
    shared: tuple[str, str, str] = ("", "", "")
    shared_gate: str = ""


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """``layers``: which have a mixture; the others have a dense MLP."""

    shape: MixtureShape
    layers: tuple[bool, ...]
    names: MixtureNames

    def expected_tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The tensors of the layer of this name, with their shapes."""
        s, names = self.shape, self.names
        hidden, size = s.hidden_size, s.intermediate_size
        expected: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (s.num_experts, hidden)}
        if not names.up:
            expected |= {
                f"{names.router}.bias": (s.num_experts,),
                names.gate: (s.num_experts, hidden, 2 * size),
                f"{names.gate}_bias": (s.num_experts, 2 * size),
                names.down: (s.num_experts, size, hidden),
                f"{names.down}_bias": (s.num_experts, hidden),
            }
        else:
            for i in range(s.num_experts):
                parts = [of.format(i) for of in (names.gate, names.up, names.down)]
                expected |= _mlp(parts, size, hidden)
        if s.shared_size:
            expected |= _mlp(names.shared, s.shared_size, hidden)
            expected[f"{names.shared_gate}.weight"] = (1, hidden)
        return {f"{layer}.{name}": shape for name, shape in expected.items()}


def mixture_config(
    config: dict[str, Any], names: MixtureNames, num_layers: int, activation: Activation
) -> MixtureConfig:
    """Raises ModelConfigError where a number is missing or not sensible."""
    count = positive_int(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    chosen = positive_int(config, "num_experts_per_tok")
    if chosen > count or count * num_layers > MOST_EXPERTS:
        raise ModelConfigError(
            f"config.json: {chosen} of {count} experts in each of {num_layers} layers are not supported; a "
            f"token needs one expert or more of those there are, and all layers at most {MOST_EXPERTS}"
        )
    size = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    step = positive_int({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    dense = {int(i) for i in config.get("mlp_only_layers") or ()}
    return MixtureConfig(
        MixtureShape(
            num_experts=count,
            num_chosen=chosen,
            hidden_size=positive_int(config, "hidden_size"),
            intermediate_size=positive_int(config, size),
            normalized=bool(config.get("norm_topk_prob", True)),
            activation=_clamped(config) if "swiglu_limit" in config else activation,
            shared_size=positive_int(config, "shared_expert_intermediate_size") if names.shared_gate else 0,
        ),
        tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers)),
        names,
    )


def _clamped(config: dict[str, Any]) -> Activation:
    found = config.get("swiglu_alpha"), config["swiglu_limit"]
    if found != (1.702, 7.0):
        raise ModelConfigError(
            f"config.json: swiglu_alpha {found[0]!r:.100} and swiglu_limit {found[1]!r:.100} are not "
            "supported; they must be 1.702 and 7.0"
        )
    return "clamped_silu"


def _mlp(names: list[str] | tuple[str, ...], size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{name}.weight" for name in names)
    return {gate: (size, hidden), up: (size, hidden), down: (hidden, size)}
