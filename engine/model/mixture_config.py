"""A model's mixtures of experts, as config.json gives them. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...kernels.mixture_shape import Activation, MixtureShape
from ..errors import ModelConfigError
from .config_values import positive_int

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORES = ("softmax", "sigmoid")
OWN_TERMS = {
    "moe_k": "num_experts_per_tok", "moe_layer_interval": "decoder_sparse_step",
    "moe_num_experts": "num_experts", "moe_num_shared_experts": "n_shared_experts",
    "num_shared_experts": "n_shared_experts", "top_k_experts": "num_experts_per_tok",
    "router_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
"""Keys of some families, by which others name the same."""
MOST_EXPERTS = 1 << 17  # of all layers: several times those of any model


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """Names of a mixture's tensors within its layer, without ``.weight`` and ``.bias``; ``{}``: an expert's
    number. Where ``gate`` is "" experts have none, nor has the shared one.

    Where ``up`` is "", ``gate`` and ``down`` hold those of all experts, inputs before outputs, gate and up by
    turns, and with ``_bias`` their biases; the router has one too (gpt-oss). ``halves``: gate before up, and
    no biases (Qwen3-VL). ``stacked``: the same, with outputs before inputs (Granite, Mistral 4), and ``gate``
    and ``down`` are whole names. The shared expert is so, too, where its ``up`` is "".
    ``shared``: gate, up and down of the expert of all tokens; ``shared_gate``: its weight in the sum, or 1.
    ``correction``: the whole name, where config.json asks for one; a row where it is ``in_a_row``. Where it
    is "", or ``may_lack_correction`` and the checkpoint has none, the corrections are 0.
    ``beside``: norms where the dense MLP stands beside the experts (Gemma 4): of its output, of the experts'
    input and of their output. ``router_scale``, ``expert_scale``: whole names of factors of the router's
    input, which has no other weight, and of the experts' weights in the sum.
    ``apart``: the names in a checkpoint that lacks ``gate``, with tensors of each expert (Qwen3.5 in float8,
    or as transformers saves it).
    """

    router: str
    gate: str
    up: str
    down: str
    shared: tuple[str, str, str] = ("", "", "")
    shared_gate: str = ""
    correction: str = ""
    in_a_row: bool = False
    may_lack_correction: bool = False
    halves: bool = False
    stacked: bool = False
    beside: tuple[str, str, str] | None = None
    router_scale: str = ""
    expert_scale: str = ""
    apart: MixtureNames | None = None

    @property
    def by_turns(self) -> bool:
        """Whether rows of gate and up alternate, and there are biases (gpt-oss)."""
        return not (self.up or self.halves or self.stacked)


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """``layers``: which have a mixture; the others have a dense MLP. ``whole_experts``: ranks have some of
    them, not columns of each; ``whole_shared``: rank 0 has the shared expert (``expert_split.py``)."""

    shape: MixtureShape
    layers: tuple[bool, ...]
    names: MixtureNames
    corrected: bool = False
    whole_experts: bool = False
    whole_shared: bool = False

    def expected_tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The tensors of the layer of this name, with their shapes."""
        s, names = self.shape, self.names
        hidden, size = s.hidden_size, s.intermediate_size
        expected: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (s.num_experts, hidden)}
        if names.up:
            for i in range(s.num_experts):
                parts = [of.format(i) for of in (names.gate, names.up, names.down)]
                expected |= _mlp(parts, size, hidden)
        elif names.stacked:
            expected |= {
                names.gate: (s.num_experts, 2 * size, hidden),
                names.down: (s.num_experts, hidden, size),
            }
        else:
            expected |= {
                names.gate: (s.num_experts, hidden, 2 * size),
                names.down: (s.num_experts, size, hidden),
            }
        if names.by_turns:
            expected |= {
                f"{names.router}.bias": (s.num_experts,),
                f"{names.gate}_bias": (s.num_experts, 2 * size),
                f"{names.down}_bias": (s.num_experts, hidden),
            }
        if s.shared_size:
            expected |= _mlp(names.shared, s.shared_size, hidden)
        if s.gates:
            expected[f"{names.shared_gate}.weight"] = (1, hidden)
        if self.corrected and names.correction and not names.may_lack_correction:
            expected[names.correction] = (1, s.num_experts) if names.in_a_row else (s.num_experts,)
        if names.beside:
            expected |= {f"{name}.weight": (hidden,) for name in names.beside}
            expected |= {names.router_scale: (hidden,), names.expert_scale: (s.num_experts,)}
        return {f"{layer}.{name}": shape for name, shape in expected.items()}


