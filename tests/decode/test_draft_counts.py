"""The counters of drafts: all of them, and of these the model's."""

from __future__ import annotations

from support.drafting import BLOCK, Bench, next_token
from support.receivers import receiver

from splitserve.decode.core import DecodeCore
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import Meet, ModelIdentity

MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
MEET = Meet(worker_id="d", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
CIRCLE = [1, 4, 6, 5, 2, 0] * 4


def test_drafts_of_the_model_are_counted_beside_all() -> None:
    bench = Bench(num_tokens=3, guess=lambda text, count: [next_token(text), 50, 50][:count])
    core = DecodeCore(MEET, bench.scheduler, receiver(MEET, bench.scheduler.blocks))
    bench.join(1, CIRCLE, 60, ignore_eos=True)
    drafted, accepted = [0, 0], [0, 0]
    while bench.schedule() is not None:
        step, result = bench.run()
        core._heartbeat.count_step(result)
        by_model = bool(step.drafts.by_model)
        drafted[by_model] += len(step.sequences) - 1
        accepted[by_model] += len(step.sequences) - 1 - len(result.dropped)
    counters = core.load().counters
    assert (counters["mtp_draft_tokens"], counters["mtp_accepted_tokens"]) == (drafted[1], accepted[1])
    assert (counters["draft_tokens"], counters["accepted_tokens"]) == (sum(drafted), sum(accepted))
    assert counters["output_tokens"] == 59
    assert min(*drafted, *accepted) > 0, "both have drafted"
    assert drafted[1] > accepted[1]
