"""Damaged input breaks no decoder (the long run: support/fuzz_decoders.py), and the fuzzer has teeth."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from support import fuzz_decoders
from support.fuzz_decoders import Decoder, Record, fuzz

NUM_INPUTS = 12_000


def test_no_input_breaks_a_decoder() -> None:
    """Other inputs in each run. A failure names the input and its seed: ``python -m support.fuzz_decoders
    --seed`` gives the same ones."""
    seed = secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    record = fuzz(NUM_INPUTS, seed)
    assert record.inputs.total() == NUM_INPUTS
    assert json.loads(json.dumps(vars(record)))["inputs"] == dict(record.inputs)
    assert all(
        record.accepted[name] > 0
        for name in ("message", "parcel header", "data connection", "socket identity")
    ), record.accepted


@pytest.mark.parametrize(
    ("breaks", "complaint"),
    [(lambda data: data[0] > 1, "broken"), (lambda data: bool(bytearray(2 << 20)), "bytes held")],
)
def test_a_broken_decoder_is_found(monkeypatch: pytest.MonkeyPatch, breaks: Any, complaint: str) -> None:
    monkeypatch.setattr(fuzz_decoders, "decoders", lambda: [Decoder("broken", breaks, None, [b"abc"])])
    with pytest.raises(AssertionError, match=r"broken, input \d+ of seed 0") as caught:
        fuzz(1_000, seed=0)
    assert complaint in f"{caught.value} {caught.value.__cause__}"
    assert Record().accepted.total() == 0
