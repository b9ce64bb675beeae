"""How large a KV cache is by itself: what fits, what is of use, and several workers side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engines import engine_config
from support.models import make_checkpoint

from splitserve.engine import loaded_model
from splitserve.engine.cache import kv_cache, memory_claims
from splitserve.engine.cache.kv_cache_size import (
    GIB,
    KVCacheSize,
    KVCacheWish,
    gpu_room,
    host_room,
    kv_cache_size,
    shrunk,
    step_bytes,
)
from splitserve.engine.errors import OutOfMemoryError
from splitserve.engine.step.model_runner import ModelRunner

SHAPES = {
    "Qwen3-0.6B": KVCacheWish(block_bytes=28 * 2 * 8 * 128 * 2 * 16, block_size=16, model_len=40_960),
    "Llama-3.2-1B": KVCacheWish(block_bytes=16 * 2 * 8 * 64 * 2 * 16, block_size=16, model_len=131_072),
    "Llama-3.1-8B": KVCacheWish(block_bytes=32 * 2 * 8 * 128 * 2 * 16, block_size=16, model_len=131_072),
}


@pytest.mark.parametrize(
    ("name", "longest"), [("Qwen3-0.6B", 9_360), ("Llama-3.2-1B", 32_768), ("Llama-3.1-8B", 8_192)]
)
def test_common_models_start_in_a_gib_with_a_shorter_context(name: str, longest: int) -> None:
    assert kv_cache_size(SHAPES[name], GIB).max_model_len == longest
    assert kv_cache_size(SHAPES[name], 20 * GIB).max_model_len == SHAPES[name].model_len
    assert kv_cache_size(replace(SHAPES[name], num_bytes=GIB), 0).max_model_len == longest  # set, it wins


def test_a_length_that_is_asked_for_is_never_lowered() -> None:
    with pytest.raises(
        OutOfMemoryError,
        match=r"585 blocks of 1792 KiB, but .* of 20000 tokens.*lower --max-model-len to 9360",
    ):
        kv_cache_size(replace(SHAPES["Qwen3-0.6B"], max_model_len=20_000), GIB)
    with pytest.raises(
        OutOfMemoryError, match=r"room for 5 KV blocks .* of 80 tokens; 256 are the least: end what else"
    ):
        kv_cache_size(SHAPES["Qwen3-0.6B"], 10 << 20)


def test_a_size_that_no_longer_fits_shrinks_to_what_is_free() -> None:
    wish = KVCacheWish(block_bytes=1 << 20, block_size=16, model_len=4096, max_model_len=1600)
    asked = replace(wish, num_blocks=1000)
    assert shrunk(asked, 1000 << 20) is asked
    assert kv_cache_size(shrunk(asked, 999 << 20), 0).num_blocks == 799, "the rest is left to everything else"
    assert kv_cache_size(shrunk(replace(wish, num_bytes=GIB), 200 << 20), 0) == KVCacheSize(160, 1600)
    assert shrunk(wish, 0) is wish, "by itself it asks for nothing"
    with pytest.raises(
        OutOfMemoryError, match="holds 80 blocks of 1024 KiB, but one sequence of 1600 tokens needs 100"
    ):
        kv_cache_size(shrunk(asked, 100 << 20), 0)


def test_a_worker_that_comes_back_to_a_fuller_host_starts_with_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "llama2")
    for module in (loaded_model, kv_cache):
        monkeypatch.setattr(module, "available_bytes", lambda device: 4 << 20)
    monkeypatch.setattr(memory_claims, "default_folder", lambda: tmp_path / "claims")
    asked = {"dtype": "float32", "kv_cache_gib": 8 / 1024, "max_model_len": 64}
    with pytest.raises(OutOfMemoryError, match=r"0\.01 GiB\) does not fit: 0\.00 GiB are free"):
        ModelRunner(engine_config(tmp_path, "cpu", **asked))
    runner = ModelRunner(engine_config(tmp_path, "cpu", kv_cache_shrink=True, **asked))
    assert 2 << 20 < runner.kv_cache.num_bytes <= 4 << 20
    assert runner.max_model_len == 64
    assert "the KV cache that was asked for does not fit any more: it starts with 0.00 GiB" in caplog.text


def test_no_more_blocks_than_can_be_used() -> None:
    small = KVCacheWish(block_bytes=40_960, block_size=16, model_len=2048)
    assert kv_cache_size(small, 1000 * GIB).num_blocks == 64 * 128  # 0.3 GiB of a laptop's memory
    assert kv_cache_size(replace(small, max_model_len=1024), 1000 * GIB).num_blocks == 64 * 64
    assert kv_cache_size(replace(small, num_blocks=9000), 0).num_blocks == 9000


@given(
    room=st.integers(0, 1 << 45),
    block=st.integers(1, 1 << 26),
    size=st.integers(1, 256),
    length=st.integers(1, 1 << 20),
    asked=st.none() | st.integers(1, 1 << 20),
)
def test_what_is_chosen_fits_and_holds_a_sequence(
    room: int, block: int, size: int, length: int, asked: int | None
) -> None:
    wish = KVCacheWish(block, size, length, None if asked is None else min(asked, length))
    try:
        chosen = kv_cache_size(wish, room)
    except OutOfMemoryError:
        assert room // block < -(-(wish.max_model_len or min(length, 256)) // size)
        return
    assert chosen.num_blocks * block <= room
    assert chosen.max_model_len <= chosen.num_blocks * size
    assert chosen.max_model_len == (wish.max_model_len or chosen.max_model_len) <= length


def test_an_80_gb_card_takes_llama_8b_whole() -> None:
    step = step_bytes(
        hidden_size=4096,
        intermediate_size=14_336,
        vocab_size=128_256,
        num_tokens=2048,
        num_seqs=64,
        itemsize=2,
    )
    assert 0.2 * GIB < step < GIB
    card = {"total": 80 * GIB, "free": 64 * GIB, "used": 15 * GIB, "step": step}
    room = gpu_room(**card, utilization=0.9)
    assert 55 * GIB < room < 57 * GIB
    assert kv_cache_size(SHAPES["Llama-3.1-8B"], room).max_model_len == 131_072
    assert gpu_room(**card, utilization=0.45) == pytest.approx(
        room - 36 * GIB, abs=2
    )  # two workers on it: each half
    assert gpu_room(**{**card, "free": 10 * GIB}, utilization=0.9) < 10 * GIB  # somebody else is there
    assert gpu_room(**card, utilization=0.1) == 0


def test_workers_of_one_cluster_get_equal_parts_in_any_order() -> None:
    first = host_room(free=18 * GIB, pending=0, siblings=(), weights=2 * GIB, utilization=0.5, sharers=2)
    assert first == 4 * GIB  # of the 16 that the second one's weights will leave
    while_it_loads = host_room(
        free=18 * GIB, pending=2 * GIB, siblings=(0,), weights=2 * GIB, utilization=0.5, sharers=2
    )
    untouched = host_room(
        free=16 * GIB, pending=4 * GIB, siblings=(4 * GIB,), weights=2 * GIB, utilization=0.5, sharers=2
    )
    assert first == while_it_loads == untouched
    assert (
        host_room(free=16 * GIB, pending=8 * GIB, siblings=(), weights=0, utilization=0.5) == 4 * GIB
    )  # other programs: a share of the rest
    assert host_room(free=10 * GIB, pending=0, siblings=(), weights=0, utilization=1.0) == 8 * GIB
    assert host_room(free=GIB, pending=2 * GIB, siblings=(), weights=0, utilization=1.0) == 0


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (
            "qwen3",
            {
                "num_hidden_layers": 28,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40_960,
            },
        ),
        (
            "llama3",
            {
                "num_hidden_layers": 16,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "max_position_embeddings": 131_072,
            },
        ),
        (
            "llama3",
            {
                "num_hidden_layers": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 131_072,
            },
        ),
    ],
    ids=list(SHAPES),
)
def test_checkpoints_of_these_shapes_load_without_an_option(
    family: str,
    shape: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_checkpoint(
        tmp_path,
        family,
        dtype=torch.bfloat16,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=8,
        **shape,
    )
    monkeypatch.setattr(loaded_model, "free_host_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(memory_claims, "default_folder", lambda: tmp_path / "claims")
    runner = ModelRunner(engine_config(tmp_path, device="cpu", dtype="bfloat16"))
    cache = runner.kv_cache
    assert 0.9 * GIB < cache.num_bytes <= GIB
    assert runner.max_model_len == cache.num_blocks * 16 < shape["max_position_embeddings"]
    sentence = [record.message for record in caplog.records if "max_model_len" in record.message]
    assert len(sentence) == 1
    assert (
        f"max_model_len is {runner.max_model_len}, not the model's {shape['max_position_embeddings']}"
        in sentence[0]
    )
    runner.warm_up()


def test_states_take_room_from_the_longest_sequence() -> None:
    """Two copies in each role, and a last block that moves between them."""
    wish = KVCacheWish(block_bytes=1 << 20, block_size=16, model_len=4096, num_blocks=100, state_blocks=5)
    assert kv_cache_size(wish, 0) == KVCacheSize(100, (100 - 21) * 16)
    with pytest.raises(OutOfMemoryError, match=r"one sequence of 1280 tokens needs 101"):
        kv_cache_size(replace(wish, max_model_len=1280), 0)
