"""A chat with images gives what transformers gives: in any chunks, from the cache, and in decode. Its prompt
is made as the coordinator makes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.engines import engine_config
from support.image_models import GLMS, INTERNVLS, data_url, encoded, make_image_model, picture
from support.their_images import their_logits

from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.generate.prompts import Prompt, prompts_of
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.decode.rows import DecodeRows
from splitserve.decode.sequences import DecodeSequence, divided
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.errors import EngineError, is_out_of_memory
from splitserve.engine.step import images
from splitserve.engine.step.batch import SamplingState
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.prefill.chunks import PrefillSequence
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.messages.images import rope_shift
from splitserve.transport.messages.messages import Peer, RequestSpec, SamplingParams, u32

BLOCK_SIZE, NUM_BLOCKS, NUM_OUTPUTS = 8, 96, 64
PEER = Peer(worker_id="d", incarnation=1, address="")
FAMILIES = (
    *GLMS,
    *INTERNVLS,
    "kimi_k25",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5_images",
    "mistral3",
    "mistral3_ministral",
    "mistral3_mistral4",
)
WIDE, TALL = encoded(picture(90, 150)), encoded(picture(120, 60, seed=1))


@dataclass
class Model:
    """``theirs``: of transformers. ``decoder``: a worker's that has no vision tower."""

    family: str
    theirs: Any
    runner: ModelRunner
    decoder: ModelRunner
    served: ServedModel

    @property
    def mark(self) -> int:
        """No answer has it: transformers would want an image for it."""
        return int(self.theirs.config.image_token_id)

    def prompt(self, *files: bytes) -> Prompt:
        images = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
        content = [{"type": "text", "text": "Look: "}, *images, {"type": "text", "text": " What is this?"}]
        asked = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": content}]})
        return prompts_of(asked, self.served)[0]

    def expected(self, prompt: Prompt, answer: list[int], *files: bytes) -> list[int]:
        """What transformers would have chosen at each of the answer's places."""
        ids = [*prompt.shown_ids, *answer[:-1]]
        logits = their_logits(self.theirs, self.family, ids, len(prompt.shown_ids) - 1, *files)
        return [int(token) for token in logits.argmax(dim=-1)]


