"""The gated delta net in plain torch, against transformers' recurrence."""

from __future__ import annotations

import pytest
import torch
from support.state_kernels import Part, assert_same_bits_in_chunks, case_of, shape_of
from torch.nn.functional import conv1d, pad, silu, softplus

from splitserve.kernels.delta_net import DeltaNetShape, DeltaNetWeights, delta_net
from splitserve.kernels.state_shape import NO_STATE, num_state_blocks

modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("values_of_key", [1, 2, 4])
def test_a_prompt_is_that_of_transformers(values_of_key: int) -> None:
    shape = shape_of(2, 1, values_of_key, 16, 4)
    case = case_of(shape, 2, torch.float32)
    x, weights, num_values = case.projected(9, torch.float32), case.weights, shape.num_value_heads
    assert isinstance(weights, DeltaNetWeights)
    mixed, z, b, a = x.split([shape.channels, num_values * 16, num_values, num_values], dim=1)
    inputs = pad(mixed.t(), (3, 0))[None]
    mixed = silu(conv1d(inputs, weights.conv[:, None], groups=shape.channels))[0].t()
    q, k, v = (of.view(1, 9, -1, 16) for of in mixed.split([2 * 16, 2 * 16, num_values * 16], dim=1))
    log_decay = -weights.decay * softplus(a + weights.dt)
    o, state = modeling.torch_recurrent_gated_delta_rule(
        q, k, v, log_decay[None], b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    norm = modeling.Qwen3NextRMSNormGated(16, eps=weights.eps)
    norm.weight.data.copy_(weights.norm)
    with torch.no_grad():
        expected = norm(o.view(-1, 16), z.reshape(-1, 16)).view(9, -1)
    found = case.run(delta_net, x, case.pool, [Part(9)])
    assert torch.allclose(found, expected, atol=1e-5)
    blocks = case.inputs([Part(9)]).tables[0, 0].long()
    there = case.pool[blocks, case.place.layer].movedim(2, 0).flatten(1)  # by key-value head
    of_head = there[:, : values_of_key * 16 * 16].reshape(num_values, 16, 16)
    assert torch.allclose(of_head, state[0], atol=1e-5)


def test_chunks_give_the_same_bits() -> None:
    case = case_of(shape_of(2, 1, 2, 16, 4), 2, torch.float32)
    assert_same_bits_in_chunks(case, delta_net, torch.float32, NO_STATE, 12, [5, 1, 6])


def test_rows_are_not_cut() -> None:
    """400 numbers in rows of 16: a block holds one row in its keys and one in its values."""
    shape = DeltaNetShape(2, 2, 16, 16, 4)
    assert [num_state_blocks(shape, 2, 4 * run, num_layers=2) for run in (16, 24, 31, 32)] == [25, 25, 25, 13]
    with pytest.raises(ValueError, match="60 bytes of a head's keys, and a state's rows 64"):
        num_state_blocks(shape, 2, 60)


def test_heads_that_are_not_shared_equally_are_refused() -> None:
    with pytest.raises(ValueError, match="2 value heads on 2 key heads are not shared equally by 4"):
        num_state_blocks(DeltaNetShape(2, 2, 16, 16, 4), 4, 128)
