"""A batch's arrays, as they are sent to the device and as the model takes them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.states import StateInputs
from ...transport.messages.images import FIRST_IMAGE_ID
from ..device import send_all
from ..errors import DeviceLostError
from ..model.step_inputs import AttentionMetadata
from .batch import Batch

T = TypeVar("T")
METADATA = ("positions", "query_start_loc", "seq_lens", "block_tables", "slot_mapping")
STATES = ("tables", "source", "marks")


def metadata_arrays(batch: Batch) -> dict[str, NDArray[np.int32] | NDArray[np.int64]]:
    """What ``attention_metadata`` needs on the device, by name."""
    arrays = {name: getattr(batch, name) for name in METADATA}
    if batch.rope is not None:
        arrays["rope"] = batch.rope
    if batch.states is not None:
        arrays |= {f"state {name}": getattr(batch.states, name) for name in STATES}
    return arrays


def send_batch(
    batch: Batch,
    rows: Sequence[int],
    sampled: Sequence[int],
    slots: NDArray[np.int32] | None,
    device: torch.device,
    sampled_last: Tensor,
) -> tuple[Tensor, AttentionMetadata, Tensor, Tensor]:
    """In one copy: token ids int32 [num_tokens], with those of ``sampled_last`` that the step before has
    sampled for them; metadata; and as indices the token rows ``rows`` and the sequences ``sampled``."""
    words = batch.token_ids
    if batch.images:
        words = np.where(words < FIRST_IMAGE_ID, words, 0)
    arrays = metadata_arrays(batch) | {"token_ids": words, "fed_from": batch.fed_from}
    arrays |= {"rows": np.array(rows, np.int64), "sampled": np.array(sampled, np.int64)}
    arrays["adapters"] = slots
    columns = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
    sent = send_all(columns, device)
    token_ids = sent["token_ids"]
    if batch.fed_from is not None:
        token_ids = feed(token_ids, sent["fed_from"], sampled_last)
    return token_ids, attention_metadata(batch, sent), sent["rows"], sent["sampled"]


def feed(token_ids: Tensor, fed_from: Tensor, sampled_last: Tensor) -> Tensor:
    """``token_ids`` int32 [n], but ``sampled_last`` [fed_from] where ``fed_from`` int32 [n] is not
    negative."""
    if len(sampled_last) == 0:
        return token_ids
    if not token_ids.is_cuda:  # by numpy, which keeps Python's lock and is a quarter of the work
        fed, last = fed_from.numpy(), sampled_last.numpy()
        return torch.from_numpy(np.where(fed >= 0, last[np.maximum(fed, 0)], token_ids.numpy()))
    return torch.where(fed_from >= 0, sampled_last[fed_from.clamp(min=0)], token_ids)


def once_only(output: Callable[[], T]) -> Callable[[], T]:
    """A launched step with states cannot be computed again: the one behind it may have overwritten what it
    read. Where its output raises, so does this, DeviceLostError."""

    def checked() -> T:
        try:
            return output()
        except DeviceLostError:
            raise
        except Exception as error:
            raise DeviceLostError(f"a launched step failed, and its states are lost: {error}") from error

    return checked


def attention_metadata(batch: Batch, sent: Mapping[str, Tensor]) -> AttentionMetadata:
    """``sent``: the batch's ``metadata_arrays`` on the device."""
    states = on_host = None
    if batch.num_tokens > batch.num_seqs:
        of = batch.query_start_loc, batch.seq_lens, batch.block_tables
        on_host = torch.from_numpy(of[0]), torch.from_numpy(of[1]), torch.from_numpy(of[2])
    if batch.states is not None:
        states = StateInputs(sent["query_start_loc"], *(sent[f"state {name}"] for name in STATES))
    return AttentionMetadata(
        **{name: sent[name] for name in METADATA},
        max_query_len=1 if batch.num_tokens == batch.num_seqs else int(np.diff(batch.query_start_loc).max()),
        adapters=sent.get("adapters"),
        rope=sent.get("rope"),
        states=states,
        on_host=on_host,
    )
