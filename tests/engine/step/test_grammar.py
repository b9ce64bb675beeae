"""A grammar's masks: what they let through follows the grammar, a new matcher that reads the output is where
the old one was."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from support.families import EOS_TOKEN_ID, VOCAB_SIZE
from support.models import write_byte_tokenizer
from tokenizers import Tokenizer

from splitserve.bench.kernels.sampled_rows import booked
from splitserve.engine.errors import GrammarError
from splitserve.engine.step import grammar
from splitserve.engine.step.batch import SamplingState
from splitserve.engine.step.constraint import CompileGrammar, TokenMatcher
from splitserve.engine.step.grammar import GrammarCompiler, GrammarThread
from splitserve.engine.step.sampler import Sampler, forbid_tokens
from splitserve.kernels.reference import TorchKernels
from splitserve.transport.messages.messages import SamplingParams
from splitserve.transport.messages.token_rules import TokenRules

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder, VOCAB_SIZE, [EOS_TOKEN_ID])


def allowed(words: np.ndarray) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return [int(token) for token in bits.nonzero()[0]]


def walk(matcher: TokenMatcher, seed: int) -> list[int]:
    """Random tokens of those that the masks allow, an end token with the rest."""
    chance, output = random.Random(seed), []  # type: random.Random, list[int]
    while EOS_TOKEN_ID not in (choices := allowed(matcher.mask(output))):
        output.append(chance.choice(choices))
    return output


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_masks_allow_is_valid(compiler: GrammarCompiler, folder: Path, seed: int) -> None:
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(walk(compiler.matcher(GRAMMAR), seed))
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_new_matcher_goes_on_where_the_lost_one_was(compiler: GrammarCompiler, folder: Path) -> None:
    output = walk(compiler.matcher(GRAMMAR), seed=3)
    other_worker = GrammarCompiler(folder, VOCAB_SIZE, [EOS_TOKEN_ID])
    undisturbed = compiler.matcher(GRAMMAR)
    for n in range(len(output) + 1):
        mask = undisturbed.mask(output[:n])
        assert (other_worker.matcher(GRAMMAR, output[:n]).mask(output[:n]) == mask).all()


def test_a_grammar_that_is_none_says_why(compiler: GrammarCompiler, tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="foo"):
        compiler.matcher(b"start: foo")
    with pytest.raises(GrammarError, match="does not follow"):
        compiler.matcher(GRAMMAR, [0])
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS_TOKEN_ID]).matcher(GRAMMAR)


def test_a_matcher_that_cannot_go_on_allows_the_end_alone(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(GRAMMAR)
    assert not matcher.failure(1)
    assert allowed(matcher.mask([0])) == [EOS_TOKEN_ID]
    assert matcher.failure(1)
    assert not matcher.failure(0), "it could go on then"


def test_a_mask_beyond_the_end_is_no_failure_before_it(compiler: GrammarCompiler) -> None:
    """A step that was launched before the end token was known asks for it."""
    matcher = compiler.matcher(GRAMMAR)
    output = walk(matcher, seed=3)
    matcher.mask([*output, EOS_TOKEN_ID])
    assert not matcher.failure(len(output))


class OneRow:
    """A matcher that allows the same tokens always."""

    def failure(self, num_outputs: int) -> str:
        return ""

    def __init__(self, *tokens: int) -> None:
        bits = np.zeros(64, np.uint8)
        bits[list(tokens)] = 1
        self._words = np.packbits(bits, bitorder="little").view(np.int32)

    def mask(self, output_token_ids: Sequence[int]) -> np.ndarray:
        return self._words


def state(matcher: TokenMatcher | None, **params: object) -> SamplingState:
    grammar = b"g" if matcher is not None else b""
    return SamplingState(
        SamplingParams(max_tokens=9, temperature=0.0, grammar=grammar, **params), [1], [], matcher
    )  # type: ignore[arg-type]


def test_only_the_rows_with_a_grammar_are_touched() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    forbid_tokens(logits, booked([state(None), state(OneRow(0, 31, 32, 49)), state(None)]))
    assert (logits[[0, 2]] == before[[0, 2]]).all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 31, 32, 49]
    assert (logits[1, [0, 31, 32, 49]] == before[1, [0, 31, 32, 49]]).all()


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    tokens, reported = Sampler(TorchKernels(), (3,)).sample(
        logits, booked([state(OneRow(7, 8), logprobs=2), state(None)])
    )
    assert tokens[0] == (7 if expected[0, 7] > expected[0, 8] else 8)
    assert tokens[1] == expected[1].argmax()
    assert reported[0].logprob == pytest.approx(float(expected[0, tokens[0]]))
    assert reported[0].top_ids == tuple(expected[0].topk(2).indices.tolist())


class Core:
    def __init__(self) -> None:
        self.received: dict[tuple[int, int], TokenMatcher | str] = {}

    def grammar_compiled(self, key: tuple[int, int], matcher: TokenMatcher) -> None:
        self.received[key] = matcher

    def grammar_failed(self, key: tuple[int, int], reason: str) -> None:
        self.received[key] = reason


def test_the_thread_answers_every_order(compiler: GrammarCompiler) -> None:
    thread, core = GrammarThread(compiler, lambda: None), Core()
    orders = [CompileGrammar((1, i), GRAMMAR if i % 2 else b"start: foo") for i in range(6)]
    for order in [CompileGrammar(None, GRAMMAR), CompileGrammar(None, b"start: foo"), *orders]:
        thread.submit(order)
    deadline = time.monotonic() + 60
    while len(core.received) < len(orders):
        assert time.monotonic() < deadline
        thread.report(core)
        time.sleep(0.001)
    thread.stop()
    assert [key for key, answer in sorted(core.received.items()) if isinstance(answer, str)] == [
        (1, 0),
        (1, 2),
        (1, 4),
    ]


def test_the_threads_of_both_roles_share_one_compiler(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forgot a grammar between two looks of the other one, whose request was then refused."""
    monkeypatch.setattr(grammar, "MAX_CACHED", 1)
    looks = count()

    class Looked(bytes):
        """At every second look at it the other thread compiles something else."""

        def __hash__(self) -> int:
            if next(looks) % 2:
                compiler.matcher(grammar.ANY_NUMBER)
            return super().__hash__()

    for _ in range(4):
        compiler._compile(Looked(GRAMMAR))


