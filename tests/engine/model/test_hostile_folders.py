"""A model folder is believed nothing that its own files do not bear out: refused in one sentence, before
anything is allocated by it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.errors import EngineError, ModelConfigError, WeightsError
from splitserve.engine.model.config_values import KINDS
from splitserve.engine.model.model_folder import check_model_folder
from splitserve.engine.model.weight_headers import INDEX, stored_tensors

CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, path / name)
    return path


def with_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_a_good_folder_passes_also_through_links(folder: Path, tmp_path: Path) -> None:
    assert check_model_folder(folder).num_layers == 5
    linked = tmp_path / "snapshot"  # as hub caches have it
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(os.path.relpath(file, linked))
    assert check_model_folder(linked).num_layers == 5
    (folder / "model.safetensors").unlink()
    assert check_model_folder(folder, "if there").num_layers == 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"num_hidden_layers": 10**9},
            "'num_hidden_layers' is 1000000000; the largest that is served is 1024",
        ),
        ({"num_hidden_layers": 1024}, "the tensors do not match config.json; 9171 missing: model.layers.10"),
        ({"num_hidden_layers": 4}, "9 unexpected: model.layers.4"),
        ({"vocab_size": 10**12}, "'vocab_size' is 1000000000000; the largest"),
        (
            {"vocab_size": 4097},
            r"'model.embed_tokens.weight' has shape \[4096, 256\], config.json implies \[4097, 256\]",
        ),
        ({"head_dim": 128}, r"q_proj.weight' has shape \[256, 256\], config.json implies \[512, 256\]"),
        ({"hidden_size": 512}, r"implies \[4096, 512\]"),
        ({"intermediate_size": 1 << 40}, "'intermediate_size' is"),
        ({"num_key_value_heads": -2}, "'num_key_value_heads' must be a positive whole number, found -2"),
        ({"num_key_value_heads": 1}, r"k_proj.weight' has shape \[128, 256\]"),
        ({"max_position_embeddings": 10**15}, "'max_position_embeddings' is"),
        ({"num_hidden_layers": True}, "must be a positive whole number, found True"),
        ({"num_hidden_layers": "5"}, "found '5'"),
        ({"hidden_act": [1]}, r"hidden_act \[1\] is not supported"),
        ({"rope_theta": float("nan")}, "'rope_theta' of the rope parameters must be above 0"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "'factor' of the rope parameters must be above 0",
        ),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object, found .1."),
        ({"eos_token_id": {}}, "a value of the wrong type"),
        ({"architectures": [{}]}, "architecture {} is not supported"),
        ({"architectures": {"a": 1}}, "is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised weights: quant_method None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "a value of the wrong type"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}}, "wrong type"),
    ],
)
def test_config_json_is_held_against_the_weights(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(EngineError, match=expected):
        check_model_folder(with_config(folder, **changes))


@pytest.mark.parametrize("key", KINDS)
@pytest.mark.parametrize("part", ["", "rope_parameters"])
def test_a_value_of_another_kind_is_refused_by_its_key(folder: Path, key: str, part: str) -> None:
    """NaN made every answer of the model wrong; "false" counted as true."""
    wrong: list[Any] = ["x", "false", -1, float("nan"), 10**30, True, [1], {"a": 1}]
    for value in wrong:
        if type(value) is not KINDS[key][1] or value != value:
            changes = {part: {key: value}} if part else {key: value}
            with pytest.raises(ModelConfigError, match=f"^config.json: '{key}' must be "):
                check_model_folder(with_config(folder, **changes))


def bomb(folder: Path, name: str, size: int) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(size)


def unlink(folder: Path, name: str) -> Path:
    (folder / name).unlink(missing_ok=True)
    return folder / name


SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: bomb(f, "tokenizer.json", GIB), "more than the 268,435,456 that are read"),
    (lambda f: bomb(f, "config.json", GIB), "more than the 4,194,304 that are read"),
    (lambda f: bomb(f, "chat_template.jinja", GIB), "chat_template.jinja has 1,073,741,824 bytes"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
    (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "config.json is not JSON"),
    (lambda f: os.mkfifo(unlink(f, "config.json")), "config.json is no regular file"),
    (
        lambda f: os.mkfifo(unlink(f, "model.safetensors")),
        "not a readable safetensors file .it is no regular file",
    ),
    (lambda f: unlink(f, "model.safetensors").symlink_to("/dev/zero"), "it is no regular file"),
    (
        lambda f: os.truncate(f / "model.safetensors", 100_000),
        "holds 94,936 bytes of tensors, and its header tells of",
    ),
    (lambda f: os.truncate(f / "model.safetensors", 3_000), "has 3,000 bytes, and claims a header of 5,056"),
    (lambda f: os.truncate(f / "model.safetensors", 3), "not a readable safetensors file"),
    (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}})),
        "names files outside its own folder",
    ),
    (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "/etc/passwd"}})),
        "names files outside its own folder",
    ),
    (lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": 7}})), "names files outside"),
    (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": ["x"]}})),
        "is not a safetensors index",
    ),
    (lambda f: (f / INDEX).write_text("{}"), "is not a safetensors index"),
    (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}})),
        "lacks 1 of 1 weight files",
    ),
    (lambda f: bomb(f, INDEX, GIB), "is not a safetensors index"),
]


@pytest.mark.parametrize(("spoil", "expected"), SPOILT, ids=[expected[:40] for _, expected in SPOILT])
def test_files_that_are_not_what_they_say(
    folder: Path, spoil: Callable[[Path], object], expected: str
) -> None:
    spoil(folder)
    with pytest.raises(EngineError, match=expected) as refused:
        check_model_folder(folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


def written(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    path.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text) if length is None else length) + text + data
    )
    return path


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}, None),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, None),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}}, None),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, None),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, None),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            None,
        ),
        ({"a": 5}, None),
        ([], None),
        (b"[" * 100_000, None),
        (b"{}", 1 << 62),
        (b"{}", 40 << 20),
    ],
)
def test_headers_that_lie(tmp_path: Path, header: object, length: int | None) -> None:
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        stored_tensors(written(tmp_path / "m", header, bytes(8), length))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.sampled_from([*CONFIG, "rope_scaling", "layer_types", "sliding_window", "rope_parameters"]),
        json_values,
    )
)
def test_any_config_passes_or_is_refused_in_words(folder: Path, changes: dict[str, Any]) -> None:
    with suppress(ModelConfigError, WeightsError):
        check_model_folder(with_config(folder, **changes))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()),
    length=st.none() | st.integers(0, (1 << 64) - 1),
    entry=st.none()
    | st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values}),
)
def test_any_header_passes_or_is_refused_in_words(
    tmp_path: Path, header: bytes, length: int | None, entry: dict[str, Any] | None
) -> None:
    with suppress(WeightsError):
        stored_tensors(written(tmp_path / "m", header if entry is None else {"a": entry}, bytes(16), length))


@pytest.mark.parametrize("command", ["prefill", "decode", "coordinator", "doctor", "up"])
def test_every_command_refuses_alike_in_little_memory(folder: Path, command: str) -> None:
    """Before: the worker grew to 3.7 GB until the kernel killed it."""
    with_config(folder, num_hidden_layers=1000)
    options = {
        "doctor": ["--port", "0", "--control-address", "tcp://127.0.0.1:0"],
        "up": ["--port", "0"],
    }.get(command, ["--insecure"])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (GIB, GIB))

    argv = [sys.executable, "-m", "splitserve.cli.main", command, "--model", str(folder), *options]
    ran = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit if command != "doctor" else None,
    )
    assert ran.returncode in (1, 2)
    assert f"{folder}: the tensors do not match config.json" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
