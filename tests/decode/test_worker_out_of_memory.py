"""A decode worker whose step runs out of memory gives some sequences back and lives on: the real loop, its threads and its sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from splitserve.bench.null_workers import NullRunner, null_model
from splitserve.decode.settings import DecodeSettings
from splitserve.decode.worker import DecodeWorker
from splitserve.engine.batch import Batch, StepOutput
from splitserve.prefill.settings import PrefillSettings
from splitserve.prefill.worker import PrefillWorker
from splitserve.transport.channels import RouterChannel
from splitserve.transport.messages import (
    FROM_WORKER,
    FirstToken,
    Hello,
    Message,
    Peer,
    Prefill,
    RequestFailed,
    RequestSpec,
    Sampling,
    StepTokens,
    Welcome,
    from_u32,
    u32,
)

DEADLINE_S = 30.0
NUM_SEQS = 4


class Greedy(NullRunner):
    """Needs more memory than there is for steps of more than ``room`` sequences."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_failed = 0

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        if batch.num_seqs > self.room:
            self.num_failed += 1
            raise MemoryError
        return super().execute(batch, on_layer)


@contextmanager
def running(worker: PrefillWorker | DecodeWorker) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(DEADLINE_S)


def spec(dispatch: int) -> RequestSpec:
    return RequestSpec(
        request_id=f"r{dispatch}",
        epoch=0,
        dispatch=dispatch,
        coordinator=1,
        token_ids=u32([dispatch + 1] * 32),
        num_prompt_tokens=32,
        sampling=Sampling(max_tokens=2000, temperature=0.0),
        deadline_s=60.0,
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_out_of_memory_does_not_end_the_worker(role: str) -> None:
    channel = RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER)
    common = {"model": ".", "coordinator": channel.address, "insecure": True, "mover": "zmq"}
    models = {name: null_model(2000, 4000) for name in ("prefill", "decode")}
    short = Greedy(room=2 if role == "decode" else 1)
    models[role] = null_model(2000, 4000)
    object.__setattr__(models[role], "runner", short)
    prefill = PrefillWorker(PrefillSettings.model_validate({**common, "name": "p"}), models["prefill"], None)
    decode = DecodeWorker(DecodeSettings.model_validate({**common, "name": "d"}), models["decode"], None)
    heard: list[Message] = []
    try:
        with running(prefill), running(decode) as decode_thread:
            hellos: dict[str, tuple[bytes, Hello]] = {}
            deadline = time.monotonic() + DEADLINE_S
            while not _served(heard, role) and time.monotonic() < deadline:
                channel.socket.poll(50)
                for identity, message in channel.receive(256):
                    if isinstance(message, Hello):
                        hellos[message.role] = identity, message
                        channel.send(identity, Welcome(coordinator=1, heartbeat_s=0.25))
                        if len(hellos) == 2:
                            peer = hellos["decode"][1]
                            to = Peer(worker_id=peer.worker_id, incarnation=peer.incarnation, address=peer.peer_address)
                            channel.send(hellos["prefill"][0], *(Prefill(spec=spec(i), decode=to) for i in range(NUM_SEQS)))
                    else:
                        heard.append(message)
            assert _served(heard, role)
            assert short.num_failed
            assert decode_thread.is_alive()
    finally:
        channel.close()
    failed = [m for m in heard if isinstance(m, RequestFailed)]
    assert all(m.kind == "preempted" for m in failed)
    assert bool(failed) == (role == "decode")  # a prefill step is done again in smaller ones


def _served(heard: list[Message], role: str) -> bool:
    """decode: what stayed goes on while the rest was given back. prefill: every prompt has its first token."""
    if role == "prefill":
        return len({m.dispatch for m in heard if isinstance(m, FirstToken)}) == NUM_SEQS
    given_back = {m.dispatch for m in heard if isinstance(m, RequestFailed)}
    steps = [m for m in heard if isinstance(m, StepTokens)]
    return bool(given_back) and bool(steps) and len(set(from_u32(steps[-1].dispatches)) - given_back) > 0