class Served:
    """One worker's schedulers around a runner."""

    def __init__(self, model: Model, chunk: int) -> None:
        self.runner, self.decoder, self.never = model.runner, model.decoder, {model.mark: -100.0}
        self.state_blocks = self.runner.loaded.layout.state_blocks
        self.scheduler = PrefillScheduler(
            BlockManager(NUM_BLOCKS - 24), BLOCK_SIZE, "kv", chunk, 4, state_blocks=self.state_blocks
        )
        self.num_dispatched = 0

    def spec(self, prompt: Prompt, given: tuple[int, ...] = ()) -> RequestSpec:
        self.num_dispatched += 1
        return RequestSpec(
            request_id=f"r{self.num_dispatched}",
            epoch=0,
            dispatch=self.num_dispatched,
            coordinator=1,
            token_ids=u32([*prompt.token_ids, *given]),
            num_prompt_tokens=len(prompt.token_ids),
            sampling=SamplingParams(max_tokens=99, temperature=0.0, ignore_eos=True, logit_bias=self.never),
            deadline_s=60.0,
            rope_shift=rope_shift(prompt.images),
        )

    def answer(self, prompt: Prompt, given: tuple[int, ...] = ()) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt were cached. ``given``: tokens that the client has already."""
        spec = self.spec(prompt, given)
        sequence = self.scheduler.add(spec, PEER, 0.0, prompt.images)
        token, handed_over = self._prefill(sequence)
        self.decoder.loaded.pool.copy_(self.runner.loaded.pool)
        outputs = [*given, token]
        state = SamplingState(spec.sampling, list(prompt.token_ids), outputs, rope_shift=spec.rope_shift)
        spare = list(range(NUM_BLOCKS - 24, NUM_BLOCKS))  # for its second state, and for its new blocks
        copy, more = spare[: self.state_blocks], spare[self.state_blocks :]
        blocks, states = divided(handed_over, copy, spec.num_tokens)
        decoding = DecodeSequence((1, 1), "r", state, blocks, states, b"", frozenset(), 99, 60.0)
        rows = DecodeRows(4, NUM_BLOCKS, BLOCK_SIZE, self.state_blocks)
        rows.enter(decoding)
        while len(outputs) < NUM_OUTPUTS:
            while decoding in rows.beginning:
                rows.add_block(decoding, more.pop())
            step = rows.build()
            tokens = self.decoder.execute(step.batch).token_ids
            outputs.append(int(tokens[0]))
            rows.settle(step, tokens)
        self.scheduler.unpin(sequence.key)
        return outputs, sequence.num_cached_tokens

    def _prefill(self, sequence: PrefillSequence) -> tuple[int, list[int]]:
        while (step := self.scheduler.schedule(0.0)) is not None:
            output, handed_over = self.runner.execute(step.batch), sequence.handed_over
            for row, chunk in self.scheduler.complete(step):
                if chunk.is_last:
                    return int(output.token_ids[row]), list(handed_over)
        raise AssertionError("the prompt has no last chunk")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    theirs = make_image_model(folder, family)
    config = engine_config(folder, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=256)
    decoder = ModelRunner(replace(config, computes_images=False))
    assert decoder.loaded.vision is None
    return Model(family, theirs, ModelRunner(config), decoder, ServedModel.load(folder, family))


@pytest.mark.parametrize("chunk", [256, 7])
def test_any_chunks_give_the_tokens_of_transformers(model: Model, chunk: int) -> None:
    prompt, served = model.prompt(WIDE, TALL), Served(model, chunk)
    answer, cached = served.answer(prompt)
    assert cached == 0
    assert answer == model.expected(prompt, answer, WIDE, TALL)
    again, cached = served.answer(prompt)
    assert again == answer
    has_states = served.state_blocks > 0  # then a prompt begins behind a snapshot, which may be missing
    assert has_states or cached > len(prompt.token_ids) - 2 * BLOCK_SIZE
    assert served.answer(prompt, given=tuple(answer[:4]))[0] == answer, "an attempt that goes on is the same"


def test_answers_depend_on_the_image(model: Model) -> None:
    served, answers = Served(model, 256), set()
    for seed in range(3):
        file = encoded(picture(90, 150, seed=seed))
        prompt = model.prompt(file)
        answer, cached = served.answer(prompt)
        assert answer == model.expected(prompt, answer, file)
        assert cached < 2 * BLOCK_SIZE, "another image's blocks were taken"
        answers.add(tuple(answer))
    assert len(answers) > 1


def test_each_image_is_computed_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    features, compute = model.runner._images, model.runner._images._compute
    monkeypatch.setattr(
        features, "_compute", lambda image: (seen.append((image.height, image.width)), compute(image))[1]
    )
    features._kept.clear()
    prompt, served = model.prompt(WIDE, TALL), Served(model, 7)
    served.answer(prompt)
    assert seen == [(image.height, image.width) for image in prompt.images]
    served.answer(prompt)
    assert len(seen) == 2, "tokens behind the last full block are computed again, their image is not"
    monkeypatch.setattr(images, "MOST_BYTES", 0)
    Served(model, 7).answer(prompt)
    assert not features._kept


@pytest.mark.parametrize("times", [1, 2])
def test_an_image_without_memory_fails_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Not as a step that is out of memory: its tower takes as much in a smaller one."""
    features, tower, left = model.runner._images, model.runner._images._tower, times

    def short(pixels: torch.Tensor) -> object:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert tower is not None
        return tower(pixels)

    features._kept.clear()
    monkeypatch.setattr(features, "_tower", short)
    prompt = model.prompt(encoded(picture(90, 150, seed=8)))
    if times == 1:
        assert len(Served(model, 256).answer(prompt)[0]) == NUM_OUTPUTS
        return
    with pytest.raises(EngineError, match="does not fit into the worker's memory") as raised:
        Served(model, 256).answer(prompt)
    assert not is_out_of_memory(raised.value)


def test_what_a_model_drafts_behind_is_a_word(model: Model) -> None:
    """No row of the embeddings belongs to a token of an image."""
    prompt, served = model.prompt(WIDE), Served(model, 7)
    served.scheduler = PrefillScheduler(BlockManager(72), BLOCK_SIZE, "kv", 7, 4, model_drafts=True)
    served.scheduler.add(served.spec(prompt), PEER, 0.0, prompt.images)
    found: list[int] = []
    while (step := served.scheduler.schedule(0.0)) is not None:
        assert step.batch.next_ids is not None
        found += step.batch.next_ids.tolist()
        served.scheduler.complete(step)
    assert found[-1] == -1
    assert 0 in found
    assert max(found) < served.runner.config.vocab_size
