"""Sizes, pixels and tokens of images, against transformers' own processors."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pillow
from support.image_models import CHAT, PREPROCESSORS, encoded, of, part, picture, text, write_image_model
from support.their_images import their_kimi_pixels
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral import image_processing_pil_pixtral as with_pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from splitserve.coordinator.generate.plan import Planner, parse
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.images.families import PixtralImages, QwenImages
from splitserve.coordinator.images.reading import opened, prepared
from splitserve.coordinator.images.rules import ImageRules, NoImages
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.transport.messages.images import FIRST_IMAGE_ID, image_name, image_token_ids

SIDES = {
    "glm46v": 28,
    "kimi_k25": 28, "qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_vl_moe": 32, "qwen3_5_images": 32, "mistral3": 28
}  # fmt: skip
SIZES = st.tuples(st.integers(1, 400), st.integers(1, 400))
FEW = settings(max_examples=40, deadline=None)

FAMILIES = ("glm46v", "internvl", "kimi_k25", "qwen2_5_vl", "qwen3_vl", "mistral3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        write_image_model(folder, family)
    return folders


@pytest.fixture(scope="module")
def rules(folders: dict[str, Path]) -> dict[str, ImageRules]:
    found = {family: ServedModel.load(folder, "x").images for family, folder in folders.items()}
    return {family: each for family, each in found.items() if isinstance(each, ImageRules)}


def their_pixels(family: str, image: pillow.Image) -> np.ndarray[Any, Any]:
    """Return the resized image as transformers has it, [height, width, 3], before it is normalised."""
    if family == "kimi_k25":
        return their_kimi_pixels(image, PREPROCESSORS[family]["media_proc_cfg"])
    options: dict[str, Any] = {**PREPROCESSORS[family], "do_rescale": False, "do_normalize": False}
    if family == "internvl":
        found = GotOcr2ImageProcessorPil(**options, crop_to_patches=True)(images=[image])
        return np.moveaxis(np.concatenate(found["pixel_values"], axis=1), 0, -1)
    if family == "mistral3":
        found = with_pillow.PixtralImageProcessorPil(**options)(images=[image], patch_size=SIDES[family])
        return np.moveaxis(np.asarray(found["pixel_values"][0]), 0, -1)
    kind = Glm46VImageProcessorPil if family == "glm46v" else Qwen2VLImageProcessorPil
    found = kind(**options)(images=[image])
    patch, (_, rows, columns) = SIDES[family] // 2, found["image_grid_thw"][0]
    tiles = np.asarray(found["pixel_values"]).reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)[
        :, :, :, :, :, 0
    ]  # of the two equal frames the first
    return tiles.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_pixels_are_those_of_transformers(rules: dict[str, ImageRules], family: str, mode: str) -> None:
    @FEW
    @given(size=SIZES)
    def each(size: tuple[int, int]) -> None:
        image = picture(*size, mode)
        try:
            theirs = their_pixels(family, image)
        except ValueError:  # of other words; too narrow for both
            with pytest.raises(ValueError, match=r"narrow|times as long"):
                rules[family].size(*size)
            return
        ours = prepared(opened(encoded(image)), rules[family].fitted)
        assert ours.mode == "RGB"
        assert np.array_equal(np.asarray(ours), theirs)

    each()


@given(
    size=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    least=st.integers(1, 10**6),
    more=st.integers(0, 10**7),
    patch=st.sampled_from([14, 16]),
)
@settings(max_examples=200, deadline=None)
def test_qwens_sizes_within_any_bounds(size: tuple[int, int], least: int, more: int, patch: int) -> None:
    rules = QwenImages("", 0, 2 * patch, least, least + more)
    try:
        theirs = smart_resize(*size, 2 * patch, least, least + more)
    except ValueError:
        theirs = None
    if theirs is None:
        with pytest.raises(ValueError, match="200 times"):
            rules.size(*size)
    else:
        assert rules.size(*size) == theirs


@pytest.fixture
def their_pixtral(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, without torchvision: its module imports a function of the processor that needs it."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, name, with_pillow)
    return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


def test_tokens_of_rows_are_those_of_transformers(their_pixtral: Any) -> None:
    ids = {"[IMG]": None, "[IMG_BREAK]": 8, "[IMG_END]": 9}
    processor = their_pixtral.__new__(their_pixtral)
    processor.patch_size, processor.spatial_merge_size = 14, 2
    processor.image_token, processor.image_break_token, processor.image_end_token = ids
    rules = PixtralImages("", 0, 28, 1, 1, row_end=8, image_end=9)
    for rows, columns in itertools.product(range(1, 5), repeat=2):
        written = processor.replace_image_token({"image_sizes": [(28 * rows, 28 * columns)]}, 0)
        assert rules.layout(rows, columns) == [ids[f"[{word}"] for word in written.split("[")[1:]]


def test_rows_of_an_image_in_a_prompt(folders: dict[str, Path]) -> None:
    """The ends of rows are words; each other token has a name of its own that follows from the pixels."""
    model = ServedModel.load(folders["mistral3"], "x")
    body = {"messages": [of(text("a"), part(encoded(picture(84, 56))), text("b"))]}
    plan = Planner(model, HttpLimits()).plan(parse(CHAT, json.dumps(body).encode()), {}, "standard")
    (prompt,), (image,) = plan.prompts, plan.prompts[0].images
    rows = "[IMG][IMG][IMG_BREAK]" * 2 + "[IMG][IMG][IMG_END]"
    assert model.tokenizer.decode(prompt.shown_ids) == f"<|user|>a{rows}b<|end|><|assistant|>"
    own = prompt.token_ids[image.first : image.first + image.num_tokens]
    named = image_token_ids(image_name(image.height, image.width, image.pixels), 6).tolist()
    assert [one for one in own if one >= FIRST_IMAGE_ID] == named
    assert (image.first, image.num_tokens, image.num_positions) == (2, 9, 0)


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value; None: without it."""
    *above, name = path.split(".")
    values = copy.deepcopy(values)
    inner = values
    for each in above:
        inner = inner.setdefault(each, {})
    inner[name] = value
    if value is None:
        del inner[name]
    return values


