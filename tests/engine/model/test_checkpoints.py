"""Checkpoint folders that can be served, and the errors of those that cannot."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.mixture_families import LATENT
from support.models import make_checkpoint

from splitserve.bench.models import make_random_llama
from splitserve.bench.start import status
from splitserve.engine import device
from splitserve.engine.errors import ModelConfigError, OutOfMemoryError, WeightsError
from splitserve.engine.model.config import ModelConfig
from splitserve.engine.model.weights import STORED_DTYPES, Checkpoint
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels import packed_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama3")
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def next_token(folder: Path, **engine: Any) -> int:
    runner = ModelRunner(engine_config(folder, device="cpu", block_size=8, num_blocks=64, **engine))
    prompt = list(range(20))
    return int(runner.execute(make_batch([(HandSequence(prompt, [3, 1, 2]), len(prompt))], 8)).token_ids[0])


def test_several_eos_tokens(folder: Path) -> None:
    assert ModelConfig.from_folder(folder).eos_token_ids == (257, 258)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 259}))
    assert ModelConfig.from_folder(folder).eos_token_ids == (259,)


def test_older_files_name_the_rope_parameters_otherwise(folder: Path) -> None:
    new = ModelConfig.from_folder(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(folder, rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    assert ModelConfig.from_folder(folder) == new
    rope["type"] = rope.pop("rope_type")
    edit_config(folder, rope_scaling=rope)
    assert ModelConfig.from_folder(folder) == new


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "qwen2")
    make_checkpoint(tmp_path / "several", "qwen2", max_shard_size="100KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    assert next_token(tmp_path / "several") == next_token(tmp_path / "one")


def test_layer_types_are_honoured_where_all_layers_have_the_window_otherwise(folder: Path) -> None:
    """Ministral 8B's file has them."""
    edit_config(folder, **MISTRAL, sliding_window=16)
    assert ModelConfig.from_folder(folder).sliding_windows == (16, 16, 16)
    edit_config(folder, layer_types=["full_attention", "sliding_attention", "sliding_attention"])
    assert ModelConfig.from_folder(folder).sliding_windows == (None, 16, 16)


def test_a_head_of_its_own_is_used_though_config_json_calls_it_tied(folder: Path) -> None:
    """It was ignored; transformers uses it, too."""
    own = next_token(folder)
    edit_config(folder, tie_word_embeddings=True)
    assert next_token(folder) == own
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert next_token(folder) != own


def test_float16_weights_are_converted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "half", "llama2", dtype=torch.float16)
    make_checkpoint(tmp_path / "full", "llama2", dtype=torch.float32)
    assert next_token(tmp_path / "half") == next_token(tmp_path / "full")


SLIDING = ["sliding_attention"] * 3
MISTRAL = {"architectures": ["MistralForCausalLM"]}
DEEPSEEK = {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, **LATENT}


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*LlamaForCausalLM"),
        ({"architectures": None}, "none is not supported"),
        (
            {"architectures": ["KimiLinearForCausalLM"], "linear_num_value_heads": 32},
            "layers of linear attention are not built; nearest is",
        ),
        ({"quantization_config": {"bits": 4}}, "quantised weights: quant_method None"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}},
            "rope type 'axial' is not supported",
        ),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
        ({"head_dim": 12}, "multiple of 8"),
        ({**DEEPSEEK, "topk_method": "best"}, "topk_method 'best' .* is not supported"),
        ({**DEEPSEEK, "scoring_func": "sqrt"}, "scoring_func 'sqrt' .* is not supported"),
        ({**DEEPSEEK, "layer_types": SLIDING, "sliding_window": 8}, "latent attention with windows"),
        ({"is_causal": False}, "attention to later tokens"),
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
        ({"layer_types": ["chunked_attention"] * 3}, "found 3 with chunked_attention"),
        ({**MISTRAL, "sliding_window": -1}, "'sliding_window' must be a positive whole number"),
        (
            {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "of 1 of 3 groups do not fit 8 experts",
        ),
        ({"hidden_size": None}, "'hidden_size' must be a positive whole number"),
    ],
)
def test_what_is_not_supported_is_said(folder: Path, changes: dict[str, Any], reported: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelConfigError, match=reported):
        ModelConfig.from_folder(folder)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelConfigError, match="is not a folder"):
        ModelConfig.from_folder(tmp_path / "absent")


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="unpickling runs code"):
        next_token(folder)


def test_missing_and_unexpected_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.9.extra"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        WeightsError,
        match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight; 1 unexpected: model\.layers\.9\.extra",
    ):
        next_token(folder)


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=168)
    with pytest.raises(WeightsError, match=r"has shape \[160, 64\], config.json implies \[168, 64\]"):
        next_token(folder)


