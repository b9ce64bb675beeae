"""A model drafts by the layer behind its last: as a plain reference does, however the tokens came there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence, make_batch
from support.families import VOCAB_SIZE
from support.prediction import (
    BLOCK_SIZE,
    FAMILIES,
    NUM_BLOCKS,
    Reference,
    make_predicting,
    make_runner,
    predicting_batch,
    random_tokens,
    run,
    sequence_of,
    with_draft_rows,
)

from splitserve.engine.step.model_runner import ModelRunner
from splitserve.transport.messages.messages import SamplingParams

PROMPT_LEN = 40


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return make_predicting(folder, request.param), folder


@pytest.mark.parametrize("chunks", [[40], [7, 16, 17], [1, 39], [39, 1]])
def test_drafts_behind_a_prompt_however_it_is_cut(model: tuple[Reference, Path], chunks: list[int]) -> None:
    reference, folder = model
    runner, prompt = make_runner(folder), random_tokens(PROMPT_LEN, seed=3)
    sequence = sequence_of(prompt, seed=1)
    for count in chunks:
        output = run(runner, [(sequence, count)], num_drafts=3)
        assert (output.drafts != {}) == (count == chunks[-1])
    assert output.drafts[0] == reference.drafts(sequence.token_ids, 3)
    assert len(set(output.drafts[0])) > 1
    for _ in range(18):  # over the ends of blocks; a rejected draft's slots are written anew
        output = run(runner, [(sequence, 1)], num_drafts=3)
        assert output.drafts[0] == reference.drafts(sequence.token_ids, 3)
    assert sequence.output == reference.answer(prompt, 19)


def test_a_cached_prefix_goes_as_far_as_the_slot_at_its_border(model: tuple[Reference, Path]) -> None:
    """The slot of a prefix's last token has the keys and values of the token that followed it there."""
    reference, folder = model
    runner, first = make_runner(folder), random_tokens(PROMPT_LEN, seed=3)
    there = sequence_of(first, seed=1)
    run(runner, [(there, PROMPT_LEN)])
    prefix, (other,) = first[: 2 * BLOCK_SIZE], random_tokens(1, seed=9)
    assert other != first[2 * BLOCK_SIZE]
    unused = [block for block in range(NUM_BLOCKS) if block not in there.blocks]
    for follows, exact in ((first[2 * BLOCK_SIZE], True), (other, False)):
        prompt = [*prefix, follows, *random_tokens(6, seed=4)]
        sequence = HandSequence(prompt, [*there.blocks[:2], *unused[:2]], num_computed=len(prefix))
        border = border_slot(runner, there).clone()
        drafts = run(runner, [(sequence, 7)], num_drafts=3).drafts[0]
        assert torch.equal(border_slot(runner, there), border)
        if exact:
            assert drafts == reference.drafts(sequence.token_ids, 3)
        assert sequence.output == reference.answer(prompt, 1)


def border_slot(runner: ModelRunner, sequence: HandSequence) -> torch.Tensor:
    return runner.kv_cache.pool[sequence.blocks[1], -1]


@pytest.mark.parametrize("guided", [(0, 0), (2, 1), (1, 3), (3, 0), (3, 3)])
def test_drafts_go_on_behind_the_last_row_that_was_right(
    model: tuple[Reference, Path], guided: tuple[int, int]
) -> None:
    """Two sequences with three drafted tokens each, the first ones right. A row wants fewer drafts the
    further on it is, as where the model's context ends."""
    reference, folder = model
    runner = make_runner(folder)
    sequences = [sequence_of(random_tokens(count, seed=count), seed=1) for count in (29, 13)]
    sequences[1].blocks = [block for block in range(NUM_BLOCKS) if block not in sequences[0].blocks][:3]
    for sequence in sequences:
        run(runner, [(sequence, len(sequence.prompt))])
    answers = [reference.answer(sequence.token_ids, 4) for sequence in sequences]
    drafted = [
        [(token + (i >= right)) % VOCAB_SIZE for i, token in enumerate(answer[:3])]
        for right, answer in zip(guided, answers, strict=True)
    ]
    num_drafts = [3, 3, 3, 2, 1, 3, 2, 0]
    batch = with_draft_rows(list(zip(sequences, drafted, strict=True)), BLOCK_SIZE, num_drafts)
    output = runner.execute(batch)
    rows = [1 + 3 * i + right if right else i for i, right in enumerate(guided)]
    expected = {}
    for row, right, sequence, answer in zip(rows, guided, sequences, answers, strict=True):
        assert output.token_ids[row] == answer[right]
        sequence.output += answer[: right + 1]
        sequence.num_computed += right + 1
        if count := num_drafts[row]:
            expected[row] = reference.drafts(sequence.token_ids, count)
    assert output.drafts == expected
    for _ in range(4):  # what wrong rows have written is written anew
        found = run(runner, [(sequence, 1) for sequence in sequences], num_drafts=2).drafts
        assert found == {i: reference.drafts(s.token_ids, 2) for i, s in enumerate(sequences)}


