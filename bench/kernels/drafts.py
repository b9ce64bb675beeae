"""Output tokens a second of decode steps with drafts and without, by turns in one run.

    python -m splitserve.bench.kernels.drafts [--models 125m,500m] [--dtypes bfloat16] [--batches 1,4,8] \\
        [--rounds 5] [--json FILE]

The model is random and takes its real time. The answers are texts, put in place of its tokens: so what is
accepted is what such a text gives.

    edit    the prompt is a file of this repository, the answer the same file with one name in it changed
    quote   the prompt is documentation, the answer quotes a third of it between tokens that are new
    prose   the answer goes on in the documentation that the prompt begins
    new     no three tokens repeat

Scheduler, step thread and runner are those of a worker; nothing is sent. Speeds are medians of all
rounds; ``ratio`` is the median of the rounds' ratios, which the machine's own changes touch less.
``accepted``: share of drafted tokens; ``drafted``: tokens for each output token.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from ...decode.drafts import CHEAP_ROWS, Drafts
from ...decode.rows import DecodeStep
from ...decode.scheduler import DecodeScheduler
from ...engine.cache.block_manager import BlockManager
from ...engine.step.batch import Batch, SamplingState, StepOutput
from ...engine.step.model_runner import ModelRunner
from ...engine.step.step_thread import OnLayer, StepThread
from ...transport.messages.messages import SamplingParams
from ..environment import environment, option_parser, write_record
from .engine import BLOCK_SIZE, make_runner

ROOT = Path(__file__).resolve().parents[2]
PROMPT, ANSWER = 512, 256  # tokens
NUM_TOKENS = 4


@dataclass(frozen=True)
class Row:
    model: str
    dtype: str
    text: str
    batch: int
    off: float  # tokens/s
    on: float
    ratio: float
    accepted: float
    drafted: float


def texts(kind: str, draw: random.Random) -> list[int]:
    """PROMPT + ANSWER token ids, each of a word or a sign."""
    if kind == "new":
        return draw.sample(range(3, 30_000), PROMPT + ANSWER)
    source = "worker/steps.py" if kind == "edit" else "docs/operations.md"
    tokens = _tokens(ROOT / source)
    start = draw.randrange(max(1, len(tokens) - PROMPT - ANSWER))
    prompt = tokens[start : start + PROMPT]
    if kind == "edit":
        name = max(set(prompt), key=lambda token: (4 < prompt.count(token) < 12, token))
        return [*prompt, *[29_999 if token == name else token for token in prompt[:ANSWER]]]
    if kind == "prose":
        return tokens[start : start + PROMPT + ANSWER]
    answer: list[int] = []
    while len(answer) < ANSWER:
        at = draw.randrange(PROMPT - 30)
        answer += draw.sample(range(3, 30_000), 40) + prompt[at : at + 20]
    return [*prompt, *answer[:ANSWER]]


class Scripted:
    """A model runner that takes its time, and then answers by script."""

    def __init__(self, runner: ModelRunner, scripts: dict[int, list[int]]) -> None:
        """``scripts``: by the id of a sequence's state."""
        self._runner, self._scripts = runner, scripts

    def execute(self, batch: Batch, on_layer: OnLayer | None = None) -> StepOutput:
        """See ``Runner``."""
        self._runner.execute(batch, on_layer)
        rows = zip(batch.sampling, batch.seq_lens.tolist(), strict=True)
        return StepOutput(np.array([self._scripts[id(state)][at] for state, at in rows], np.int32))


def tokens_per_s(runner: ModelRunner, scripts: list[list[int]], num_tokens: int) -> tuple[float, int, int]:
    """Tokens/s, drafted tokens, and accepted ones."""
    blocks = BlockManager(runner.kv_cache.num_blocks)
    drafts = Drafts(num_tokens, CHEAP_ROWS["cpu"])
    scheduler = DecodeScheduler(blocks, BLOCK_SIZE, 64, 4096, frozenset(), drafts=drafts)
    by_state, states = {}, []
    for dispatch, text in enumerate(scripts):
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
        state = SamplingState(params, text[:PROMPT], [text[PROMPT]])
        own = blocks.allocate(PROMPT // BLOCK_SIZE)
        assert own is not None
        scheduler.join((1, dispatch), f"r{dispatch}", state, own, b"root", 1e9)
        by_state[id(state)] = text
        states.append(state)
    woken = threading.Event()
    half = runner.config.num_layers // 2
    steps = StepThread[DecodeStep](Scripted(runner, by_state), woken.set, ahead_at_layer=half)
    drafted = accepted = 0
    start = time.perf_counter()
    while scheduler.num_running:
        while steps.wants_next and (step := scheduler.schedule()) is not None:
            steps.submit(step)
        woken.wait(1.0)
        woken.clear()
        while (finished := steps.collect()) is not None:
            if finished.output is None:
                raise RuntimeError("a step failed") from finished.error
            result = scheduler.complete(finished.step, finished.output)
            num_seqs = len(finished.step.members)
            drafted += finished.step.num_draft_tokens
            accepted += finished.step.num_draft_tokens - sum(row >= num_seqs for row in result.dropped)
    seconds = time.perf_counter() - start
    steps.stop()
    assert all(state.output_token_ids == text[PROMPT:] for state, text in zip(states, scripts, strict=True))
    return len(scripts) * (ANSWER - 1) / seconds, drafted, accepted


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--models", default="125m,500m")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--texts", default="edit,quote,prose,new")
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="--num-speculative-tokens")
    options = parser.parse_args()
    record, rows = {"environment": environment()}, []
    with tempfile.TemporaryDirectory() as folder:
        for model, dtype in product(options.models.split(","), options.dtypes.split(",")):
            runner = make_runner(Path(folder), model, dtype, exact=False, num_blocks=1024)
            for batch, kind in product(map(int, options.batches.split(",")), options.texts.split(",")):
                scripts = [texts(kind, random.Random(seed)) for seed in range(batch)]
                off, on = list[float](), list[float]()
                drafted = accepted = 0
                for turn in range(options.rounds):
                    for with_drafts in (False, True) if turn % 2 else (True, False):
                        most = options.tokens if with_drafts else 0
                        speed, *counts = tokens_per_s(runner, scripts, most)
                        (on if with_drafts else off).append(speed)
                        if with_drafts:
                            drafted, accepted = counts
                ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
                row = Row(
                    model, dtype, kind, batch, statistics.median(off), statistics.median(on), ratio,
                    accepted / max(1, drafted), drafted / (batch * (ANSWER - 1)),
                )  # fmt: skip
                rows.append(row)
                print(
                    f"{model} {dtype} {kind:6} batch {batch:2}: {row.off:6.0f} -> {row.on:6.0f} tokens/s, "
                    f"x{row.ratio:.2f}, accepted {row.accepted:.2f}, drafted {row.drafted:.2f}",
                    flush=True,
                )
    write_record(options.json, record | {"rows": [asdict(row) for row in rows]})


def _tokens(path: Path) -> list[int]:
    parts = re.findall(r"\w+|\s+|[^\w\s]", path.read_text())
    known: dict[str, int] = {}
    return [3 + known.setdefault(part, len(known)) for part in parts]


if __name__ == "__main__":
    main()
