"""Which worker sends cached blocks of a prompt to the one that computes it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.lifecycle_bench import MODEL, Bench, make_hello, sent

from splitserve.coordinator.lifecycle import routing
from splitserve.coordinator.lifecycle.actions import Action, Send
from splitserve.coordinator.lifecycle.open_workers import MAX_COMPARED
from splitserve.transport.messages.blocks import chain, root_hash
from splitserve.transport.messages.messages import BlockEvents, Prefill, Role, SamplingParams, SendPrefix, u32

ROLES: tuple[Role, ...] = ("prefill", "decode")
PROMPT = list(range(40))
HASHES = chain(root_hash("m"), u32(PROMPT), MODEL.block_size)


def bench(least: int = 8) -> Bench:
    """A decode worker has the first 32 tokens of the prompt cached, the prefill worker the first 8."""
    made = Bench(min_pull_tokens=least)
    caches(made, "d", 8)
    caches(made, "p", 2)
    return made


def join(made: Bench, name: str, role: Role, **more: Any) -> None:
    """A worker of one of them comes; of two of a name it is the second."""
    hello = make_hello(name, role, **{"peer_address": "tcp://x:1", "incarnation": 2, **more})
    made.core.receive((name, 2), hello, 0.0)


def caches(made: Bench, name: str, num_blocks: int, incarnation: int = 1) -> None:
    stored = b"".join(HASHES[:num_blocks])
    events = BlockEvents(worker_id=name, incarnation=incarnation, number=1, reset=True, stored=stored)
    made.core.receive((name, incarnation), events, 0.0)


def pulled(actions: list[Action]) -> int:
    """Tokens that another worker is to send, as both workers learn."""
    prefill, orders = sent(actions, Prefill)[0], sent(actions, SendPrefix)
    sizes = [len(order.block_hashes) // 16 for order in orders]
    assert sum(sizes) == prefill.num_prefix_blocks
    return sum(sizes) * MODEL.block_size


def test_the_holder_of_more_sends_all_that_it_has() -> None:
    actions = bench().submit(prompt_token_ids=PROMPT)
    (order,) = sent(actions, SendPrefix)
    assert order.block_hashes == b"".join(HASHES[:8])
    assert order.prefill.worker_id == "p"
    assert (order.coordinator, order.dispatch) == (7, sent(actions, Prefill)[0].spec.dispatch)
    assert pulled(actions) == 32


@pytest.mark.parametrize(("least", "expected"), [(24, 32), (25, 0), (0, 0)])
def test_too_little_is_computed(least: int, expected: int) -> None:
    assert pulled(bench(least).submit(prompt_token_ids=PROMPT)) == expected


def test_the_last_token_is_computed() -> None:
    made = bench()
    caches(made, "d", 10)
    caches(made, "p", 1)
    assert pulled(made.submit(prompt_token_ids=PROMPT[:33])) == 32
    assert pulled(made.submit("s", prompt_token_ids=PROMPT[:32])) == 28


@pytest.mark.parametrize(
    "holder",
    [{"wire_version": 4}, {"model": replace(MODEL, dtype="g")}],
    ids=["of an earlier build", "of another kind"],
)
def test_a_worker_that_cannot_is_not_asked(holder: dict[str, Any]) -> None:
    made = Bench(min_pull_tokens=8)
    join(made, "e", "decode", **holder)
    caches(made, "e", 8, incarnation=2)
    assert pulled(made.submit(prompt_token_ids=PROMPT)) == 0


def test_of_many_holders_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = Bench(min_pull_tokens=8), []
    for n in range(100):
        join(made, f"e{n}", "decode", wire_version=4)
        caches(made, f"e{n}", 8, incarnation=2)
    real = routing.can_send_prefix
    monkeypatch.setattr(routing, "can_send_prefix", lambda *pair: asked.append(pair) or real(*pair))
    assert pulled(made.submit(prompt_token_ids=PROMPT)) == 0
    assert 0 < len(asked) <= MAX_COMPARED


def test_a_prefill_worker_of_an_earlier_build_gets_nothing() -> None:
    made = bench()
    join(made, "p", "prefill", wire_version=4, max_batch_tokens=1000)
    assert pulled(made.submit(prompt_token_ids=PROMPT)) == 0


def test_a_prefill_worker_on_loopback_gets_nothing_of_other_hosts() -> None:
    made = Bench(min_pull_tokens=8)
    join(made, "p", "prefill", peer_address="tcp://127.0.0.1:9", max_batch_tokens=1000)
    join(made, "e", "decode", host="g")
    caches(made, "e", 8, incarnation=2)
    assert pulled(made.submit(prompt_token_ids=PROMPT)) == 0
    caches(made, "d", 8)
    assert pulled(made.submit("s", prompt_token_ids=PROMPT)) == 32


def test_a_worker_that_drains_is_not_asked() -> None:
    made = bench()
    made.hello("e", "decode")
    made.load("d", [], draining=True)
    assert pulled(made.submit(prompt_token_ids=PROMPT)) == 0


def test_prompt_logprobs_are_computed_from_the_first_token_on() -> None:
    assert pulled(bench().submit(prompt_token_ids=PROMPT, prompt_logprobs=0)) == 0


def test_a_worker_of_both_roles_needs_nothing_of_itself() -> None:
    made = Bench(min_pull_tokens=8)
    for role in ROLES:
        join(made, f"w:{role}", role, process="w", mixed=True)
    caches(made, "w:decode", 8, incarnation=2)
    for n in range(9):
        actions = made.submit(f"{n}", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=2))
        if prompts := sent(actions, Prefill):
            computes = next(a.worker[0] for a in actions if isinstance(a, Send))
            assert bool(prompts[0].num_prefix_blocks) == (computes == "p")
