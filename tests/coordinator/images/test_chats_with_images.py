"""Chats with images in all dialects: the tokens, pixels and positions that workers get, and what clients see
of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from openai import AsyncOpenAI
from support.batch_server import serving
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
    encoded,
    in_base64,
    of,
    part,
    picture,
    source,
    text,
)

from splitserve.coordinator.generate.api import LARGE_BODY_BYTES
from splitserve.coordinator.generate.plan import Planner, parse
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.transport.messages.images import FIRST_IMAGE_ID, image_name, image_token_ids

GRIDS = [(2, 3), (5, 2)]
"""Rows and columns of their features: none has as many pixels as must be resized to fit."""
MARKS = "<|vision_start|>", "<|vision_end|>"


BLOCK = {"type": "image", "source": source(WIDE)}
TWO = [text("look "), part(WIDE), text(" and "), part(TALL)]
ONE = [of(text("look "), part(WIDE))]


async def asked(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> Request:
    more = {"max_tokens": 50} if path == CLAUDE else {}
    answer = await http.post(path, json={"model": "tiny", "temperature": 0, **more, **body})
    assert answer.status_code == 200, answer.text
    return dispatcher.requests[-1]


def shown(request: Request, model: ServedModel) -> str:
    """Return the prompt as text, each image's tokens as ``PAD``; checks them against the image."""
    ids = list(request.prompt_token_ids)
    for image in request.images:
        own = slice(image.first, image.first + image.num_tokens)
        name = image_name(image.height, image.width, image.pixels)
        assert image.name == name
        assert ids[own] == image_token_ids(name, image.num_tokens).tolist()
        ids[own] = [model.images.token_id] * image.num_tokens  # type: ignore[union-attr]
    assert max(ids) < FIRST_IMAGE_ID
    return model.tokenizer.decode(ids)


def filled(prompt: str, *grids: tuple[int, int]) -> str:
    """Return a prompt with the tokens of images of such grids for each ``#``."""
    for rows, columns in grids:
        prompt = prompt.replace("#", f"{MARKS[0]}{PAD * (rows * columns)}{MARKS[1]}", 1)
    return prompt


