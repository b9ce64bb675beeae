"""A GGUF file's tensors under the names that the family's checkpoints have. Experts, which a file holds in
tensors of all of a layer, become one tensor each: a part of the file's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ..model.families import FAMILIES
from ..model.family import Family, TensorNames
from ..model.mixture_config import MixtureNames
from .file import GgufFile, GgufTensor

NAMES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "input_norm": "attn_norm", "q": "attn_q",
    "k": "attn_k", "v": "attn_v", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "o": "attn_output",
    "attention_out_norm": "post_attention_norm", "post_norm": "ffn_norm", "mlp_out_norm": "post_ffw_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
"""By the fields of TensorNames."""
OUTSIDE = ("embed", "norm", "head")  # of the layers
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
OF_ALL = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
"""The tensors of a layer's experts, and the fields of MixtureNames that name one's."""


def tensors_of(file: GgufFile, family: str) -> dict[str, GgufTensor]:
    """By the family's names, the file's own where the family has none; without what is in no checkpoint."""
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if name not in FACTORS and not name.endswith(".rope_freqs.weight"):
            found |= _renamed(name, tensor, FAMILIES[family])
    return found


def _renamed(name: str, tensor: GgufTensor, family: Family) -> Iterator[tuple[str, GgufTensor]]:
    """Yield ``blk.3.attn_q.weight``, or the parts of ``blk.3.ffn_up_exps.weight``."""
    stem, _, end = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, number, stem = stem.split(".", 2)
        layer = f"{family.tensors.layer.format(number)}."
    if family.mixture is not None and stem in OF_ALL and len(tensor.shape) == 3:
        num_bytes = (tensor.end - tensor.begin) // tensor.shape[0]
        for i in range(tensor.shape[0]):
            begin = tensor.begin + i * num_bytes
            of = getattr(family.mixture, OF_ALL[stem]).format(i)
            yield f"{layer}{of}.{end}", GgufTensor(tensor.kind, tensor.shape[1:], begin, begin + num_bytes)
        return
    own = _own_names(family.tensors, inside=bool(layer)) | _mixture_names(family.mixture)
    if stem == "ffn_gate_inp_shexp":
        tensor = GgufTensor(tensor.kind, (1, *tensor.shape[-1:]), tensor.begin, tensor.end)
    ours = f"{own[stem]}.{end}" if stem in own else ""
    if family.mixture is not None and stem == "exp_probs_b":
        ours = family.mixture.correction
    yield (f"{layer}{ours}" if ours else name), tensor


def _own_names(names: TensorNames, inside: bool) -> dict[str, str]:
    """The family's names, by the file's, of a layer's tensors or of the others."""
    theirs = dict(NAMES)
    if not names.k:
        theirs["q"] = "attn_qkv"
    if not names.up:
        theirs["gate"] = "ffn_up"
    return {theirs[field.name]: getattr(names, field.name) for field in fields(names) if field.name in theirs
            and (field.name in OUTSIDE) != inside and getattr(names, field.name)}  # fmt: skip


def _mixture_names(names: MixtureNames | None) -> dict[str, str]:
    if names is None:
        return {}
    gate, up, down = names.shared
    ours = {
        "ffn_gate_inp": names.router, "ffn_gate_inp_shexp": names.shared_gate, "ffn_gate_shexp": gate,
        "ffn_up_shexp": up, "ffn_down_shexp": down,
    }  # fmt: skip
    return {theirs: name for theirs, name in ours.items() if name}