def mixture_config(
    config: dict[str, Any], names: MixtureNames, num_layers: int, activation: Activation
) -> MixtureConfig:
    """Raises ModelConfigError where a number is missing or not sensible."""
    config = usual_terms(config, num_layers)
    keys = [key for key in ("num_local_experts", "n_routed_experts") if key in config]
    count = positive_int(config, keys[0] if keys else "num_experts")
    chosen = positive_int(config, "num_experts_per_tok")
    if chosen > count or count * num_layers > MOST_EXPERTS:
        raise ModelConfigError(
            f"config.json: {chosen} of {count} experts in each of {num_layers} layers are not supported; a "
            f"token needs one expert or more of those there are, and all layers at most {MOST_EXPERTS}"
        )
    size = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    step = positive_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or range(int(config.get("first_k_dense_replace", 0)))
    method, score = config.get("topk_method", "greedy"), config.get("scoring_func") or SCORES[0]
    frequency = config.get("moe_layer_freq", 1)
    if method not in METHODS or score not in SCORES or frequency != 1:
        raise ModelConfigError(
            f"config.json: topk_method {method!r:.100} with scoring_func {score!r:.100} and moe_layer_freq "
            f"{frequency!r:.100} is not supported (supported: {', '.join((*METHODS, *SCORES))}; 1)"
        )
    groups = chosen_groups = 1
    if method != "greedy":
        groups, chosen_groups = positive_int(config, "n_group"), positive_int(config, "topk_group")
        if count % groups or chosen_groups > groups or chosen > count // groups * chosen_groups:
            raise ModelConfigError(
                f"config.json: {chosen} experts of {chosen_groups} of {groups} groups do not fit {count} "
                "experts"
            )
    return MixtureConfig(
        MixtureShape(
            num_experts=count,
            num_chosen=chosen,
            hidden_size=positive_int(config, "hidden_size"),
            intermediate_size=positive_int(config, size),
            normalized=bool(config.get("norm_topk_prob", True)),
            activation=_clamped(config) if names.gate and "swiglu_limit" in config else activation,
            shared_size=_shared_size(config, names),
            shared_gated=bool(names.shared_gate),
            sigmoid=score == "sigmoid",
            num_groups=groups,
            chosen_groups=chosen_groups,
            factor=float(config.get("routed_scaling_factor", 1.0)),
        ),
        tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers)),
        names,
        corrected=method == "noaux_tc",
    )


def usual_terms(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """config.json with what families name in their own ways as DeepSeek and Qwen name it."""
    found = dict(config)
    if found.get("scoring_func") == "noaux_tc":  # of dots.llm1
        found |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    found |= {usual: found[own] for own, usual in OWN_TERMS.items() if own in found}
    if "moe_layer_start_index" in found:
        first, last = found["moe_layer_start_index"], found.get("moe_layer_end_index", -1)
        last = num_layers - 1 if last == -1 else last
        found["mlp_only_layers"] = [i for i in range(num_layers) if not first <= i <= last]
    kinds = found.get("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise ModelConfigError(
                f"config.json: mlp_layer_types must name {num_layers} layers, each dense or sparse; found "
                f"{len(kinds)}"
            )
        found |= {
            "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind == "dense"],
            "first_k_dense_replace": 0,
        }
    return found


def _shared_size(config: dict[str, Any], names: MixtureNames) -> int:
    if names.shared_gate:
        return positive_int(config, "shared_expert_intermediate_size")
    if names.shared[2] and not all(names.shared):
        size = config.get("shared_intermediate_size")
        return positive_int(config, "shared_intermediate_size") if size else 0
    count = int(config.get("n_shared_experts") or 0)
    return count * positive_int(config, "moe_intermediate_size") if count and names.shared[0] else 0


def _clamped(config: dict[str, Any]) -> Activation:
    found = config.get("swiglu_alpha"), config["swiglu_limit"]
    if found != (1.702, 7.0):
        raise ModelConfigError(
            f"config.json: swiglu_alpha {found[0]!r:.100} and swiglu_limit {found[1]!r:.100} are not "
            "supported; they must be 1.702 and 7.0"
        )
    return "clamped_silu"


def _mlp(names: list[str] | tuple[str, ...], size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    found: dict[str, tuple[int, ...]] = {f"{down}.weight": (hidden, size)}
    if gate:
        found[f"{gate}.weight"] = (size if up else 2 * size, hidden)
    if up:
        found[f"{up}.weight"] = (size, hidden)
    return found
