"""Checkpoints with a layer that predicts further tokens: what is loaded of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from support.models import make_checkpoint
from support.prediction import make_predicting, make_runner, random_tokens, run, sequence_of
from support.quantised_checkpoints import by_block

from splitserve.engine.errors import ModelConfigError, WeightsError
from splitserve.engine.model.config import ModelConfig
from splitserve.engine.model.prediction_config import with_prediction
from splitserve.engine.model.tensors import expected_tensors
from splitserve.engine.model.weight_sizes import weight_bytes
from splitserve.engine.settings import WorkerSettings

LAYER = "model.layers.3"


def change_tensors(folder: Path, without: str = "", **more: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    tensors = {name: of for name, of in load_file(file).items() if not (without and without in name)}
    save_file(tensors | {f"{LAYER}.{name}": tensor for name, tensor in more.items()}, file)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_workers_with_and_without_share_no_blocks(tmp_path: Path) -> None:
    make_predicting(tmp_path, "glm4_moe")
    plain, predicting = (make_runner(tmp_path, mtp=mtp).loaded for mtp in (False, True))
    assert predicting.kv_name == f"{plain.kv_name} mtp"
    assert (plain.layout.num_layers, predicting.layout.num_layers) == (3, 4)


def test_the_layer_counts_among_the_weights(tmp_path: Path) -> None:
    make_predicting(tmp_path, "deepseek3")
    plain = ModelConfig.from_folder(tmp_path)
    names = expected_tensors(with_prediction(plain)).keys() - expected_tensors(plain).keys()
    stored = load_file(tmp_path / "model.safetensors")
    copies = {f"{LAYER}.embed_tokens.weight", f"{LAYER}.shared_head.head.weight"}
    assert names == {name for name in stored if name.startswith(LAYER)} - copies
    more = sum(stored[name].numel() for name in names) * 2
    assert weight_bytes(with_prediction(plain), 2) - weight_bytes(plain, 2) == more


def test_a_layer_of_another_name_is_quantised_at_load_like_the_others(tmp_path: Path) -> None:
    make_predicting(tmp_path, "ernie4_5_moe")
    plain = ModelConfig.from_folder(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    more = sum(
        of.numel() for name, of in stored.items() if name.startswith(("model.mtp_block", "model.mtp_l"))
    )
    found = [weight_bytes(each, 2, "int8") for each in (with_prediction(plain), plain)]
    assert found[0] - found[1] == more + 2 * 2 * 64, "and two norms"


def test_copies_that_differ_are_used(tmp_path: Path) -> None:
    """A head that is the model's backwards drafts the tokens that mirror those of the model's head."""
    reference = make_predicting(tmp_path, "glm4_moe")
    sequence = sequence_of(random_tokens(40, seed=3), seed=1)
    runner = make_runner(tmp_path)
    assert runner.loaded.decoder.prediction is not None
    assert (runner.loaded.decoder.prediction.head, runner.loaded.decoder.prediction.table) == (None, None)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"].flip(0).contiguous()
    change_tensors(tmp_path, **{"shared_head.head.weight": head})
    (draft,) = run(make_runner(tmp_path), [(sequence, 40)], num_drafts=1).drafts[0]
    assert draft == len(head) - 1 - reference.drafts(sequence.token_ids, 1)[0]
    change_tensors(tmp_path, **{"embed_tokens.weight": head})
    assert make_runner(tmp_path).loaded.decoder.prediction.table is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["deepseek3", "glm4_moe"])
def test_float8_by_block_keeps_the_joining_matrix_wide(family: str, tmp_path: Path) -> None:
    """As DeepSeek-V3 is published, which lists no modules that are left out."""
    reference = make_predicting(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors")
    wide = (".eh_proj.", "head.", "norm", "embed_tokens", "mlp.gate.")
    for name in [name for name, of in tensors.items() if of.dim() == 2 and not any(w in name for w in wide)]:
        written, _ = by_block(tensors.pop(name).float())
        tensors |= {f"{name.removesuffix('weight')}{end}": of.contiguous() for end, of in written.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    change_config(tmp_path, quantization_config=config)
    runner, equal = make_runner(tmp_path), 0
    assert runner.config.quantisation is not None
    for seed in range(20):
        sequence = sequence_of(random_tokens(40, seed), seed=1)
        (draft,) = run(runner, [(sequence, 40)], num_drafts=1).drafts[0]
        equal += draft == reference.drafts(sequence.token_ids, 1)[0]
    assert equal >= 6, "another choice of experts moves a draft; chance makes none equal"


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_quantised_at_load(quantization: str, tmp_path: Path) -> None:
    reference = make_predicting(tmp_path, "glm4_moe")
    runner, equal = make_runner(tmp_path, quantization=quantization), 0
    for seed in range(20):
        sequence = sequence_of(random_tokens(40, seed), seed=1)
        (draft,) = run(runner, [(sequence, 40)], num_drafts=1).drafts[0]
        equal += draft == reference.drafts(sequence.token_ids, 1)[0]
    assert equal >= (3 if quantization == "int4" else 6)


def test_of_several_layers_the_first_is_loaded(tmp_path: Path) -> None:
    reference = make_predicting(tmp_path, "glm4_moe")
    change_config(tmp_path, num_nextn_predict_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    sequence = sequence_of(random_tokens(40, seed=3), seed=1)
    drafts = run(make_runner(tmp_path), [(sequence, 40)], num_drafts=2).drafts[0]
    assert drafts == reference.drafts(sequence.token_ids, 2)


def test_a_checkpoint_without_the_layer(tmp_path: Path) -> None:
    make_predicting(tmp_path, "deepseek3")
    change_tensors(tmp_path, without=f"{LAYER}.hnorm")
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.3\.hnorm\.weight"):
        make_runner(tmp_path)
    change_tensors(tmp_path, without=LAYER)
    make_runner(tmp_path, mtp=False)
    with pytest.raises(ModelConfigError, match=r"^--mtp: the checkpoint holds no layer .*layers\.3\.eh_proj"):
        make_runner(tmp_path)


def test_a_config_without_the_layer(tmp_path: Path) -> None:
    make_predicting(tmp_path, "glm4_moe")
    change_config(tmp_path, num_nextn_predict_layers=0)
    change_tensors(tmp_path, without=LAYER)
    with pytest.raises(ModelConfigError, match=r"^--mtp: config\.json names no layer"):
        make_runner(tmp_path)


@pytest.mark.parametrize("family", ["llama3", "qwen3_5", "hy_v3"])
def test_a_family_without_the_layer(family: str, tmp_path: Path) -> None:
    """qwen3_5: with recurrent layers."""
    make_checkpoint(tmp_path, family)
    with pytest.raises(ModelConfigError, match=r"^--mtp: .* not built for \w+ \(.*DeepseekV3.*Glm4Moe.*\)"):
        make_runner(tmp_path)


def test_gguf(tmp_path: Path) -> None:
    make_predicting(tmp_path, "glm4_moe")
    change_config(tmp_path, quantization_config={"quant_method": "gguf", "types": {}})
    with pytest.raises(ModelConfigError, match=r"^--mtp: of GGUF files .* is not read"):
        make_runner(tmp_path)


def test_a_paced_worker_predicts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="--mtp needs --runner model"):
        WorkerSettings(model=tmp_path, insecure=True, mtp=True, runner="paced:profile.json")