def test_without_drafts_no_attention_and_no_head_is_computed(
    model: tuple[Reference, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, folder = model
    runner, sequence = make_runner(folder), sequence_of(random_tokens(PROMPT_LEN, seed=3), seed=1)
    layer = runner.loaded.decoder.prediction
    assert layer is not None

    def fail(*_: object) -> None:
        raise AssertionError("no drafts are wanted")

    with monkeypatch.context() as patched:
        patched.setattr(layer, "finish", fail)
        run(runner, [(sequence, 33)])
        run(runner, [(sequence, 7)])
        assert run(runner, [(sequence, 1)]).drafts == {}
        for _ in range(12):  # fed by the step before, as steps that are made ahead
            batch, zero = make_batch([(sequence, 1)], BLOCK_SIZE), np.zeros(1, np.int32)
            batch = replace(batch, token_ids=zero, fed_from=zero)
            sequence.output.append(int(runner.execute(batch).token_ids[0]))
            sequence.num_computed += 1
    assert run(runner, [(sequence, 1)], num_drafts=3).drafts[0] == reference.drafts(sequence.token_ids, 3)


def test_rows_and_chunks_in_one_step(model: tuple[Reference, Path]) -> None:
    reference, folder = model
    runner = make_runner(folder)
    row, chunk = (sequence_of(random_tokens(count, seed=count), seed=1) for count in (21, 50))
    chunk.blocks = [block for block in range(NUM_BLOCKS) if block not in row.blocks][:5]
    run(runner, [(row, 21)])
    for count in (20, 30):
        chunks = predicting_batch([(chunk, count)], BLOCK_SIZE)
        rows = predicting_batch([(row, 1)], BLOCK_SIZE, num_drafts=3)
        first, second = runner.execute(rows.followed_by(chunks)).split(1)
        row.output.append(int(first.token_ids[0]))
        row.num_computed, chunk.num_computed = row.num_computed + 1, chunk.num_computed + count
        assert first.drafts == {0: reference.drafts(row.token_ids, 3)}
        assert second.drafts == {}
    chunk.output.append(int(second.token_ids[0]))
    found = run(runner, [(row, 1), (chunk, 1)], num_drafts=2).drafts
    assert found == {i: reference.drafts(s.token_ids, 2) for i, s in enumerate((row, chunk))}


def test_values_are_those_of_the_reference(tmp_path: Path) -> None:
    reference, prompt = make_predicting(tmp_path, "glm4_moe"), random_tokens(PROMPT_LEN, seed=3)
    runner, sequence = make_runner(tmp_path), sequence_of(prompt, seed=1)
    run(runner, [(sequence, 17)])
    run(runner, [(sequence, 23)])
    pool = runner.kv_cache.pool[sequence.blocks]
    assert pool.shape[1] == 4
    values = pool[:, -1, 1].transpose(1, 2).flatten(0, 1)  # [slots, KVH, D]
    torch.testing.assert_close(values[:40], reference.values(sequence.token_ids), rtol=1e-4, atol=1e-4)
    assert values[40:].isnan().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_answers_and_keys_are_those_without(family: str, tmp_path: Path) -> None:
    make_predicting(tmp_path, family)
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=5, logprobs=3)
    found = []
    for mtp in (False, True):
        runner = make_runner(tmp_path, "bfloat16", mtp, exact=True)
        sequence = replace(sequence_of(random_tokens(PROMPT_LEN, seed=3), seed=1), params=params)
        reported = [run(runner, [(sequence, count)]).logprobs for count in (9, 31)]
        reported += [run(runner, [(sequence, 1)], 2 * mtp).logprobs for _ in range(12)]
        layers = runner.kv_cache.layer_bytes_view[sequence.blocks[:3], :3]
        assert layers.any()
        found.append((sequence.output, reported, layers.tobytes()))
    assert found[0] == found[1]


SPARSE = ("deepseek_v32", "glm_moe_dsa")  # have no narrow KV cache


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (family, settings)
        for family in FAMILIES
        for settings in ({"dtype": "bfloat16"}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"})
        if "dtype" in settings or family not in SPARSE
    ],
)
def test_narrow_types_draft_mostly_the_same(family: str, settings: dict[str, str], tmp_path: Path) -> None:
    reference, runner = make_predicting(tmp_path, family), make_runner(tmp_path, **settings)
    equal = 0
    for seed in range(20):
        sequence = sequence_of(random_tokens(PROMPT_LEN, seed), seed=1)
        (draft,) = run(runner, [(sequence, PROMPT_LEN)], num_drafts=1).drafts[0]
        equal += draft == reference.drafts(sequence.token_ids, 1)[0]
    assert equal >= 8, "another choice of experts moves a draft; chance makes none equal"
