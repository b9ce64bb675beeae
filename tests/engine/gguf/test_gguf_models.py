"""A GGUF file is served as the function of its dequantised weights that transformers computes in float32."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.engines import engine_config
from support.gguf_checkpoints import write_gguf
from support.models import make_checkpoint
from support.quantised_models import (
    PROMPT_LEN,
    all_logits,
    answer,
    assert_same_function,
    make_runner,
    random_tokens,
)
from transformers import PreTrainedModel

from splitserve.engine.engine_config import check_formats
from splitserve.engine.errors import ModelConfigError, WeightsError
from splitserve.engine.gguf.folder import write_folder
from splitserve.engine.model.gguf_blocks import weight_of_blocks
from splitserve.engine.model.gguf_types import BLOCKS, TABLE, WEIGHTS, packed_bytes
from splitserve.engine.model.model_folder import check_model_folder, content_names
from splitserve.engine.model.weights import Checkpoint

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
GEMMA_2_KEYS = {
    "attention.sliding_window": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 60.0,
}
GRANITE_KEYS = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 8.0}
GEMMA_3_KEYS = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [True, False, True],
    "rope.freq_base_swa": 1e3,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama2": ("llama", {}, {}),
    "llama3": ("llama", {}, {}),
    "llama_linear": ("llama", {}, {}),
    "llama_biases": ("llama", {"mlp_bias": False}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2_yarn": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "head_dim": 32}, GEMMA_2_KEYS),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32, "head_dim": 32}, GEMMA_3_KEYS),
    "glm4": ("glm4", {}, {}),
    "granite": ("granite", {}, GRANITE_KEYS),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo2", {}, {"attention.sliding_window": 24}),
    "phi3": ("phi3", {}, {"attention.sliding_window": 24}),
    "phi4_mini": ("phi3", {}, {}),
    "smollm3": ("smollm3", {}, {}),
}
"""By the small model: GGUF's architecture, changes of the model, keys beside those of all."""


def small(name: str) -> str:
    return "Q8_0"


def mixed(name: str) -> str:
    """Types like those of a file of Q4_K_M."""
    return "Q6_K" if name.startswith(("token_embd", "output")) or "attn_v" in name else "Q4_K"


def make(
    folder: Path, family: str, kind_of: Callable[[str], str] = small, **changes: Any
) -> tuple[Path, PreTrainedModel]:
    """A folder that stands for a GGUF file of the family, and the model with its dequantised weights."""
    architecture, own, keys = CASES[family]
    made, out = folder / "made", folder / "out"
    model = make_checkpoint(made, family, **{**own, **changes})
    out.mkdir()
    reference = write_gguf(made / "small.gguf", model, architecture, kind_of, **keys)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (made / name).unlink()
    write_folder(made / "small.gguf", out)
    check_model_folder(out)
    return out, reference


@pytest.mark.parametrize("family", CASES)
def test_a_family(tmp_path: Path, family: str, tried: Callable[[str, str, str], None]) -> None:
    tried(family, "gguf", "Q8_0")
    folder, reference = make(tmp_path, family)
    assert_same_function(make_runner(folder), reference)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "mixed"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_type(tmp_path: Path, kind: str, tied: bool, tried: Callable[[str, str, str], None]) -> None:
    tried("llama3", "gguf", kind)
    folder, reference = make(
        tmp_path,
        "llama3",
        mixed if kind == "mixed" else lambda name: kind,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
    )
    assert_same_function(make_runner(folder), reference)


HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The bytes of d and dmin."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_exactly(kind: str) -> None:
    rng, (numbers, size) = np.random.default_rng(0), BLOCKS[kind]
    blocks = rng.integers(0, 256, (70, 768 // numbers, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        halves = rng.normal(0, 0.02, (*blocks.shape[:2], 1)).astype(np.float16)
        halves[0, 0] = 0
        blocks[..., at : at + 2] = halves.view(np.uint8)
    expected = gguf.quants.dequantize(blocks.reshape(70, -1), gguf.GGMLQuantizationType[kind])
    weight = weight_of_blocks(kind, torch.from_numpy(blocks.reshape(70, -1)))
    assert torch.equal(weight.dequantised(), torch.from_numpy(np.array(expected)))
    linear = native_cpu.NativeCpuKernels(1, native_cpu._cpu.instruction_sets()[0]).linear(weight, None)
    assert isinstance(linear, native_cpu.QuantisedLinear)
    padded = -(-70 // 32) * 32  # to panels
    assert sum(kept.nbytes for kept in linear._kept) == padded * 768 * packed_bytes(kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_has_the_same_bits_in_chunks_and_steps_and_with_two_threads(
    tmp_path: Path, dtype: str
) -> None:
    folder, reference = make(
        tmp_path, "qwen3", mixed, hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64
    )
    runner = make_runner(folder, dtype, exact=True)
    prompt = random_tokens(PROMPT_LEN, seed=7)
    whole = all_logits(runner, prompt)
    for index in (1, 9, 30):
        assert torch.equal(all_logits(runner, prompt[:index]), whole[:index])
    tokens = answer(runner, prompt, 64, seed=8, num_tokens=64)
    assert answer(runner, prompt, 7, seed=11, num_tokens=64) == tokens
    two = make_runner(folder, dtype, exact=True, threads=2)
    assert torch.equal(all_logits(two, prompt), whole)
    assert answer(two, prompt, 19, seed=13, num_tokens=64) == tokens
    if dtype == "float32":
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, PROMPT_LEN),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert tokens == out[0, PROMPT_LEN:].tolist()


def test_plain_weights_are_quantised_at_load(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2", lambda name: "BF16")
    make_runner(folder, quantization="int8")


def test_the_dtype_is_that_of_other_bfloat16_checkpoints(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2")
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.dtype == torch.bfloat16


def test_workers_of_another_type_exchange_no_cache(tmp_path: Path) -> None:
    folders = [make(tmp_path / kind, "llama2", lambda name, kind=kind: kind)[0] for kind in ("Q8_0", "Q4_0")]
    names = {content_names(folder).kv for folder in folders}
    again = make(tmp_path / "again", "llama2")[0]
    assert len(names) == 2
    assert content_names(again) == content_names(folders[0])


def test_ends_of_turns_end_a_text(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2")
    config = check_model_folder(folder)
    assert config.bos_token_id == 256
    assert config.eos_token_ids == (257,)
    assert "assistant: " in (folder / "chat_template.jinja").read_text()


def test_files_beside_it_are_taken_in_place_of_its_metadata(tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    model = make_checkpoint(made, "llama2")
    out.mkdir()
    write_gguf(made / "a.gguf", model, "llama", small)
    write_folder(made / "a.gguf", out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (made / name).read_bytes()
    assert not (out / "chat_template.jinja").exists()


def refused(tmp_path: Path, family: str, **keys: Any) -> str:
    made, out = tmp_path / "made", tmp_path / "out"
    model = make_checkpoint(made, family)
    out.mkdir()
    write_gguf(made / "a.gguf", model, CASES[family][0], small, **keys)
    with pytest.raises(ModelConfigError) as error:
        write_folder(made / "a.gguf", out)
    return str(error.value)


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    experts = refused(tmp_path / "experts", "llama2", expert_count=8)
    assert "architecture llama is not supported: experts are not read from GGUF" in experts
    lengths = refused(tmp_path / "lengths", "llama2", **{"attention.value_length": 8})
    assert "values of another length than keys" in lengths
    scaling = refused(tmp_path / "scaling", "llama2", **{"rope.scaling.type": "ntk"})
    assert "rope scaling 'ntk' is not supported" in scaling
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    both = refused(tmp_path / "both", "llama3", **yarn)
    assert "rope scaling 'yarn' beside a tensor of factors is not supported" in both


def write_bare(path: Path, architecture: str, kind: str = "F32", **metadata: int) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        writer.add_uint16(name.replace("__", "."), value)
    blocks = np.zeros((1, 256), np.float32)
    if kind != "F32":
        blocks = np.zeros((1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]), np.uint8)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_architectures_types_and_parts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(ModelConfigError, match=r"architecture mamba is not supported; nearest.*gemma2"):
        write_folder(write_bare(path, "mamba"), tmp_path)
    with pytest.raises(ModelConfigError, match=r"has no llama.embedding_length"):
        write_folder(write_bare(path, "llama"), tmp_path)
    with pytest.raises(ModelConfigError, match=r"type IQ4_XS are not supported .supported: Q2_K.*Q4_K_M"):
        write_folder(write_bare(path, "llama", "IQ4_XS"), tmp_path)
    with pytest.raises(ModelConfigError, match="one of several parts; join them"):
        write_folder(write_bare(path, "llama", split__count=2), tmp_path)


@pytest.mark.parametrize("left", [0, 3, 40, 200, 3000, -64])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, left: int) -> None:
    path = write_bare(tmp_path / "a.gguf", "llama")
    path.write_bytes(path.read_bytes()[:left])
    expected = "is no GGUF file: it begins with" if 0 <= left < 4 else "is cut short or damaged|has no llama"
    with pytest.raises(ModelConfigError, match=expected):
        write_folder(path, tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "value", [struct.pack("<IIQ", 9, 0, 1 << 40), struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20_000]
)
def test_an_array_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path, value: bytes) -> None:
    """It was read on behind the end, until the memory was full."""
    (path := tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + value)
    with pytest.raises(ModelConfigError, match="is cut short or damaged"):
        write_folder(path, tmp_path)


def test_a_file_that_was_replaced_by_a_shorter_one_is_refused(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2")
    assert (folder / TABLE).is_file()
    source = (folder / WEIGHTS).resolve()
    source.write_bytes(source.read_bytes()[:-4096])
    with pytest.raises(WeightsError, match=r"not a readable GGUF file .*download it again"):
        check_model_folder(folder)


def test_blocks_are_refused_on_gpus(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2")
    plain, _ = make(tmp_path / "plain", "llama2", lambda name: "BF16")
    gpu = torch.device("cuda", 0)
    check_formats(engine_config(plain).settings, check_model_folder(plain), gpu)
    with pytest.raises(ModelConfigError, match=r"GGUF have kernels on CPUs only.*use --device cpu"):
        check_formats(engine_config(folder).settings, check_model_folder(folder), gpu)
