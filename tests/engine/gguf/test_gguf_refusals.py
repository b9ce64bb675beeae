"""GGUF files that cannot be served are refused in a sentence."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine.gguf.test_gguf_models import CASES, make, small
from support.engines import engine_config
from support.gguf_checkpoints import write_gguf
from support.models import make_checkpoint

from splitserve.engine.engine_config import check_formats
from splitserve.engine.errors import ModelConfigError, WeightsError
from splitserve.engine.gguf.folder import write_folder
from splitserve.engine.model.gguf_types import TABLE, WEIGHTS
from splitserve.engine.model.model_folder import check_model_folder


def refused(tmp_path: Path, family: str, **keys: Any) -> str:
    made, out = tmp_path / "made", tmp_path / "out"
    model = make_checkpoint(made, family)
    out.mkdir()
    write_gguf(made / "a.gguf", model, CASES[family][0], small, **keys)
    with pytest.raises(ModelConfigError) as error:
        write_folder(made / "a.gguf", out)
    return str(error.value)


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    experts = refused(tmp_path / "experts", "qwen2", expert_count=8)
    assert "architecture qwen2 of experts is not supported; nearest is qwen2moe" in experts
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
