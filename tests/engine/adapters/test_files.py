"""Adapters are read as ``peft`` saves and applies them; what cannot be served is refused in one sentence."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from support.adapters import save_adapter
from support.models import make_checkpoint

from splitserve.engine.adapters import files
from splitserve.engine.adapters.files import CONFIG, WEIGHTS, read_adapter
from splitserve.engine.errors import AdapterError
from splitserve.engine.model import weight_headers

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 16},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 3},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6, r"^model.layers.\d+.self_attn.o_proj": 1},
        "alpha_pattern": {"v_proj": 32, r".*\.2\.mlp\..*": 5},
    },
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
}


@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma2", "phi3", "olmo2", "glm4"])
def test_every_update_is_that_of_peft(tmp_path: Path, family: str) -> None:
    wrapped = save_adapter(make_checkpoint(tmp_path / "model", family), tmp_path / "a")
    assert_as_peft_applies_it(wrapped, tmp_path / "a")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_update_is_that_of_peft_by_any_configuration(
    tmp_path: Path, config: dict[str, Any], dtype: torch.dtype
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama2", dtype=dtype)
    wrapped = save_adapter(model, tmp_path / "a", dtype=dtype, **config)
    assert_as_peft_applies_it(wrapped.float(), tmp_path / "a")


def assert_as_peft_applies_it(wrapped: Any, folder: Path) -> None:
    file = read_adapter(folder)
    expected = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in wrapped.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert file.layers.keys() == expected.keys() != set()
    assert file.rank == max(len(a) for a, _ in file.layers.values())
    for name, (a, b) in file.layers.items():
        torch.testing.assert_close(b @ a.float(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert b.dtype == torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_adapter(make_checkpoint(tmp_path / "model", "llama2", num_hidden_layers=1), tmp_path / "a")
    return tmp_path / "a"


def with_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_its_content_names_it(folder: Path) -> None:
    """Whatever its folder's name and times; every byte of both files counts."""
    content = read_adapter(folder).content
    assert len(content) == 32
    os.utime(folder / WEIGHTS, (1, 1))
    assert read_adapter(folder.rename(folder.with_name("b"))).content == content
    folder = folder.with_name("b")
    with_config(folder, lora_alpha=9)
    changed = read_adapter(folder).content
    with_tensors(folder, lambda tensors: next(iter(tensors.values())).view(-1)[:1].add_(1))
    assert len({content, changed, read_adapter(folder).content}) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'; only 'LORA' is served"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, r"DoRA \(use_dora\)"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"bias": "all"}, "bias 'all'; only 'none'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "repeated layers"),
        ({"trainable_token_indices": [1]}, "embeddings of tokens"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "no linear layers"),
        ({"alora_invocation_tokens": [1]}, "from a token on"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": 0}, "a rank must be"),
        ({"r": True}, "a rank must be"),
        ({"r": 8}, "has rank 4, adapter_config.json says 8"),
        ({"r": 1 << 60}, "a rank must be"),
        ({"lora_alpha": float("nan")}, "an alpha must be"),
        ({"lora_alpha": float("inf")}, "an alpha must be"),
        ({"lora_alpha": "8"}, "an alpha must be"),
        ({"alpha_pattern": {"q_proj": "x"}}, "an alpha must be"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"(": 1}}, "a pattern that is none"),
        ({"rank_pattern": {"(a|a)*b": 1}}, "write each layer's name"),
        ({"alpha_pattern": {"a*a*a*a*b": 1}}, "write each layer's name"),
        ({"alpha_pattern": {"a" * 1000: 1}}, "write each layer's name"),
        ({"alpha_pattern": {"a?" * 30 + "a" * 30: 1}}, "write each layer's name"),
        ({"alpha_pattern": {"(.|.)" * 40: 1}}, "write each layer's name"),
        ({"alpha_pattern": {"a*\n?" * 40 + "b": 1}}, "write each layer's name"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    with_config(folder, **changes)
    with pytest.raises(AdapterError, match=expected):
        read_adapter(folder)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop(Q), "has one of lora_A and lora_B"),
        (lambda t: t.update({Q: t[Q][:3].clone()}), r"lora_A \[3, 64\] and lora_B \[64, 4\]"),
        (lambda t: t.update({Q: t[Q].view(4, 8, 8).clone()}), r"lora_A \[4, 8, 8\]"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), "is in I8; save it in float32"),
        (lambda t: t[Q].view(-1)[5:6].fill_(float("nan")), "not finite"),
        (lambda t: t[Q].view(-1)[5:6].fill_(float("-inf")), "not finite"),
        (lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(4, 4)}), "embeddings"),
        (
            lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}),
            "embeddings",
        ),
        (lambda t: t.update({Q.replace("base_model.", ""): torch.ones(4, 64)}), "only lora_A and lora_B"),
        (lambda t: t.clear(), "no tensors"),
    ],
)
def test_tensors_that_are_not_served_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], expected: str
) -> None:
    with_tensors(folder, change)
    with pytest.raises(AdapterError, match=expected):
        read_adapter(folder)