@pytest.mark.parametrize(
    ("family", "file", "path", "value", "why"),
    [
        ("glm46v", "config", "image_token_id", 5, "its config.json as 5"),
        ("glm46v", "preprocessor_config", "size.shortest_edge", 6273, "odd or not in order"),
        ("glm46v", "preprocessor_config", "temporal_patch_size", 1, "temporal_patch_size 1"),
        ("internvl", "config", "vision_config.image_size", 112, r"size [56, 56], its config.json 112"),
        ("internvl", "config", "downsample_ratio", 0.25, "or another downsample_ratio"),
        ("internvl", "config", "vision_config.patch_size", [14, 7], "patch_size must be a whole number"),
        ("internvl", "config", "vision_config.patch_size", [], "patch_size must be a whole number"),
        ("internvl", "preprocessor_config", "size", None, "size [384, 384], its config.json 56"),
        ("internvl", "processor_config", "image_seq_length", 9, "image_seq_length 9, its config.json 4"),
        ("kimi_k25", "config", "image_token_id", 5, "its config.json as 5"),
        ("kimi_k25", "config", "vision_config.merge_kernel_size", [1, 2], "another merge_kernel_size than 2"),
        (
            "kimi_k25",
            "preprocessor_config",
            "media_proc_cfg.fixed_output_tokens",
            9,
            "or fixed_output_tokens",
        ),
        (
            "kimi_k25",
            "preprocessor_config",
            "media_proc_cfg.patch_size",
            16,
            "patch_size 16, its config.json 14",
        ),
        ("kimi_k25", "preprocessor_config", "media_proc_cfg.in_patch_limit", 0, "must be a whole number"),
        ("qwen3_vl", "config", "model_type", "gemma3", "images are not built for 'gemma3'"),
        ("qwen3_vl", "config", "image_token_id", 5, "its config.json as 5"),
        ("qwen3_vl", "config", "vision_config.patch_size", 14, "patch_size 16, its config.json 14"),
        ("qwen3_vl", "config", "vision_config.patch_size", [16], "patch_size must be a whole number"),
        ("qwen3_vl", "config", "vision_config", [16], "vision_config must be an object"),
        ("qwen3_vl", "preprocessor_config", "merge_size", 4, "merge_size 4, its config.json 2"),
        ("qwen3_vl", "preprocessor_config", "resample", 2, "resample 2, which is not built"),
        ("qwen3_vl", "preprocessor_config", "do_resize", False, "do_resize False, which is not built"),
        ("qwen3_vl", "preprocessor_config", "size.shortest_edge", 1 << 20, "the first is larger"),
        ("qwen3_vl", "preprocessor_config", "size.longest_edge", 0, "longest_edge must be a whole number"),
        ("mistral3", "preprocessor_config", "size.longest_edge", 1540, "allows 1540 pixels, its tower 168"),
        ("mistral3", "processor_config", "patch_size", 16, "patch_size 16, its config.json 14"),
    ],
)
def test_why_a_checkpoint_takes_no_images(
    folders: dict[str, Path], tmp_path: Path, family: str, file: str, path: str, value: Any, why: str
) -> None:
    """Its text is served all the same."""
    for each in folders[family].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    written = tmp_path / f"{file}.json"
    values = json.loads(written.read_text()) if written.exists() else {}
    written.write_text(json.dumps(changed(values, path, value)))
    images = ServedModel.load(tmp_path, "x").images
    assert isinstance(images, NoImages)
    assert why in images.why


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_families_with_the_images_of_another(
    folders: dict[str, Path], rules: dict[str, ImageRules], tmp_path: Path, family: str
) -> None:
    for each in folders["qwen3_vl"].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for vision in (config["vision_config"], {}, None):
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "model_type": family, "vision_config": vision})
        )
        expected = NoImages() if vision is None else rules["qwen3_vl"]
        assert ServedModel.load(tmp_path, "x").images == expected


