"""How the families of vision towers name their tensors, and which parts they have. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names in the checkpoint, without ``.weight`` and ``.bias``; a name "" is not there.

    prefixes     of all names, in checkpoints of different writers
    layer        with the names of the second group within
    projector    with those of the third group within; deep_projector: those for deeper layers of the decoder
    has_frames   the weight of ``patches`` has one part for each frame of a video
    layer_norms  norms subtract the mean, and have biases
    column_rope  columns turn by other angles than rows
    side_by_side the numbers of a pair that turns lie side by side, pairs of columns and rows by turns
    positions    a square of them, stretched by bicubic interpolation where ``bicubic``; else see
                 ``learned_positions``
    final_norm   of the last layer's outputs
    """

    prefixes: tuple[str, ...]
    patches: str
    layer: str
    projector: str

    norm_1: str
    norm_2: str
    qkv: tuple[str, ...]
    o: str
    gate: str
    up: str
    down: str

    projector_norm: str
    merge: str
    first: str
    second: str

    eps: float
    biases: bool
    layer_norms: bool = False
    has_frames: bool = True
    patch_bias: bool = False
    patch_norm: str = ""
    positions: str = ""
    bicubic: bool = False
    side_by_side: bool = False
    final_norm: str = ""
    deep_projector: str = ""
    column_rope: bool = False


QWEN_2_5 = TowerNames(
    prefixes=("visual.", "model.visual."), patches="patch_embed.proj", layer="blocks.{}", projector="merger",
    norm_1="norm1", norm_2="norm2", qkv=("attn.qkv",), o="attn.proj",
    gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj",
    projector_norm="ln_q", merge="", first="mlp.0", second="mlp.2", eps=1e-6, biases=True,
)  # fmt: skip
QWEN_3 = TowerNames(
    prefixes=("model.visual.",), patches="patch_embed.proj", layer="blocks.{}", projector="merger",
    norm_1="norm1", norm_2="norm2", qkv=("attn.qkv",), o="attn.proj",
    gate="", up="mlp.linear_fc1", down="mlp.linear_fc2",
    projector_norm="norm", merge="", first="linear_fc1", second="linear_fc2", eps=1e-6, biases=True,
    layer_norms=True, patch_bias=True, positions="pos_embed", deep_projector="deepstack_merger_list.{}",
)  # fmt: skip
PIXTRAL = TowerNames(
    prefixes=("", "model."), patches="vision_tower.patch_conv", layer="vision_tower.transformer.layers.{}",
    projector="multi_modal_projector", norm_1="attention_norm", norm_2="ffn_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), o="attention.o_proj",
    gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj",
    projector_norm="norm", merge="patch_merger.merging_layer", first="linear_1", second="linear_2",
    eps=1e-5, biases=False, has_frames=False, patch_norm="vision_tower.ln_pre", column_rope=True,
)  # fmt: skip
KIMI = TowerNames(
    prefixes=("",), patches="vision_tower.patch_embed.proj", layer="vision_tower.encoder.blocks.{}",
    projector="mm_projector", norm_1="norm0", norm_2="norm1", qkv=("wqkv",), o="wo",
    gate="", up="mlp.fc0", down="mlp.fc1",
    projector_norm="pre_norm", merge="", first="proj.0", second="proj.2", eps=1e-5, biases=True,
    layer_norms=True, has_frames=False, patch_bias=True, positions="vision_tower.patch_embed.pos_emb",
    bicubic=True, side_by_side=True, final_norm="vision_tower.encoder.final_layernorm",
)  # fmt: skip
