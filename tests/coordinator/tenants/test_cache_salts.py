"""A tenant's blocks have names that no other tenant's have, unless they share on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from splitserve.coordinator.tenants.store import TenantStore
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.messages.blocks import chain, root_hash
from splitserve.transport.messages.messages import Peer, RequestSpec, SamplingParams, u32

PROMPT = list(range(1, 34))


@pytest.fixture
def salts(tmp_path: Path) -> dict[str, bytes]:
    store = TenantStore(tmp_path / "tenants", create=True)
    for tenant in ("a", "b", "friend", "other friend"):
        store.set_tenant(tenant, shared_cache="friends" if "friend" in tenant else None)
        store.create_key(tenant)
        store.create_key(tenant)
    return {account.tenant: account.salt for account in store.accounts(time.time()).values()}


def cached_tokens(scheduler: PrefillScheduler, dispatch: int, salt: bytes) -> int:
    """Return the prompt's hashes, computed to its end for this tenant."""
    spec = RequestSpec(
        request_id=f"r{dispatch}",
        epoch=0,
        dispatch=dispatch,
        coordinator=1,
        token_ids=u32(PROMPT),
        num_prompt_tokens=len(PROMPT),
        sampling=SamplingParams(max_tokens=4),
        salt=salt,
        deadline_s=60.0,
    )
    sequence = scheduler.add(spec, Peer(worker_id="d", incarnation=1, address="x"), float(dispatch))
    while (step := scheduler.schedule(float(dispatch))) is not None:
        scheduler.complete(step)
    scheduler.drop(sequence.key)
    return sequence.num_cached_tokens


def test_another_tenants_prompt_is_not_cached(salts: dict[str, bytes]) -> None:
    scheduler = PrefillScheduler(BlockManager(256), 4, "model", 64, max_num_seqs=8)
    got = [
        cached_tokens(scheduler, n, salts[who])
        for n, who in enumerate(("a", "a", "b", "b", "friend", "other friend", "a"))
    ]
    assert got == [0, 32, 0, 32, 0, 32, 32]


def test_the_names_that_cross_to_the_decode_worker_are_salted_too(salts: dict[str, bytes]) -> None:
    """What a decode worker has cached it knows by the hashes in the offer, which are these."""
    names = {who: set(chain(root_hash("model", salt), u32(PROMPT), 4)) for who, salt in salts.items()}
    assert not names["a"] & names["b"]
    assert not names["a"] & names["friend"]
    assert names["friend"] == names["other friend"]
