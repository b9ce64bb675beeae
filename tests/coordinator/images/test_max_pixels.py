"""``--image-max-pixels``: an operator's bound of the tokens of one image."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.image_models import CHAT, encoded, of, part, picture, write_image_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from splitserve.coordinator.errors import CannotStart
from splitserve.coordinator.generate.plan import Planner, parse
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.images.families import (
    GlmImages,
    InternVLImages,
    KimiImages,
    PixtralImages,
    QwenImages,
)
from splitserve.coordinator.images.rules import ImageRules
from splitserve.coordinator.text.served_model import ServedModel

QWEN = QwenImages("<i>", 1, 32, 4096, 32 * 32 * 40)
PIXTRAL = PixtralImages("<i>", 1, 28, 154, 154, row_end=2, image_end=3)
GLM = GlmImages("<i>", 1, 28, 3136, 28 * 28 * 40)
INTERNVL = InternVLImages("<i>", 1, 28, 56, 1, 6, 2, 3)
KIMI = KimiImages("<i>", 1, 28, 14, 80, 11)
SIDE = st.integers(1, 600)


@given(height=SIDE, width=SIDE, bound=st.integers(4096, 50_000))
@pytest.mark.parametrize("rules", [GLM, INTERNVL, KIMI, QWEN, PIXTRAL])
def test_no_image_is_larger(rules: ImageRules, height: int, width: int, bound: int) -> None:
    try:
        usual = rules.fitted(Image.new("RGB", (width, height))).size
    except ValueError:  # too narrow
        return
    found = rules.bounded_by(bound).fitted(Image.new("RGB", (width, height))).size
    assert found[0] * found[1] <= bound
    assert all(side > 0 and side % rules.side == 0 for side in found)
    if usual[0] * usual[1] <= bound and rules not in (GLM, QWEN):
        assert found == usual


@given(height=SIDE, width=SIDE, bound=st.integers(16 * 1024, 32 * 32 * 40))
def test_qwens_images_are_those_of_its_processor_with_such_a_bound(
    height: int, width: int, bound: int
) -> None:
    if max(height, width) > 8 * min(height, width):
        return
    theirs = smart_resize(height, width, 32, 4096, bound)
    assert QWEN.bounded_by(bound).bounded_size(height, width) == tuple(theirs)


def test_a_servers_model(tmp_path: Path) -> None:
    write_image_model(tmp_path, "qwen3_vl")
    body, counts = {"messages": [of(part(encoded(picture(300, 400))))]}, []
    for bound in (None, 8 * 32 * 32):
        planner = Planner(ServedModel.load(tmp_path, "x", image_max_pixels=bound), HttpLimits())
        (prompt,) = planner.plan(parse(CHAT, orjson.dumps(body)), {}, "standard").prompts
        counts.append(prompt.images[0].num_tokens)
    assert counts == [35, 6]
    bounded = QwenImages("<i>", 1, 32, 5, 32 * 32 * 40)
    with pytest.raises(ValueError, match="--image-max-pixels 1023: the model's images have 1024 or more"):
        bounded.bounded_by(1023)
    with pytest.raises(CannotStart, match="--image-max-pixels 4095: the model's images have 4096 or more"):
        ServedModel.load(tmp_path, "x", image_max_pixels=4095)


def test_a_model_without_images() -> None:
    demo = Path(__file__).parents[3] / "deploy" / "demo_model"
    with pytest.raises(CannotStart, match="--image-max-pixels 9: the model takes no images"):
        ServedModel.load(demo, "x", image_max_pixels=9)
