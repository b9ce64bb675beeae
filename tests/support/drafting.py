"""A decode scheduler that drafts, and a device whose model mostly goes round in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from splitserve.decode.drafts import Drafts
from splitserve.decode.rows import DecodeResult, DecodeStep
from splitserve.decode.scheduler import MAX_IN_FLIGHT, DecodeScheduler
from splitserve.decode.sequences import DecodeSequence
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import Batch, SamplingState, StepOutput
from splitserve.transport.messages.blocks import chain
from splitserve.transport.messages.messages import SamplingParams, u32

BLOCK, EOS, MAX_LEN, ROOT = 4, 10, 96, b"root"
Guess = Callable[[list[int], int], list[int]]
"""Returns at most this many tokens behind a text."""


def next_token(text: list[int]) -> int:
    """Mostly the next one of a circle."""
    x = sum((i + 1) * token for i, token in enumerate(text))
    return (x * 17 + 7) % 11 if x % 9 == 0 else (text[-1] * 3 + 1) % 7


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    text = [*prompt]
    while (done := text[len(prompt) :]) == [] or (len(done) < max_tokens and done[-1] != EOS):
        text.append(next_token(text))
    return done


class Bench:
    """A scheduler, and a device whose next tokens come from the slots that a row's block table names."""

    def __init__(
        self,
        num_blocks: int = 40,
        num_tokens: int = 4,
        window: int = 0,
        guess: Guess | None = None,
        max_len: int = MAX_LEN,
    ) -> None:
        """``guess``: what the model drafts; None: it does not."""
        drafts = Drafts(num_tokens, 16, 0.1 if guess else 0.0)
        self.scheduler = DecodeScheduler(
            BlockManager(num_blocks), BLOCK, 8, max_len, frozenset([EOS]), window, drafts
        )
        self.guess = guess
        self.slots = [-1] * (num_blocks * BLOCK)
        self.queue: deque[DecodeStep] = deque()
        self.sampled = np.empty(0, np.int32)
        self.states: dict[int, tuple[SamplingState, int]] = {}
        self.ended: dict[int, str] = {}
        self.drafted = self.accepted = 0

    def join(
        self, dispatch: int, prompt: list[int], max_tokens: int, **more: object
    ) -> DecodeSequence | None:
        scheduler, num_blocks = self.scheduler, -(-len(prompt) // BLOCK)
        if scheduler.num_running == 5 or (blocks := scheduler.blocks.allocate(num_blocks)) is None:
            return None
        for at, token in enumerate(prompt):
            self.slots[blocks[at // BLOCK] * BLOCK + at % BLOCK] = token
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]
        state = SamplingState(params, prompt, [next_token(prompt)])
        hashes = chain(ROOT, u32(prompt), BLOCK)
        scheduler.blocks.commit_all(blocks[: len(hashes)], hashes, ROOT)
        last = hashes[-1] if hashes else ROOT
        scheduler.join((1, dispatch), f"r{dispatch}", state, blocks, last, 100.0)
        self.states[dispatch] = state, max_tokens
        return scheduler.running[1, dispatch]

    def schedule(self) -> DecodeStep | None:
        step = self.scheduler.schedule()
        for sequence in self.scheduler.preempted:
            self.ended[sequence.key[1]] = "preempted"
        self.scheduler.preempted.clear()
        if step is not None:
            steps = (*self.queue, step)
            drafts = any(s.num_draft_tokens or s.batch.num_drafts is not None for s in steps)
            assert len(self.queue) < (1 if drafts else MAX_IN_FLIGHT), "drafts need the newest tokens"
            self.queue.append(step)
            slots = step.batch.slot_mapping.tolist()
            assert len(set(slots)) == len(slots)
            for slot in slots:
                assert self.scheduler.blocks._references[slot // BLOCK] == 1
        return step

    def run(self, drafts: dict[int, list[int]] | None = None) -> tuple[DecodeStep, DecodeResult]:
        """Every row writes its slot before any row reads, as in each layer of a model. ``drafts``: of the
        model, in place of its guess."""
        step = self.queue.popleft()
        batch = step.batch
        assert batch.fed_from is not None
        tokens = np.where(batch.fed_from >= 0, np.append(self.sampled, 0)[batch.fed_from], batch.token_ids)
        for slot, token in zip(batch.slot_mapping.tolist(), tokens.tolist(), strict=True):
            self.slots[slot] = token
        rows = zip(batch.block_tables.tolist(), batch.seq_lens.tolist(), step.sequences, strict=True)
        self.sampled = np.array([self._sample(*row) for row in rows], np.int32)
        guessed = self._drafts(batch)
        output = StepOutput(self.sampled, drafts=guessed if drafts is None else drafts)
        result = self.scheduler.complete(step, output)
        for row, reason in result.finished.items():
            self.ended[step.sequences[row].key[1]] = reason
        num = len(step.members)
        self.drafted += step.num_draft_tokens
        self.accepted += step.num_draft_tokens - sum(row >= num for row in result.dropped)
        return step, result

    def fail(self, how: str) -> None:
        step = self.queue.popleft()
        gone = self.scheduler.separate(step) if how == "separate" else self.scheduler.shrink(step)
        for sequence in gone:
            self.ended[sequence.key[1]] = how
        while self.queue:
            self.scheduler.skip(self.queue.popleft())

    def finish(self) -> None:
        """Run until no sequence is left, one step ahead where that is possible."""
        for _ in range(3000):
            self.schedule()
            self.schedule()
            if not self.queue:
                break
            self.run()
            self.check()
        assert self.ended.keys() == self.states.keys()
        assert self.scheduler.blocks.num_used == 0

    def check(self) -> None:
        for dispatch, (state, max_tokens) in self.states.items():
            want = answer(list(state.prompt_token_ids), max_tokens)
            assert state.output_token_ids == want[: len(state.output_token_ids)]
            if self.ended.get(dispatch) in ("stop", "length"):
                assert state.output_token_ids == want
        known: set[bytes] = set()
        for prompt, (state, _) in ((list(s[0].prompt_token_ids), s) for s in self.states.values()):
            hashes = chain(ROOT, u32([*prompt, *state.output_token_ids]), BLOCK)
            known.update(hashes)
            for at, block_hash in enumerate(hashes):
                if (block := self.scheduler.blocks._block_of.get(block_hash)) is not None:
                    text = [*prompt, *state.output_token_ids][at * BLOCK : (at + 1) * BLOCK]
                    assert self.slots[block * BLOCK : (block + 1) * BLOCK] == text
        assert known.issuperset(self.scheduler.blocks.cached_hashes())

    def _drafts(self, batch: Batch) -> dict[int, list[int]]:
        """Return those of each right row that asks for some. The last one of a sequence also writes behind
        its token, when everything has been read."""
        if batch.num_drafts is None or self.guess is None:
            return {}
        assert batch.fed_from is not None
        assert set(batch.fed_from.tolist()) == {-1}
        links = [-1] * batch.num_seqs if batch.draft_of is None else batch.draft_of.tolist()
        right, tables = list[bool](), batch.block_tables.tolist()
        for before, token in zip(links, batch.token_ids.tolist(), strict=True):
            right.append(before < 0 or (right[before] and int(self.sampled[before]) == token))
        followed = {links[row] for row, is_right in enumerate(right) if is_right}
        drafts = {}
        for row, count in enumerate(batch.num_drafts.tolist()):
            length = int(batch.seq_lens[row])
            if right[row] and count:
                text = self._text(tables[row], length)
                drafts[row] = self.guess([*text, int(self.sampled[row])], count)
                if row not in followed:
                    for at in range(length, length + count - 1):
                        slot = tables[row][at // BLOCK] * BLOCK + at % BLOCK
                        assert self.scheduler.blocks._references[slot // BLOCK] == 1
                        self.slots[slot] = -7
        return drafts

    def _text(self, table: list[int], length: int) -> list[int]:
        return [self.slots[table[at // BLOCK] * BLOCK + at % BLOCK] for at in range(length)]

    def _sample(self, table: list[int], length: int, sequence: DecodeSequence) -> int:
        return next_token(self._text(table, length))


def happen(data: st.DataObject, bench: Bench) -> None:
    """Draw sequences that come and go, and steps that run and fail. In the end, all sequences are done."""
    dispatches = iter(range(1000))
    often = ["schedule"] * 6 + ["run"] * 6 + ["join"] * 3
    events = st.sampled_from([*often, "pause", "resume", "drop", "separate", "shrink"])
    for event in data.draw(st.lists(events, max_size=60)):
        held = [key[1] for key in bench.scheduler.held]
        if event == "schedule":
            bench.schedule()
        elif event == "join":
            prompt = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
            bench.join(next(dispatches), prompt, data.draw(st.integers(2, 40)))
        elif event in ("run", "separate", "shrink"):
            if bench.queue:
                bench.run() if event == "run" else bench.fail(event)
        elif held:
            dispatch = data.draw(st.sampled_from(held))
            getattr(bench.scheduler, event)((1, dispatch))
            if event == "drop":
                bench.ended[dispatch] = "dropped"
        bench.check()
    for key in bench.scheduler.held:
        bench.scheduler.resume(key)
    bench.finish()
