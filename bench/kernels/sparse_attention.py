"""Decode steps and a prompt's chunk through layers of DeepSeek-V3.2 on one CPU thread: sparse attention,
beside latent attention to all tokens with the same shapes (DeepSeek-V3), in turn.

    python -m splitserve.bench.kernels.sparse_attention [--json FILE]

2 layers with small dense MLPs. Seeded random bfloat16. Best of several rounds.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from ...engine.model.config import parse_config
from ...engine.model.decoder import DecoderModel
from ...engine.model.layers import LayerLoader
from ...engine.model.step_inputs import AttentionMetadata
from ...kernels.measured_choice import KernelChoices
from ...kernels.native_cpu import NativeCpuKernels
from ...kernels.native_linear import measured_instruction_set
from ..environment import environment, option_parser, write_record
from .engine_figures import RandomTensors

SHAPE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": 2,
    "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 32768,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 2, "n_routed_experts": 16, "num_experts_per_tok": 8,
    "moe_intermediate_size": 64, "n_shared_experts": 1,
}  # fmt: skip
STEPS = (
    (1, 1, 1024),
    (1, 1, 4096),
    (4, 1, 4096),
    (1, 1, 16384),
    (1, 64, 8192),
    (1, 512, 4096),
    (1, 512, 16384),
)
"""Sequences, tokens of each, and those of the context that they end."""
BLOCK_SIZE, ROUNDS = 16, 3
CPU = torch.device("cpu")


def metadata(num_seqs: int, num_tokens: int, length: int) -> AttentionMetadata:
    positions = torch.arange(length - num_tokens, length)
    tables = torch.arange(num_seqs * (length // BLOCK_SIZE)).int().view(num_seqs, -1)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        positions.int().repeat(num_seqs), torch.arange(num_seqs + 1).int() * num_tokens,
        torch.full((num_seqs,), length).int(), tables, slots.flatten(), num_tokens,
    )  # fmt: skip


@torch.inference_mode()
def main() -> None:
    options = option_parser(__doc__, to_json=True).parse_args()
    choices = KernelChoices.of_this_machine()
    kernels = NativeCpuKernels(1, measured_instruction_set(choices), choices)
    load = LayerLoader(RandomTensors(CPU), kernels, torch.bfloat16, CPU)
    num_blocks = max(seqs * length for seqs, _, length in STEPS) // BLOCK_SIZE
    models = {}
    for name in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"):
        config = parse_config({**SHAPE, "architectures": [name]}, {})
        pool = torch.randn(num_blocks, 2, 1, 1, BLOCK_SIZE, config.cached_row).bfloat16()
        models[name] = DecoderModel(config, load, 32768), pool

    def seconds(name: str, num_seqs: int, num_tokens: int, length: int) -> float:
        model, pool = models[name]
        tokens = torch.zeros(num_seqs * num_tokens, dtype=torch.int32)
        start = time.thread_time()
        model.forward(tokens, metadata(num_seqs, num_tokens, length), pool, None)
        return time.thread_time() - start

    rows = []
    for step in STEPS:
        turns = [[seconds(name, *step) for name in models] for _ in range(ROUNDS)]
        dense, sparse = (min(times) for times in zip(*turns, strict=True))
        row: dict[str, Any] = dict(zip(("sequences", "tokens", "context"), step, strict=True))
        row |= {"dense_ms": round(1e3 * dense, 1), "sparse_ms": round(1e3 * sparse, 1)}
        rows.append(row | {"ratio": round(dense / sparse, 2)})
        print(json.dumps(rows[-1]), flush=True)
    write_record(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