async def test_tokens_pixels_and_positions(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    request = await asked(http, dispatcher, CHAT, {"messages": [{"role": "user", "content": TWO}]})
    assert shown(request, model) == filled("<|user|>look # and #<|end|><|assistant|>", *GRIDS)
    assert [(image.height // 32, image.width // 32) for image in request.images] == GRIDS
    tall = np.frombuffer(request.images[1].pixels, np.uint8).reshape(160, 64, 3)
    assert np.array_equal(tall, np.asarray(picture(160, 64, seed=1)))
    request.epoch = request.dispatch = 1
    assert request.spec(1, 0.0).rope_shift == 3 - 6 + 5 - 10


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT, {"messages": [{"role": "user", "content": TWO}]}, "<|user|>look # and #"),
        (
            CHAT,
            {"messages": [of(part(WIDE, detail="low"), part(TALL, detail="high"))]},
            "<|user|>##",
        ),
        (
            CHAT,
            {"messages": [of({**part(WIDE), "image_url": data_url(WIDE)}, role="system"), *ONE]},
            "<|system|>#<|end|><|user|>look #",
        ),
        (
            RESPONSES,
            {
                "instructions": "Be kind.",
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "look "},
                            {"type": "input_image", "image_url": data_url(WIDE), "detail": "auto"},
                        ],
                    },
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": data_url(TALL)}],
                    },
                ],
            },
            "<|system|>Be kind.<|end|><|user|>look #<|end|><|assistant|><|end|><|tool|>#",
        ),
        (
            CLAUDE,
            {
                "messages": [
                    of({**BLOCK, "transformations": {"oversized_image": "downsize"}}, text("look")),
                    of({"type": "tool_use", "id": "t", "name": "f", "input": {}}, role="assistant"),
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "is_error": True,
                                "content": [text("see "), {"type": "image", "source": source(TALL)}],
                            }
                        ],
                    },
                ]
            },
            "<|user|>#look<|end|><|assistant|><|end|><|tool|>Error: see #",
        ),
        (
            LLAMA,
            {"messages": [{"role": "user", "content": "look", "images": [in_base64(WIDE), in_base64(TALL)]}]},
            "<|user|>##look",
        ),
        ("/api/generate", {"prompt": "look", "images": [in_base64(WIDE)]}, "<|user|>#look"),
        ("/api/generate", {"images": [in_base64(WIDE)]}, "<|user|>#"),
    ],
)  # fmt: skip
async def test_images_of_each_dialect(
    http: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    path: str,
    body: dict[str, Any],
    prompt: str,
) -> None:
    request = await asked(http, dispatcher, path, body)
    grids = [(image.height // 32, image.width // 32) for image in request.images]
    assert shown(request, model) == filled(f"{prompt}<|end|><|assistant|>", *grids)
    assert grids in (GRIDS, GRIDS[:1], [GRIDS[0]] * 2)


async def test_an_image_in_a_large_body_is_read_all_the_same(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    """The reader process plans it."""
    large = encoded(picture(300, 400))
    assert len(large) > 1 << 17
    body = {"messages": [{"role": "user", "content": [part(large)]}]}
    request = await asked(http, dispatcher, CHAT, body)
    rows, columns = request.images[0].height // 32, request.images[0].width // 32
    assert rows * columns <= 40
    assert shown(request, model) == filled("<|user|>#<|end|><|assistant|>", (rows, columns))


async def test_no_image_takes_a_thread_that_other_prompts_wait_for(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four files of 8 KB may have 256 megapixels: seconds of work."""
    body = {"messages": ONE}
    assert len(orjson.dumps(body)) < LARGE_BODY_BYTES
    monkeypatch.setattr(type(model.tokenizer), "aside", None)
    request = await asked(http, dispatcher, CHAT, body)
    assert shown(request, model) == filled("<|user|>look #<|end|><|assistant|>", GRIDS[0])
    assert (await http.post("/tokenize", json=body)).json()["count"] == len(request.prompt_token_ids)


@pytest.mark.parametrize("background", [False, True])
async def test_a_stored_response_goes_on_with_its_images(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel, background: bool
) -> None:
    image = {"type": "input_image", "image_url": data_url(WIDE)}
    body = {"input": [of(image)], "temperature": 0, "background": background}
    first = (await http.post(RESPONSES, json=body)).json()
    while first["status"] != "completed":
        assert first["status"] in ("queued", "in_progress")
        first = (await http.get(f"{RESPONSES}/{first['id']}")).json()
    images = dispatcher.requests[-1].images
    request = await asked(
        http, dispatcher, RESPONSES, {"input": "More?", "previous_response_id": first["id"]}
    )
    assert len(dispatcher.requests) == 2
    assert [image.pixels for image in request.images] == [image.pixels for image in images] != []
    assert shown(request, model).startswith(filled("<|user|>#<|end|><|assistant|>", GRIDS[0]))


async def test_clients_see_ids_of_the_tokenizer_alone(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    body = {"messages": ONE, "return_token_ids": True, "n": 2, "temperature": 0}
    answer = (await http.post(CHAT, json=body)).json()
    ids = answer["prompt_token_ids"]
    assert model.tokenizer.decode(ids) == filled("<|user|>look #<|end|><|assistant|>", GRIDS[0])
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert len({id(request.images) for request in dispatcher.requests}) == 1  # of both choices
    counted = (await http.post("/tokenize", json={"messages": ONE, "return_token_strs": True})).json()
    assert (counted["tokens"], counted["count"]) == (ids, len(ids))
    assert counted["token_strs"].count(PAD) == 6
    claude = {
        "messages": [{"role": "user", "content": [text("look "), {"type": "image", "source": source(WIDE)}]}]
    }
    counted = (await http.post(f"{CLAUDE}/count_tokens", json=claude)).json()
    assert counted == {"input_tokens": len(ids)}
    shows = (await http.post("/api/show", json={"model": "tiny"})).json()
    assert "vision" in shows["capabilities"]


async def test_an_answer_that_goes_on_with_the_assistants_words(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    half = {"role": "assistant", "content": [text("It is "), part(TALL), text(" a")]}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    request = await asked(http, dispatcher, CHAT, {"messages": [*ONE, half], **more})
    assert shown(request, model) == filled("<|user|>look #<|end|><|assistant|>It is # a", *GRIDS)


async def test_images_in_a_batch(dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "tiny", "messages": ONE}}
    async with serving(dispatcher, model, tmp_path / "batches.db") as client:
        await in_batch(client, line)
    (request,) = dispatcher.requests
    assert shown(request, model) == filled("<|user|>look #<|end|><|assistant|>", GRIDS[0])


async def in_batch(client: AsyncOpenAI, line: dict[str, Any]) -> None:
    file = await client.files.create(file=("a.jsonl", orjson.dumps(line)), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


def test_what_stays_of_a_prompt_while_it_runs(model: ServedModel) -> None:
    request = parse(CHAT, orjson.dumps({"messages": [{"role": "user", "content": [*TWO, text("x" * 200)]}]}))
    planner = Planner(model, HttpLimits())
    assert not planner.is_quick(parse(CHAT, orjson.dumps({"messages": ONE})))
    plan = planner.plan(request, {}, "standard")
    (prompt,) = plan.prompts
    assert len(prompt.text) < 100
    assert prompt.num_bytes == 8 * len(prompt.token_ids) + len(prompt.text) + 3 * 32 * 32 * (6 + 10)
    again = pickle.loads(pickle.dumps(plan))
    assert again.prompts == plan.prompts
    assert again.num_prompt_bytes == prompt.num_bytes
