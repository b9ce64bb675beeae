"""A lifecycle with its workers played by the test, message by message."""

from __future__ import annotations

from typing import Any

from splitserve.coordinator.lifecycle.actions import Action, End, Push, Send
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle, LifecycleLimits
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    FirstToken,
    Hello,
    Joined,
    Load,
    Message,
    ModelIdentity,
    Role,
    SamplingParams,
    StepTokens,
    u32,
)

MODEL = ModelIdentity(kv_name="m", dtype="f", block_size=4, cache_map=states(1, 8), block_bytes=8)


class Sink:
    def push(self, token_id: int, logprobs: object) -> None: ...
    def push_prompt_logprobs(self, logprobs: object) -> None: ...
    def flush(self) -> None: ...
    def end(self, ended: object) -> None: ...


def make_hello(name: str, role: Role, **more: Any) -> Hello:
    """Return the Hello of a small worker; ``more``: other values."""
    sizes = {
        "max_model_len": 10_000,
        "vocab_size": 10,
        "num_blocks": 50,
        "max_num_seqs": 4,
        "max_batch_tokens": 16,
    }
    return Hello(
        **{
            "worker_id": name,
            "role": role,
            "incarnation": 1,
            "host": "h",
            "pid": 1,
            "model": MODEL,
            **sizes,
            **more,
        }
    )


class Bench:
    """A lifecycle with one prefill and one decode worker, and a clock."""

    def __init__(self, max_num_seqs: int = 4, **limits: Any) -> None:
        self.now, self.max_num_seqs = 0.0, max_num_seqs
        self.core = Lifecycle(7, "hybrid", LifecycleLimits(**limits))
        self.hello("p", "prefill")
        self.hello("d", "decode")

    def hello(
        self, name: str, role: Any, incarnation: int = 1, process: str = "", mixed: bool = False, **more: Any
    ) -> list[Action]:
        more = {
            "incarnation": incarnation,
            "process": process,
            "mixed": mixed,
            "max_num_seqs": self.max_num_seqs,
            **more,
        }
        hello = make_hello(name, role, peer_address="tcp://x:1", **more)
        return self.core.receive((name, incarnation), hello, self.now)

    def submit(self, name: str = "r", **more: Any) -> list[Action]:
        fields: dict[str, Any] = {
            "prompt_token_ids": [1, 2, 3],
            "sampling": SamplingParams(max_tokens=5),
            "arrival": self.now,
            "deadline": 100.0,
        }
        return self.core.submit(Request(name, sink=Sink(), **{**fields, **more}), self.now)

    def send(self, name: str, message: Message, incarnation: int = 1) -> list[Action]:
        return self.core.receive((name, incarnation), message, self.now)

    def first(self, dispatch: int, token: int = 5, index: int = 0, **more: Any) -> list[Action]:
        return self.send("p", FirstToken(coordinator=7, dispatch=dispatch, index=index, token=token, **more))

    def joined(
        self, dispatch: int, token: int = 5, index: int = 0, worker: str = "d", **more: Any
    ) -> list[Action]:
        return self.send(worker, Joined(coordinator=7, dispatch=dispatch, index=index, token=token, **more))

    def step(
        self, dispatch: int, index: int, token: int, finished: Any = None, worker: str = "d"
    ) -> list[Action]:
        rows = {"dispatches": u32([dispatch]), "indices": u32([index]), "tokens": u32([token])}
        return self.send(
            worker, StepTokens(coordinator=7, finished={0: finished} if finished else {}, **rows)
        )

    def load(
        self,
        name: str,
        held: list[int],
        steps: int = 0,
        busy: bool = False,
        draining: bool = False,
        **other: Any,
    ) -> list[Action]:
        numbers = dict.fromkeys(
            (
                "blocks_cached",
                "blocks_used",
                "blocks_leased",
                "num_running",
                "num_waiting",
                "num_waiting_tokens",
            ),
            0,
        )
        more = {
            "blocks_free": 50,
            "steps": steps,
            "busy": busy,
            "accepting": True,
            "draining": draining,
            "dispatches": u32(held),
            **other,
        }
        return self.send(name, Load(worker_id=name, incarnation=1, **{**numbers, **more}))


def tokens(actions: list[Action]) -> list[int]:
    return [a.token for a in actions if isinstance(a, Push)]


def ends(actions: list[Action]) -> list[Ended]:
    return [a.ended for a in actions if isinstance(a, End)]


def sent(actions: list[Action], kind: type[Message]) -> list[Any]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]