def test_rules_about_tokens(compiler: GrammarCompiler) -> None:
    rules = TokenRules(allowed=(40, 41, 42, 43), bad=((41,), (40, 42), (40, 40, 43)))
    matcher = compiler.matcher(rules.packed())
    assert allowed(matcher.mask([])) == [40, 42, 43]
    assert allowed(matcher.mask([40])) == [40, 43]
    assert allowed(matcher.mask([40, 40])) == [40]
    assert allowed(matcher.mask([40, 40, 42])) == [40, 42, 43]
    assert allowed(compiler.matcher(rules.packed(), [5, 40, 40]).mask([5, 40, 40])) == [40]
    banned = compiler.matcher(TokenRules(bad=((41,),)).packed()).mask([])
    assert sorted({*range(VOCAB_SIZE)} - {*allowed(banned)}) == [41]


def test_rules_hold_beside_a_grammar(compiler: GrammarCompiler) -> None:
    integer = LLMatcher.grammar_from_json_schema({"type": "integer"})
    first, second, *_ = allowed(compiler.matcher(integer.encode()).mask([]))
    both = compiler.matcher(TokenRules(allowed=(first, 1000), grammar=integer).packed())
    assert allowed(both.mask([])) == [first]
    not_first = compiler.matcher(TokenRules(bad=((first,),), grammar=integer).packed())
    assert allowed(not_first.mask([]))[0] == second
    assert both.failure(5) == ""


def test_rules_that_leave_nothing_allow_the_end_and_fail(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(TokenRules(allowed=(41,), bad=((41, 41),)).packed())
    assert allowed(matcher.mask([41])) == [EOS_TOKEN_ID]
    assert matcher.failure(0) == ""
    assert "none that may follow" in matcher.failure(1)
