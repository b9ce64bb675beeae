"""InternVL's images: tiles, a thumbnail, and the tokens around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.image_models import CHAT, encoded, of, part, picture, text, write_image_model
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from splitserve.coordinator.generate.plan import Planner, parse
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.images.families import InternVLImages
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.transport.messages.images import FIRST_IMAGE_ID

SIDE = st.integers(1, 3000)


@given(height=SIDE, width=SIDE, least=st.integers(1, 4), more=st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_numbers_of_tiles_are_those_of_transformers(height: int, width: int, least: int, more: int) -> None:
    rules = InternVLImages("", 0, 28, 448, least, least + more, 1, 2)
    options = {"min_patches": least, "max_patches": least + more, "crop_to_patches": True}
    theirs = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448})
    rows, columns = (side // 448 for side in rules.size(height, width))
    expected = theirs.get_number_of_image_patches(height, width, options)
    assert rows * columns + (rows * columns > 1) == expected


@pytest.mark.parametrize(("size", "tiles"), [((56, 56), 1), ((70, 190), 4), ((400, 260), 7)])
def test_tokens_of_a_prompt(tmp_path: Path, size: tuple[int, int], tiles: int) -> None:
    write_image_model(tmp_path, "internvl")
    model = ServedModel.load(tmp_path, "x")
    body = {"messages": [of(text("a"), part(encoded(picture(*size))), text("b"))]}
    (prompt,) = (
        Planner(model, HttpLimits()).plan(parse(CHAT, json.dumps(body).encode()), {}, "standard").prompts
    )
    (image,) = prompt.images
    theirs = InternVLProcessor.__new__(InternVLProcessor)
    theirs.start_image_token, theirs.image_token, theirs.end_image_token = "<img>", "<IMG_CONTEXT>", "</img>"
    theirs.image_seq_length = 4
    written = theirs.replace_image_token({"num_patches": [tiles]}, 0)
    assert model.tokenizer.decode(prompt.shown_ids) == f"<|user|>a{written}\nb<|end|><|assistant|>"
    own = prompt.token_ids[image.first : image.end]
    assert [one >= FIRST_IMAGE_ID for one in own] == [False, *[True] * (4 * tiles), False]
    assert (image.height, image.width, image.num_positions) == (56 * tiles, 56, 0)
    thumbnail = Image.frombytes("RGB", (56, 56), image.pixels[-56 * 56 * 3 :])
    assert thumbnail == picture(*size).resize((56, 56), Image.Resampling.BICUBIC)
