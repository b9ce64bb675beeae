"""Bugs for test_teeth.py, put into what is done with images in prompts."""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace

from splitserve.coordinator.lifecycle import state_machine
from splitserve.decode import core, moving, text_match
from splitserve.engine.step import batch
from splitserve.prefill import chunks

Patch = pytest.MonkeyPatch


def send_images_with_the_first_attempt_alone(patch: Patch) -> None:
    prefill = state_machine.Prefill

    def broken(**fields: Any) -> Any:
        return prefill(**{**fields, "images": () if fields["spec"].epoch else fields["images"]})

    patch.setattr(state_machine, "Prefill", broken)


def generate_at_the_places_of_tokens(patch: Patch) -> None:
    state = core.SamplingState
    patch.setattr(core, "SamplingState", lambda *args, rope_shift, **more: state(*args, **more))


def move_without_the_shift(patch: Patch) -> None:
    patch.setattr(moving, "replace", lambda spec, **more: replace(spec, rope_shift=0, **more))


def begin_each_chunk_with_the_first_feature(patch: Patch) -> None:
    part = chunks.ImagePart
    patch.setattr(chunks, "ImagePart", lambda *args: replaced(part(*args), skipped=0))


def take_positions_from_the_first_part_of_a_step(patch: Patch) -> None:
    joined = batch.joined_rope
    patch.setattr(batch, "joined_rope", lambda parts: None if parts[0].rope is None else joined(parts))


def name_images_alike(patch: Patch) -> None:
    from simulation import images

    patch.setattr(images, "image_name", lambda *_: bytes(16))


def draft_images(patch: Patch) -> None:
    patch.setattr(text_match, "FIRST_IMAGE_ID", 1 << 31)


BUGS = [
    (send_images_with_the_first_attempt_alone, "images"),
    (generate_at_the_places_of_tokens, "images"),
    (move_without_the_shift, "images"),
    (begin_each_chunk_with_the_first_feature, "images"),
    (take_positions_from_the_first_part_of_a_step, "images"),
    (name_images_alike, "images"),
    (draft_images, "images"),
]