def test_files_of_the_image_processor(folders: dict[str, Path], tmp_path: Path) -> None:
    """That of the processor goes before the older one; without either the defaults are transformers'."""
    for each in folders["qwen2_5_vl"].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    older = tmp_path / "preprocessor_config.json"

    def bounds() -> tuple[int, int]:
        images = ServedModel.load(tmp_path, "x").images
        assert isinstance(images, QwenImages)
        return images.least_pixels, images.most_pixels

    options = PREPROCESSORS["qwen2_5_vl"]
    assert bounds() == (options["min_pixels"], options["max_pixels"])
    newer = tmp_path / "processor_config.json"
    newer.write_text(json.dumps({"image_processor": {"size": {"shortest_edge": 5, "longest_edge": 70_000}}}))
    assert bounds() == (5, 70_000)
    newer.unlink()
    older.unlink()
    size = Qwen2VLImageProcessorPil().size
    assert bounds() == (size["shortest_edge"], size["longest_edge"])


def test_kimis_files_as_transformers_writes_them(
    folders: dict[str, Path], rules: dict[str, ImageRules], tmp_path: Path
) -> None:
    """Beside those as published, with ``media_proc_cfg`` and another name of the token's id."""
    for each in folders["kimi_k25"].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    options = {
        "patch_size": 14,
        "merge_size": 2,
        "max_patches": 80,
        "size": {"max_height": 11, "max_width": 11},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    assert ServedModel.load(tmp_path, "x").images == rules["kimi_k25"]
    config = json.loads((tmp_path / "config.json").read_text())
    for number, fits in ((config.pop("image_token_id"), True), (7, False)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "media_placeholder_token_id": number}))
        assert isinstance(ServedModel.load(tmp_path, "x").images, ImageRules) == fits
