"""Chats with images that are refused: by a sentence that names the field, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from support.http_fakes import FakeDispatcher
from support.image_models import (
    CHAT,
    CLAUDE,
    LLAMA,
    PAD,
    RESPONSES,
    TALL,
    WIDE,
    data_url,
    in_base64,
    of,
    part,
    source,
    text,
)

from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate import image_prompts
from splitserve.coordinator.generate.plan import Planner, parse
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.text.served_model import ServedModel

NO_FETCH = "this server fetches nothing"
INPUT_IMAGE = {"type": "input_image", "image_url": data_url(WIDE)}
BLOCK = {"type": "image", "source": source(WIDE)}
TWO = [text("look "), part(WIDE), text(" and "), part(TALL)]
ONE = [of(text("look "), part(WIDE))]


def claude(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [*messages]}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [{"role": "user", "content": f"a {PAD}"}]}, "1 times <|image_pad|> for 0 images"),
        (CHAT, {"messages": [of(text(PAD), part(WIDE))]}, "2 times <|image_pad|> for 1 images"),
        (CHAT, {"messages": [of(*[part(WIDE)] * 257)]}, "257 images"),
        (CHAT, {"messages": [of(*[part(TALL)] * 250)]}, "2048 tokens, but your prompt has at least 2"),
        (CHAT, {"messages": ONE, "prompt_logprobs": 0}, "prompt_logprobs: is not built"),
        (CHAT, {"messages": ONE, "truncate_prompt_tokens": 9}, "truncate_prompt_tokens: is not built"),
        (CHAT, {"messages": ONE, "mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs"),
        (CHAT, {"messages": [of(text("a"), part(b"GIF89a"))]}, "messages[0].content: part 1 is an"),
        (CHAT, {"messages": [of(part(WIDE, detail="best"))]}, "detail"),
        (CHAT, {"messages": [of({"type": "image_url", "image_url": "https://a/b.png"})]}, NO_FETCH),
        (CHAT, {"messages": [of({"type": "image_url", "image_url": "data:;base64,*"})]}, "is no base64"),
        (CHAT, {"messages": [of({"type": "image_url"})]}, "image_url.url"),
        (RESPONSES, {"input": [of({"type": "input_image", "file_id": "a"})]}, "input[0].content[0].file_id"),
        (RESPONSES, {"input": [of(INPUT_IMAGE, role="assistant")]}, "input[0].content[0].type"),
        (RESPONSES, {"input": [of({**INPUT_IMAGE, "detail": 5})]}, "input[0].content[0].detail"),
        (RESPONSES, {"input": [of({**INPUT_IMAGE, "image_url": data_url(b"a")})]}, "input[0].content: part"),
        (CLAUDE, claude(of({"type": "image", "source": {"type": "url", "url": "https://a"}})), NO_FETCH),
        (CLAUDE, claude(of(BLOCK, role="assistant")), "no block of type"),
        (CLAUDE, claude(of({**BLOCK, "transformations": {"oversized_image": "error"}})), "transformations"),
        ("/api/generate", {"prompt": "a", "raw": True, "images": [in_base64(WIDE)]}, "images: not allowed"),
        (LLAMA, {"messages": [{"role": "user"}], "images": ["aGk="]}, "they stand in messages"),
    ],
)  # fmt: skip
async def test_what_is_not_taken_is_refused_by_name(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any], named: str
) -> None:
    answer = await http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert named in answer.text
    assert not dispatcher.requests


@pytest.mark.parametrize(
    ("bound", "value", "named"),
    [
        ("MAX_PIXEL_BYTES", 20_000, "messages: as the model takes them, the images have more than"),
        ("MAX_PIXELS_IN_ALL", 10_000, "part 3 is an image, but with those before it has more than"),
    ],
)
def test_bounds_of_all_images_together(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, named: str
) -> None:
    """Set so that the first image fits, and the second does not."""
    monkeypatch.setattr(image_prompts, bound, value)
    planner, body = Planner(model, HttpLimits()), {"messages": [of(*TWO)]}
    with pytest.raises(InvalidRequest) as refused:
        planner.plan(parse(CHAT, orjson.dumps(body)), {}, "standard")
    assert named in refused.value.message


def test_the_demo_model_takes_no_images() -> None:
    demo = Path(__file__).parents[3] / "deploy" / "demo_model"
    planner = Planner(ServedModel.load(demo, "splitserve-demo"), HttpLimits())
    with pytest.raises(InvalidRequest) as refused:
        planner.plan(parse(CHAT, orjson.dumps({"messages": ONE})), {}, "standard")
    assert refused.value.message == "messages[0].content: the model 'splitserve-demo' takes no images"