def test_a_truncated_file_is_reported(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(WeightsError, match="download it again"):
        next_token(folder)


def test_tensors_of_every_type_are_read_as_they_were_written_and_again_after_their_pages_were_dropped(
    tmp_path: Path,
) -> None:
    bits = torch.randint(256, (4, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {
        str(dtype): bits.clone().view(dtype) for dtype in STORED_DTYPES.values() if dtype != torch.bool
    }
    tensors |= {"bool": bits > 127, "scalar": torch.tensor(3.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        for _ in range(2):
            for name, tensor in tensors.items():
                stored = checkpoint.stored(name)
                assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(stored.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
            checkpoint.drop_pages()


def test_a_tensor_may_begin_at_an_odd_byte(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "flag": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "weight": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
        }
    ).encode()
    weight = torch.tensor([1.0, -2.0, 0.5])
    content = len(header).to_bytes(8, "little") + header + b"\1" + weight.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    with Checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.tensor("weight"), weight)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says how much memory was taken")
def test_loading_takes_the_memory_of_one_copy_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("splitserve.kernels._cpu")
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1 << 40)  # no thread that keeps them
    shape = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 4096}
    make_random_llama(tmp_path, **shape, num_hidden_layers=4, tie_word_embeddings=False)
    size = (tmp_path / "model.safetensors").stat().st_size
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = status("VmRSS")
    ModelRunner(engine_config(tmp_path, device="cpu", num_blocks=4, max_model_len=64, exact=True))
    peak = status("VmHWM") - before
    assert 0.5 * size < peak <= 1.1 * size


def test_a_shard_that_is_absent_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2", max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(WeightsError, match=f"of the index: {shard.name}"):
        next_token(tmp_path)


def test_a_cache_too_small_for_one_sequence_says_what_to_lower(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"holds 10 blocks.*lower --max-model-len to 80"):
        ModelRunner(engine_config(folder, device="cpu", block_size=8, num_blocks=10, max_model_len=100))


def test_a_cache_beyond_the_machine_says_how_many_blocks_fit(folder: Path) -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"enough for \d+ blocks; lower --kv-cache-gib or --num-blocks"
    ):
        ModelRunner(engine_config(folder, device="cpu", block_size=8, kv_cache_gib=60_000))


def test_a_longer_context_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ModelConfigError, match="more than the model's 512"):
        next_token(folder, max_model_len=513)


def test_the_pool_may_lie_in_memory_of_the_callers(folder: Path) -> None:
    buffers: list[bytearray] = []

    def allocate(num_bytes: int) -> memoryview:
        buffers.append(bytearray(num_bytes))
        return memoryview(buffers[0])

    runner = ModelRunner(
        engine_config(folder, device="cpu", block_size=8, num_blocks=64, pool_allocator=allocate)
    )
    runner.warm_up()
    view = runner.kv_cache.block_bytes_view
    assert view.shape == (64, runner.kv_cache.layout.block_bytes)
    assert view[0].any()
    assert bytes(view[1]) == bytes(buffers[0][view.shape[1] : 2 * view.shape[1]])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_the_checkpoints_own_dtype_where_the_cpu_has_no_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    make_checkpoint(tmp_path, "llama3", dtype=stored)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.dtype == stored
    cpu = torch.device("cpu")
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(device, "cpu_widens_bfloat16", lambda: True)
    assert device.select_dtype("auto", cpu, stored) == (
        torch.bfloat16 if stored == torch.bfloat16 else torch.float32
    )
    monkeypatch.setattr(device, "cpu_widens_bfloat16", lambda: False)
    assert device.select_dtype("auto", cpu, stored) == torch.float32
    monkeypatch.setattr(device, "cpu_multiplies_bfloat16", lambda: True)
    assert device.select_dtype("auto", cpu, stored) == torch.bfloat16


def test_a_start_says_how_long_each_phase_took(folder: Path) -> None:
    runner = ModelRunner(engine_config(folder, "cpu", block_size=8, num_blocks=64))
    runner.warm_up()
    assert list(runner.phases.seconds) == ["fingerprint", "weights", "KV cache", "warm-up"]
    assert all(seconds >= 0 for seconds in runner.phases.seconds.values())
    assert re.fullmatch(
        r"\d+\.\d s: fingerprint \d+\.\d, weights \d+\.\d, KV cache \d+\.\d, warm-up \d+\.\d",
        str(runner.phases),
    )
