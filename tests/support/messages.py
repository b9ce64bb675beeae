"""A message of each type."""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.transport.messages import messages as m
from splitserve.transport.messages.cache_map import states

MODEL = m.ModelIdentity(
    kv_name="f", dtype="float32", block_size=16, cache_map=states(1, 4096), block_bytes=4096
)
SAMPLING = m.SamplingParams(
    max_tokens=5, logit_bias={7: -1.5}, stop_token_ids=(1, 2), seed=3, logprobs=2, grammar=b'start: "a"'
)
SPEC = m.RequestSpec(
    request_id="r",
    epoch=1,
    dispatch=2,
    coordinator=3,
    token_ids=m.u32([1, 2, 3]),
    num_prompt_tokens=3,
    sampling=SAMPLING,
    deadline_s=9.5,
    answer_id=b"a" * 16,
    adapter="0a1b",
)
LOGPROBS = m.TokenLogprobs(logprob=-float("inf"), top_ids=(4, 5), top_logprobs=(-0.5, -1.0))
STEP = m.StepTokens(
    coordinator=1 << 60,
    dispatches=m.u32(list(range(64))),
    indices=m.u32(list(range(64))),
    tokens=m.u32(list(range(64))),
    finished={3: "stop", 9: "length"},
)
EXAMPLES: list[m.Message] = [
    m.Hello(worker_id="p0", incarnation=1, role="prefill", host="h", pid=2, model=MODEL, max_model_len=10,
            vocab_size=20, num_blocks=4, max_num_seqs=8, max_batch_tokens=9),
    m.Load(worker_id="p0", incarnation=1, blocks_free=1, blocks_cached=2, blocks_used=3, blocks_leased=4,
           num_running=5, num_waiting=6, num_waiting_tokens=7, steps=8, busy=True, accepting=False,
           counters={"a": 1.0}),
    m.BlockEvents(worker_id="p0", incarnation=1, reset=True, stored=b"h" * 32, answers_kept=b"a" * 16,
                  adapters=(m.Adapter(name="sql", content="0a1b"),)),
    m.FirstToken(coordinator=1, dispatch=2, index=0, token=None, prompt_logprobs=(LOGPROBS, LOGPROBS),
                 finished="length"),
    m.FirstToken(coordinator=1, dispatch=2, index=0, token=None, embedding=b"\0\0\x80?" * 3,
                 finished="length"),
    m.Joined(coordinator=1, dispatch=2, index=0, token=5, logprobs=LOGPROBS),
    STEP,
    m.RequestFailed(coordinator=1, dispatch=2, kind="preempted", message="out of blocks"),
    m.Welcome(coordinator=1, heartbeat_s=0.5),
    m.OtherVersion(wire_version=7),
    m.Fenced(coordinator=1, reason="late"),
    m.Prefill(spec=SPEC, decode=m.Peer(worker_id="d0", incarnation=4, address="tcp://127.0.0.1:1")),
    m.SendPrefix(coordinator=1, dispatch=2, block_hashes=b"h" * 32,
                 prefill=m.Peer(worker_id="p0", incarnation=4, address="tcp://127.0.0.1:1")),
    m.Cancel(coordinator=1, dispatches=m.u32([1, 2])),
    m.Goodbye(worker_id="d0", incarnation=1),
    m.Alive(coordinator=1),
    m.Move(dispatch=1, spec=SPEC, decode=m.Peer(worker_id="d1", incarnation=4, address="tcp://127.0.0.1:1")),
    m.Resume(coordinator=1, dispatch=2, request_id="r", answer_id=b"a" * 16, deadline_s=9.5),
    m.Drain(coordinator=1, timeout_s=2.5),
    m.Flip(coordinator=1, role="prefill", timeout_s=2.5),
    m.Meet(worker_id="p0", incarnation=1, host="h", pid=2, model=MODEL, movers=("shm", "tcp")),
    m.Offer(request_id="r", epoch=0, coordinator=1, dispatch=2, num_tokens=33, block_hashes=b"h" * 32,
            grammar=b"g"),
    m.Renew(leases=m.u64([1, 2])),
    m.Placed(lease=1, first=3, checksums=m.u64([1, 2])),
    m.Handoff(spec=SPEC, lease=1, token=2, checksums=m.u64([1, 2])),
    m.Release(lease=1, coordinator=2, dispatch=3),
    m.Met(worker_id="d0", incarnation=1, mover="shm", num_blocks=4, shm_name="x"),
    m.Grant(coordinator=1, dispatch=2, lease=3, secret=b"s" * 16, blocks=m.u32([1]),
            num_cached_blocks=0, lease_s=5.0),
    m.Refuse(coordinator=1, dispatch=2, reason="no", final=True),
    m.Ack(coordinator=1, dispatch=2, lease=3),
    m.Nack(coordinator=1, dispatch=2, lease=3, positions=m.u32([1])),
    m.RendezvousEntry(session=1, key="0/0", value=b"v"),
    m.ParcelComing(session=1, number=0, lease=2, secret=b"s" * 16, first_layer=0, num_layers=3,
                   positions=m.u32([1])),
    m.SessionOver(session=1, reason="it broke"),
    m.Revoke(coordinator=1, dispatch=2, lease=3, reason="late"),
    m.Retire(incarnation=3),
    m.Retired(incarnation=3),
]  # fmt: skip


def fields_of(message: m.Message) -> dict[str, Any]:
    """Return the fields, and those of the messages within it, as plain values."""
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message), strict=False)
    return fields


def structs_in(message: m.Message, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return those of ``fields`` that are the fields of messages within ``message``."""
    found = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, m.Message):
            found += [fields[name], *structs_in(value, fields[name])]
        elif isinstance(value, tuple) and value and isinstance(value[0], m.Message):
            found += fields[name]
        elif isinstance(value, dict):
            found += [fields[name][key] for key, inner in value.items() if isinstance(inner, m.Message)]
    return found
