"""A model that takes images: their features, and what it answers, beside those of the host's CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from ...engine.cache.block_manager import BlockManager
from ...engine.engine_config import EngineConfig
from ...engine.settings import WorkerSettings
from ...engine.step.model_runner import ModelRunner
from ...prefill.scheduler import PrefillScheduler
from ...transport.messages.images import Image, image_name, image_token_ids, rope_shift
from ...transport.messages.messages import Peer, RequestSpec, SamplingParams, u32
from ..kernels.kernel_inputs import relative_error
from ..models import make_random_qwen_vl
from .line import Line, Place, checked

FEATURES_ERROR, LOGPROBS_ERROR = 0.05, 0.2  # bfloat16 on both sides
ROWS, COLUMNS, SIDE = 4, 7, 32  # tokens of the image, and pixels of one


def images(place: Place) -> Iterator[Line]:
    folder = place.work / "qwen-vl"
    make_random_qwen_vl(folder, small=not place.big)
    features, logprobs = _computed(folder, "cpu")
    ours, our_logprobs = _computed(folder, place.device)
    what = "features of an image, beside a CPU's"
    yield checked(what, relative_error(ours, features), FEATURES_ERROR)
    error = float(np.abs(our_logprobs - logprobs).max())
    yield checked("logprobs of the token behind an image, beside a CPU's", error, LOGPROBS_ERROR)


def _computed(folder: Path, device: str) -> tuple[Tensor, np.ndarray]:
    """Features [tokens, size], and logprobs of ten tokens behind a prompt with the image."""
    pixels = Random(3).randbytes(3 * ROWS * COLUMNS * SIDE * SIDE)
    height, width, count = ROWS * SIDE, COLUMNS * SIDE, ROWS * COLUMNS
    name = image_name(height, width, pixels)
    image = Image(
        first=2, num_tokens=count, height=height, width=width, pixels=pixels, name=name, num_positions=COLUMNS
    )
    settings = WorkerSettings(model=folder, device=device, num_blocks=16, max_model_len=256, insecure=True)
    runner = ModelRunner(EngineConfig(settings))
    size, tower = runner.kv_cache.layout.block_size, runner.loaded.vision
    assert tower is not None, "the model takes images"
    of_image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3)
    features = tower(of_image.to(runner.device)).rows.float().cpu()
    spec = RequestSpec(
        request_id="r",
        epoch=0,
        dispatch=1,
        coordinator=1,
        token_ids=u32([5, 6, *image_token_ids(name, count).tolist(), 7, 8]),
        num_prompt_tokens=count + 4,
        sampling=SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(range(3, 13))
        ),
        deadline_s=60.0,
        rope_shift=rope_shift((image,)),
    )
    scheduler = PrefillScheduler(BlockManager(16), size, "kv", 256, 1)
    scheduler.add(spec, Peer(worker_id="d", incarnation=1, address=""), 0.0, (image,))
    step = scheduler.schedule(0.0)
    assert step is not None, "there is room"
    output = runner.execute(step.batch)
    del runner, tower
    gc.collect()
    return features, np.array(output.logprobs[0].top_logprobs)
