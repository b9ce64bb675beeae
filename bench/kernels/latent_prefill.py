"""A chunk of a prompt through layers of DeepSeek-V2-Lite on one CPU thread: latent attention expanded, beside
absorbed, in turn.

    python -m splitserve.bench.kernels.latent_prefill [--json FILE]

5 layers, 8 experts in place of 64: as many FLOPs a token. Seeded random bfloat16. Best of several rounds.
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
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 1024, "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 8192, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
}  # fmt: skip
CHUNKS = ((128, 128), (512, 512), (2048, 2048), (512, 2048), (512, 8192), (128, 4096))
"""Tokens of the chunk, and those of the context that it ends."""
BLOCK_SIZE, ROUNDS = 16, 3
CPU = torch.device("cpu")


def metadata(num_tokens: int, length: int) -> AttentionMetadata:
    positions = torch.arange(length - num_tokens, length)
    return AttentionMetadata(
        positions.int(), torch.tensor([0, num_tokens]).int(), torch.tensor([length]).int(),
        torch.arange(-(-length // BLOCK_SIZE)).int()[None], positions, num_tokens,
    )  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    options = parser.parse_args()
    choices = KernelChoices.of_this_machine()
    kernels = NativeCpuKernels(1, measured_instruction_set(choices), choices)
    config = parse_config(SHAPE, {})
    load = LayerLoader(RandomTensors(CPU), kernels, torch.bfloat16, CPU)
    model = DecoderModel(config, load, 8192)
    num_blocks = max(length for _, length in CHUNKS) // BLOCK_SIZE
    pool = torch.randn(num_blocks, config.num_layers, 1, 1, BLOCK_SIZE, config.head_dim).bfloat16()

    def seconds(num_tokens: int, length: int, expands: bool) -> float:
        model._expands = config.latent if expands else None
        tokens, step = torch.zeros(num_tokens, dtype=torch.int32), metadata(num_tokens, length)
        start = time.thread_time()
        model.forward(tokens, step, pool, torch.tensor([num_tokens - 1]))
        return time.thread_time() - start

    rows = []
    for num_tokens, length in CHUNKS:
        turns = [[seconds(num_tokens, length, expands) for expands in (False, True)] for _ in range(ROUNDS)]
        absorbed, expanded = (min(times) for times in zip(*turns, strict=True))
        rows.append(
            {
                "tokens": num_tokens,
                "context": length,
                "absorbed_s": round(absorbed, 3),
                "expanded_s": round(expanded, 3),
                "ratio": round(absorbed / expanded, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    write_record(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
