"""Small checkpoints with a layer behind the last that predicts further tokens, a plain reference of it, and
steps that ask for drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step.model_runner import ModelRunner

from .batches import HandSequence, make_batch
from .engines import engine_config
from .families import ALL_FAMILIES, SMALL, VOCAB_SIZE
from .models import make_checkpoint

FAMILIES = ("deepseek3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
ERNIE = {
    "enorm": "model.mtp_emb_norm.0",
    "hnorm": "model.mtp_hidden_norm.0",
    "eh_proj": "model.mtp_linear_proj.0",
}
NORMS = ("enorm", "hnorm", "shared_head.norm")
BLOCK_SIZE, NUM_BLOCKS = 16, 64


class Reference:
    """transformers' model of one layer more; the last is taken as the layer that predicts."""

    def __init__(self, model: PreTrainedModel, further: dict[str, Tensor]) -> None:
        self._model, self._further = model, further
        model.config.num_hidden_layers -= 1
        self._layer = model.model.layers[model.config.num_hidden_layers]

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[T, E], behind the model's last norm."""
        hidden: Tensor = self._model.model(torch.tensor([list(tokens)]), use_cache=False)[0][0]
        return hidden

    @torch.inference_mode()
    def next_token(self, tokens: Sequence[int]) -> int:
        return int(self._model.lm_head(self.hidden(tokens)[-1]).argmax())

    def answer(self, tokens: Sequence[int], count: int) -> list[int]:
        text = list(tokens)
        for _ in range(count):
            text.append(self.next_token(text))
        return text[len(tokens) :]

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` drafts behind ``tokens``. The last token was sampled, the others computed."""
        found: list[int] = []
        x = self._joined(tokens[1:], self.hidden(tokens[:-1]))
        while True:
            y = self._norm(self._run_layer(x)[-1:], "shared_head.norm")
            found.append(int(self._model.lm_head(y).argmax()))
            if len(found) == count:
                return found
            x = torch.cat((x, self._joined(found[-1:], y)))

    @torch.inference_mode()
    def inputs(self, tokens: Sequence[int]) -> Tensor:
        """x [T - 1, E] of the positions before the last token's."""
        return self._joined(tokens[1:], self.hidden(tokens[:-1]))

    @torch.inference_mode()
    def values(self, tokens: Sequence[int]) -> Tensor:
        """[T - 1, KVH, D], of heads that each have their own."""
        x = self._layer.input_layernorm(self.inputs(tokens))
        values: Tensor = self._layer.self_attn.v_proj(x)
        return values.view(len(values), -1, self._layer.self_attn.head_dim)

    def _joined(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        embedded = self._model.model.embed_tokens(torch.tensor(list(tokens)))
        sides = self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")
        return torch.cat(sides, dim=1) @ self._further["eh_proj"].T.to(hidden.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide, eps = x.float(), self._model.config.rms_norm_eps
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * self._further[name]).to(x.dtype)

    def _run_layer(self, x: Tensor) -> Tensor:
        count, x = len(x), x[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        rotated = self._model.model.rotary_emb(x, positions)
        out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotated)
        behind: Tensor = out[0] if isinstance(out, tuple) else out  # GLM-5's returns its choice, too
        return behind[0]


def make_predicting(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Reference:
    """Write a checkpoint and return the reference."""
    own = {**SMALL, **ALL_FAMILIES[family][2]}
    changes["num_hidden_layers"] = changes.get("num_hidden_layers", own["num_hidden_layers"]) + 1
    if "mlp_layer_types" in own:
        changes.setdefault("mlp_layer_types", [*own["mlp_layer_types"], "sparse"])
    model = make_checkpoint(folder, family, seed, dtype, **changes)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(seed + 2)
    further = {name: 1 + 0.2 * torch.randn(size, generator=generator) for name in NORMS}
    further["eh_proj"] = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    further = {name: tensor.to(dtype) for name, tensor in further.items()}
    config = json.loads((folder / "config.json").read_text())
    count = config["num_hidden_layers"]
    config |= {key: of[:-1] for key, of in config.items() if isinstance(of, list) and len(of) == count}
    config |= {"num_hidden_layers": count - 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    file, layer = folder / "model.safetensors", f"model.layers.{count - 1}"
    tensors = load_file(file)
    if family == "ernie4_5_moe":
        block, of_layer = "model.mtp_block.0.", f"{layer}."
        tensors = {name.replace(of_layer, block): tensor for name, tensor in tensors.items()}
        tensors |= {f"{name}.weight": further[of] for of, name in ERNIE.items()}
        further["shared_head.norm"] = tensors["model.norm.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        return Reference(model, further)
    tensors |= {f"{layer}.{name}.weight": tensor for name, tensor in further.items()}
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return Reference(model, further)


def predicting_batch(
    steps: Sequence[tuple[HandSequence, int]], block_size: int, num_drafts: int = 0
) -> Batch:
    """As ``make_batch``; where a sequence has further tokens behind those that run, the batch names the
    next. ``num_drafts``: of each sequence that samples."""
    behind = [s.token_ids[s.num_computed + n : s.num_computed + n + 1] for s, n in steps]
    batch = _with_whole_tables(make_batch(steps, block_size), steps)
    counts = [num_drafts if state is not None else 0 for state in batch.sampling]
    return replace(
        batch,
        next_ids=np.array([of[0] if of else -1 for of in behind], np.int32),
        num_drafts=np.array(counts, np.int32) if num_drafts else None,
    )


def with_draft_rows(
    sequences: Sequence[tuple[HandSequence, Sequence[int]]], block_size: int, num_drafts: Sequence[int]
) -> Batch:
    """A decode step: the rows of all sequences, then those of each one's drafted tokens. ``num_drafts``: of
    each row."""
    rows = [(sequence, 1) for sequence, _ in sequences]
    draft_of = [-1] * len(rows)
    for first, (sequence, drafts) in enumerate(sequences):
        before = first
        for i in range(1, len(drafts) + 1):
            text = [*sequence.output, *drafts[:i]]
            at = sequence.num_computed + i
            rows.append((replace(sequence, output=text, num_computed=at), 1))
            draft_of.append(before)
            before = len(rows) - 1
    batch = _with_whole_tables(make_batch(rows, block_size), rows)
    return replace(batch, draft_of=np.array(draft_of, np.int32), num_drafts=np.array(num_drafts, np.int32))


def _with_whole_tables(batch: Batch, steps: Sequence[tuple[HandSequence, int]]) -> Batch:
    """Also the blocks that drafts will lie in."""
    tables = batch.block_tables
    for row, (sequence, _) in enumerate(steps):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    return replace(batch, block_tables=tables)


def make_runner(folder: Path, dtype: str = "float32", mtp: bool = True, **settings: object) -> ModelRunner:
    """With a poisoned pool: whatever reads a slot that was never written yields NaN."""
    config = engine_config(folder, "cpu", dtype, BLOCK_SIZE, NUM_BLOCKS, mtp=mtp, **settings)
    runner = ModelRunner(config)
    if runner.kv_cache.pool.is_floating_point():
        runner.kv_cache.pool.fill_(torch.nan)
    return runner


def random_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, count)]


def run(runner: ModelRunner, steps: list[tuple[HandSequence, int]], num_drafts: int = 0) -> StepOutput:
    output = runner.execute(predicting_batch(steps, BLOCK_SIZE, num_drafts))
    for (sequence, count), token in zip(steps, output.token_ids.tolist(), strict=True):
        sequence.num_computed += count
        if token >= 0:
            sequence.output.append(token)
    return output


def sequence_of(prompt: list[int], seed: int) -> HandSequence:
    blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: -(-(len(prompt) + 24) // BLOCK_SIZE)]
    return HandSequence(prompt, blocks.tolist())
