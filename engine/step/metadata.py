"""A batch's arrays, as they are sent to the device and as the model takes them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.states import StateInputs
from ..errors import DeviceLostError
from ..model.decoder import AttentionMetadata
from .batch import Batch

T = TypeVar("T")
METADATA = ("positions", "query_start_loc", "seq_lens", "block_tables", "slot_mapping")
STATES = ("tables", "source", "marks")


def metadata_arrays(batch: Batch) -> dict[str, NDArray[np.int32] | NDArray[np.int64]]:
    """What ``attention_metadata`` needs on the device, by name."""
    arrays = {name: getattr(batch, name) for name in METADATA}
    if batch.states is not None:
        arrays |= {f"state {name}": getattr(batch.states, name) for name in STATES}
    return arrays


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
    states = None
    if batch.states is not None:
        states = StateInputs(sent["query_start_loc"], *(sent[f"state {name}"] for name in STATES))
    return AttentionMetadata(
        **{name: sent[name] for name in METADATA},
        max_query_len=1 if batch.num_tokens == batch.num_seqs else int(np.diff(batch.query_start_loc).max()),
        adapters=sent.get("adapters"),
        states=states,
    )