def test_tensors_may_begin_at_any_byte(folder: Path) -> None:
    layers, text = read_adapter(folder).layers, (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", text[:8])[0]
    (folder / WEIGHTS).write_bytes(
        struct.pack("<Q", length + 1) + text[8 : 8 + length] + b" " + text[8 + length :]
    )
    for name, pair in read_adapter(folder).layers.items():
        assert all(map(torch.equal, pair, layers[name]))


def test_half_a_folder_is_refused_until_it_is_whole(folder: Path) -> None:
    """Wherever the copy has been interrupted."""
    weights, config = (folder / WEIGHTS).read_bytes(), (folder / CONFIG).read_bytes()
    content = read_adapter(folder).content
    for size in (0, 4, 8, 100, len(weights) // 2, len(weights) - 1):
        (folder / WEIGHTS).write_bytes(weights[:size])
        with pytest.raises(AdapterError, match="not a readable safetensors file"):
            read_adapter(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=f"it has no {WEIGHTS}"):
        read_adapter(folder)
    (folder / WEIGHTS).write_bytes(weights)
    (folder / CONFIG).write_bytes(config[:-20])
    with pytest.raises(AdapterError, match="is no JSON"):
        read_adapter(folder)
    (folder / CONFIG).write_bytes(config)
    assert read_adapter(folder).content == content


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_changes_while_it_is_read_is_refused(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def header_of(path: Path) -> Any:
        (folder / name).write_bytes((folder / name).read_bytes())
        return weight_headers.header_of(path)

    os.utime(folder / name, (1, 1))
    monkeypatch.setattr(files, "header_of", header_of)
    with pytest.raises(AdapterError, match="its files are being written"):
        read_adapter(folder)


def test_nothing_hangs_grows_or_is_unpickled(folder: Path) -> None:
    weights = folder / WEIGHTS
    before = weights.read_bytes()
    with weights.open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 62))
    with pytest.raises(AdapterError, match="claims a header of"):
        read_adapter(folder)
    os.truncate(weights, 1 << 40)
    with pytest.raises(AdapterError):
        read_adapter(folder)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(AdapterError, match="no regular file"):
        read_adapter(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(AdapterError, match="safe_serialization=True"):
        read_adapter(folder)
    weights.write_bytes(before)
    (folder / CONFIG).unlink()
    os.mkfifo(folder / CONFIG)
    with pytest.raises(AdapterError, match="no regular file of up to"):
        read_adapter(folder)
    (folder / CONFIG).unlink()
    (folder / CONFIG).touch()
    os.truncate(folder / CONFIG, 1 << 40)
    weights.write_bytes(b"x")
    with pytest.raises(AdapterError, match="no regular file of up to"):
        read_adapter(folder)
