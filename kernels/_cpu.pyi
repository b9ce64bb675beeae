"""Signatures of the C++ module; kernels.h tells what each argument is. Addresses and sizes are integers."""

def pack_linear(
    parts: int, packed: int, n: int, k: int, dtype: int, coded: bool, threads: int, /
) -> bool: ...
def packed_bytes(n: int, k: int, dtype: int, coded: bool, /) -> int: ...
def linear(
    x: int, packed: int, num_parts: int, bias: int, y: int, m: int, n: int, k: int, dtype: int, /
) -> None: ...
def low_rank(
    table: int, num_slots: int, slots: int, x: int, y: int, m: int, n: int, k: int, dtype: int, /
) -> None: ...
def pack_quantised(
    part: int, codes: int, scales: int, offsets: int, k: int, group: int, threads: int, /
) -> None: ...
def attention(
    q: int,
    q_stride: int,
    pool: int,
    out: int,
    query_start_loc: int,
    seq_lens: int,
    block_tables: int,
    sinks: int,
    num_seqs: int,
    table_stride: int,
    num_layers: int,
    layer: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    plane: int,
    head_step: int,
    head_dim: int,
    planes: int,
    window: int,
    scale: float,
    softcap: float,
    dtype: int,
    cache: int,
    kv_scales: int,
    slots: bool,
    lse: int,
    /,
) -> None: ...
def index_slots(
    q: int,
    q_stride: int,
    weights: int,
    pool: int,
    query_start_loc: int,
    seq_lens: int,
    block_tables: int,
    slots: int,
    num_seqs: int,
    table_stride: int,
    num_layers: int,
    layer: int,
    block_size: int,
    plane: int,
    num_heads: int,
    head_dim: int,
    count: int,
    dtype: int,
    /,
) -> None: ...
def rope_and_store(
    qkv: int,
    pool: int,
    cos_sin: int,
    positions: int,
    slots: int,
    q_norm: int,
    k_norm: int,
    norms_each_head: bool,
    num_tokens: int,
    num_layers: int,
    layer: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    plane: int,
    head_step: int,
    head_dim: int,
    planes: int,
    eps: float,
    dtype: int,
    cache: int,
    kv_scales: int,
    /,
) -> None: ...
def add_rms_norm(
    x: int, residual: int, weight: int, y: int, rows: int, n: int, eps: float, dtype: int, /
) -> None: ...
def gate_mul(gate_up: int, y: int, rows: int, n: int, activation: int, dtype: int, /) -> None: ...
def delta_net(
    projected: int,
    out: int,
    conv: int,
    decay: int,
    dt: int,
    norm: int,
    conv_bias: int,
    skip: int,
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_size: int,
    eps: float,
    beta_scale: float,
    dtype: int,
    conv_dtype: int,
    norm_dtype: int,
    pool: int,
    query_start_loc: int,
    tables: int,
    source: int,
    marks: int,
    num_seqs: int,
    table_stride: int,
    offset: int,
    num_layers: int,
    layer: int,
    planes: int,
    num_kv_heads: int,
    plane_heads: int,
    head_step: int,
    run_floats: int,
    /,
) -> None: ...
def short_conv(
    projected: int,
    out: int,
    conv: int,
    bias: int,
    channels: int,
    conv_size: int,
    dtype: int,
    pool: int,
    query_start_loc: int,
    tables: int,
    source: int,
    marks: int,
    num_seqs: int,
    table_stride: int,
    offset: int,
    num_layers: int,
    layer: int,
    planes: int,
    num_kv_heads: int,
    plane_heads: int,
    head_step: int,
    run_floats: int,
    /,
) -> None: ...
def mixture(weights: int, x: int, y: int, rows: int, dtype: int, /) -> None: ...
def decoder_layers(
    layers: int,
    first: int,
    last: int,
    hidden: int,
    residual: int,
    num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    pool: int,
    positions: int,
    slots: int,
    query_start_loc: int,
    seq_lens: int,
    block_tables: int,
    num_seqs: int,
    table_stride: int,
    num_layers: int,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    plane: int,
    head_dim: int,
    scale: float,
    softcap: float,
    eps: float,
    qk_eps: float,
    dtype: int,
    cache: int,
    kv_scales: int,
    adapters: int,
    num_slots: int,
    /,
) -> None: ...
def gumbel_argmax(logits: int, keys: int, chosen: int, rows: int, vocab_size: int, /) -> None: ...

SOURCES_HASH: str

def set_num_threads(threads: int, /) -> None: ...
def use_thread_pool(number: int, /) -> None: ...
def instruction_sets() -> list[str]: ...
def use_instruction_set(name: str, /) -> int: ...
def ask_from_rows(rows: int, /) -> None: ...
