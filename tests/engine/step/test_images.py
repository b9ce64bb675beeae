"""A prompt with images gives what transformers gives: in any chunks, from the cache, and in decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.engines import engine_config
from support.images import PLACEHOLDER, ImagePrompt, qwen_patches, transformers_inputs
from support.models import make_checkpoint
from torch import Tensor

from splitserve.decode.rows import DecodeRows
from splitserve.decode.sequences import DecodeSequence
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState
from splitserve.engine.step.images import StepFeatures
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.messages.images import Image
from splitserve.transport.messages.messages import Peer, RequestSpec, SamplingParams, u32

BLOCK_SIZE, NUM_BLOCKS, NUM_OUTPUTS = 8, 64, 9
PEER = Peer(worker_id="d", incarnation=1, address="")
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@dataclass
class Features:
    rows: Tensor
    deep: tuple[Tensor, ...]


@dataclass
class TransformersTower:
    """Computes an image's features by transformers."""

    model: Any
    seen: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, pixels: Tensor) -> Features:
        height, width, _ = pixels.shape
        self.seen.append((height, width))
        image = Image(first=0, num_tokens=1, height=height, width=width, pixels=pixels.numpy().tobytes())
        patches, grid = qwen_patches(image)
        with torch.inference_mode():
            found = self.model.model.get_image_features(patches, torch.tensor([grid]))
        deep = getattr(found, "deepstack_features", None) or []
        return Features(found.pooler_output[0], tuple(layer[0] for layer in deep))


@dataclass
class Served:
    """One worker's schedulers around a runner."""

    runner: ModelRunner
    chunk: int

    def __post_init__(self) -> None:
        self.blocks = BlockManager(NUM_BLOCKS)
        self.scheduler = PrefillScheduler(self.blocks, BLOCK_SIZE, "kv", self.chunk, 4)
        self.num_dispatched = 0

    def answer(self, prompt: ImagePrompt, given: tuple[int, ...] = ()) -> list[int]:
        """``given``: outputs that the client has already."""
        self.num_dispatched += 1
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        spec = RequestSpec(
            request_id=f"r{self.num_dispatched}",
            epoch=0,
            dispatch=self.num_dispatched,
            coordinator=1,
            token_ids=u32([*prompt.token_ids, *given]),
            num_prompt_tokens=len(prompt.token_ids),
            sampling=params,
            deadline_s=60.0,
            rope_shift=prompt.rope_shift,
        )
        sequence = self.scheduler.add(spec, PEER, 0.0, tuple(prompt.images))
        outputs = [*given, self._first_token()]
        state = SamplingState(params, prompt.token_ids, outputs, rope_shift=spec.rope_shift)
        rows = DecodeRows(4, NUM_BLOCKS, BLOCK_SIZE)
        decoding = DecodeSequence(
            (1, 1), "r", state, list(sequence.blocks), ([], []), b"", frozenset(), 99, 60.0
        )
        rows.enter(decoding)
        while len(outputs) < NUM_OUTPUTS:
            while decoding in rows.beginning:
                rows.add_block(decoding, NUM_BLOCKS - 1 - len(decoding.blocks))
            step = rows.build()
            tokens = self.runner.execute(step.batch).token_ids
            outputs.append(int(tokens[0]))
            rows.settle(step, tokens)
        self.scheduler.unpin(sequence.key)
        return outputs

    def _first_token(self) -> int:
        while (step := self.scheduler.schedule(0.0)) is not None:
            output = self.runner.execute(step.batch)
            for row, chunk in self.scheduler.complete(step):
                if chunk.is_last:
                    return int(output.token_ids[row])
        raise AssertionError("the prompt has no last chunk")


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs: Any = make_checkpoint(folder, request.param)
    theirs.config.image_token_id = PLACEHOLDER
    for parameter in theirs.model.visual.parameters():
        parameter.data *= 4  # else what is added behind the first layer changes no token
    runner = ModelRunner(engine_config(folder, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=256))
    return runner, theirs


def two_images() -> ImagePrompt:
    prompt = ImagePrompt().add_words(11, 12, 13).add_qwen_image(3, 5, 1).add_words(14, 15)
    return prompt.add_qwen_image(4, 2, 2).add_words(16, 17, 18, 19)


def expected(theirs: Any, prompt: ImagePrompt, answer: list[int]) -> list[int]:
    theirs.model.rope_deltas = None
    with torch.inference_mode():
        logits = theirs(**transformers_inputs(prompt, answer[:-1])).logits[0, len(prompt.words) - 1 :]
    return [int(token) for token in logits.argmax(dim=-1)]


@pytest.mark.parametrize("chunk", [256, 16, 7])
def test_any_chunks_give_the_tokens_of_transformers(model: tuple[ModelRunner, Any], chunk: int) -> None:
    runner, theirs = model
    tower = TransformersTower(theirs)
    runner._images = StepFeatures(tower, runner.device)  # type: ignore[arg-type]
    prompt, served = two_images(), Served(runner, chunk)
    answer = served.answer(prompt)
    assert answer == expected(theirs, prompt, answer)
    assert tower.seen == [(84, 140), (112, 56)], "each image is computed once, whatever the chunks"
    cached = served.answer(prompt)
    assert cached == answer
    assert served.answer(prompt, given=tuple(answer[:4])) == answer, "an attempt that goes on is the same"


def test_answers_depend_on_the_image(model: tuple[ModelRunner, Any]) -> None:
    runner, theirs = model
    runner._images = StepFeatures(TransformersTower(theirs), runner.device)  # type: ignore[arg-type]
    served = Served(runner, 256)
    prompts = [
        ImagePrompt().add_words(11, 12).add_qwen_image(3, 4, seed).add_words(14, 15) for seed in range(3)
    ]
    answers = [served.answer(prompt) for prompt in prompts]
    assert [expected(theirs, p, a) for p, a in zip(prompts, answers, strict=True)] == answers
    assert len({tuple(answer) for answer in answers}) > 1, "no image was taken for another's cached blocks"
