"""The layer behind a decoder's last, which predicts the token after the next (multi-token prediction;
DeepSeek-V3, 2024, section 2.2):

    x_p = joined [norm(embed(t_{p+1})), norm(h_p)]      h_p: the final hidden state of position p
    y_p = norm(layer(x_p))                              a decoder layer: it attends to positions up to p
    logits of t_{p+2} = head(y_p)

Its keys and values are the last layer of the KV cache. The slot of position p holds those of x_p, so it is
written once t_{p+1} is known. In a cached block, the last may be another prompt's: drafts are hints.
For a further token y_p stands for h_{p+1}: both are behind a norm, and so do SGLang and TensorRT-LLM have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ModelConfigError
from .adapters import StepSlots
from .config import ModelConfig
from .decoder_layer import DecoderLayer
from .layers import LayerLoader, TensorSource
from .step_inputs import StepInputs


class PredictionLayer:
    """``table``, ``head``: None: those of the model."""

    def __init__(self, config: ModelConfig, load: LayerLoader, layer: DecoderLayer, slots: StepSlots) -> None:
        t, names = config.tensors, config.tensors.prediction
        assert names is not None, "checked by with_prediction"
        self._layer, self._slots, self._kernels, self._eps = layer, slots, load.kernels, config.residual_eps
        self._token_norm, self._hidden_norm, self._norm = (
            load.norm(of, float(config.unit_norms))
            for of in (names.token_norm, names.hidden_norm, names.norm)
        )
        self._joined = load.whole(names.joined, bias=False)
        self.table = self.head = None
        model_head = t.embed if config.tie_word_embeddings else t.head
        if load.differ(names.embed, t.embed):
            self.table = load.vocabulary_table(names.embed)
        if load.differ(names.head, model_head):
            self.head = load.vocabulary_head(names.head)

    def project(
        self, embedded: Tensor, hidden: Tensor, inputs: StepInputs, pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of positions with the next tokens ``embedded`` [n, E] and the hidden
        states ``hidden`` [n, E]. Return the queries and the residual, for ``finish``."""
        self._slots.now = inputs.adapters
        norm = self._kernels.rms_norm
        sides = norm(embedded, self._token_norm, self._eps), norm(hidden, self._hidden_norm, self._eps)
        residual = self._joined(torch.cat(sides, dim=1))
        return self._layer.project(None, residual, pool, inputs.rope, inputs.sparse), residual

    def finish(self, q: Tensor, residual: Tensor, inputs: StepInputs, pool: Tensor) -> Tensor:
        """Return y [n, E] of rows of ``project``, whose residual rows and inputs these are."""
        self._slots.now = inputs.adapters
        hidden = self._layer.attend_and_mix(q, residual, pool, inputs.attention, inputs.sparse)
        return self._kernels.add_rms_norm(hidden, residual, self._norm, self._eps)


def check_layer(config: ModelConfig, source: TensorSource) -> None:
    """Raise ModelConfigError where the checkpoint's files lack the layer that config.json names."""
    names = config.tensors.prediction
    if names is None or not config.predicts:
        return
    if not source.has(f"{names.joined}.weight"):
        raise ModelConfigError(
            f"--mtp: the checkpoint holds no layer that predicts further tokens ({names.joined} is not "
            "there): leave it out, or take a version of the checkpoint with that layer"
        )
