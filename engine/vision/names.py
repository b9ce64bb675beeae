"""How the families of vision towers name their tensors, and which parts they have. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .pixel_rules import PixelRules

Activation = Literal["gelu", "gelu_tanh", "silu"]


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
    bicubic      positions are stretched by bicubic interpolation; else see ``learned_positions``
    square       their tensor has rows and columns
    final_norm   of the last layer's outputs
    class_token  the whole name of a vector beside the patches of each window; ``positions``, then a whole
                 name, has its position before those of a window
    scales       whole names; what is added to the residual is multiplied by them
    merged_norm  the projector's norm is LayerNorm of groups of patches, and its inner size the decoder's
    gated        the projector is ``GatedProjector``: ``merge`` and ``projector`` have whole names
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
    square: bool = False
    side_by_side: bool = False
    final_norm: str = ""
    class_token: str = ""
    scales: tuple[str, ...] = ()
    qk_norms: tuple[str, ...] = ()
    qkv_biases: bool = True
    merged_norm: bool = False
    gated: bool = False
    deep_projector: str = ""
    column_rope: bool = False


@dataclass(frozen=True, slots=True)
class Tower:
    """What a vision tower consists of.

    num_frames   a still image stands for as many frames of a video
    merge_size   patches in a row, and in a column, that become one row of embeddings
    out_size     numbers of an embedding: the decoder's hidden_size
    theta        of the rotary embedding; 0: there is none
    grid         rows, and columns, of the table of learned positions; 0: there is none
    deep_layers  whose outputs are added behind the decoder's first layers, by number
    window       rows, and columns, of embeddings that attend to each other alone; 0: all do
    full_layers  in which all patches attend to each other all the same, by number
    gated_size   inner size of a gated projector
    """

    names: TowerNames
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    num_frames: int
    merge_size: int
    out_size: int
    activation: Activation
    projector_activation: Activation
    projector_eps: float
    projector_bias: bool
    theta: float
    pixels: PixelRules
    grid: int = 0
    deep_layers: tuple[int, ...] = ()
    window: int = 0
    full_layers: tuple[int, ...] = ()
    gated_size: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        return self.hidden_size * self.merge_size**2


GATED = "gate_proj", "up_proj"
"""Linears of a gated projector."""
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
    bicubic=True, square=True, side_by_side=True, final_norm="vision_tower.encoder.final_layernorm",
)  # fmt: skip
INTERNVL = TowerNames(
    prefixes=("", "model."), patches="vision_tower.embeddings.patch_embeddings.projection",
    layer="vision_tower.encoder.layer.{}", projector="multi_modal_projector",
    norm_1="layernorm_before", norm_2="layernorm_after",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), o="attention.projection_layer",
    gate="", up="mlp.fc1", down="mlp.fc2", qk_norms=("attention.q_norm", "attention.k_norm"),
    projector_norm="layer_norm", merge="", first="linear_1", second="linear_2", eps=1e-6, biases=True,
    layer_norms=True, has_frames=False, patch_bias=True,
    positions="vision_tower.embeddings.position_embeddings",
    class_token="vision_tower.embeddings.cls_token", scales=("lambda_1", "lambda_2"), merged_norm=True,
)  # fmt: skip
GLM = TowerNames(
    prefixes=("model.visual.",), patches="patch_embed.proj", layer="blocks.{}", projector="merger",
    norm_1="norm1", norm_2="norm2", qkv=("attn.qkv",), o="attn.proj",
    gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj",
    projector_norm="post_projection_norm", merge="downsample", first="proj", second="down_proj",
    eps=1e-5, biases=False, patch_bias=True, patch_norm="post_conv_layernorm",
    positions="embeddings.position_embedding", bicubic=True, final_norm="post_layernorm", gated=True,
)  # fmt: skip
