"""What is due for a check is kept from word to word: the same as looking at all that has arrived."""

from __future__ import annotations

from random import Random

from splitserve.transport.handoff.granting import Incoming
from splitserve.transport.messages.messages import Handoff, RequestSpec, SamplingParams

NUM_BLOCKS = 12


def test_what_is_due_is_what_has_arrived_with_a_checksum_and_is_not_checked() -> None:
    seen = 0
    for seed in range(40):
        random, incoming = Random(seed), _granted()
        for _ in range(60):
            _anything_happens(random, incoming)
            unchecked = incoming.arrived - incoming.checking - incoming.right - incoming.wrong
            assert incoming.due == {position for position in unchecked if position in incoming.checksums}
            seen += bool(incoming.due)
    assert seen > 100


def test_a_lease_waits_for_its_check_only_once_all_blocks_are_here() -> None:
    incoming = _granted()
    spec = RequestSpec(
        request_id="r", epoch=0, dispatch=1, coordinator=7, token_ids=b"", num_prompt_tokens=0,
        sampling=SamplingParams(max_tokens=9), deadline_s=60.0,
    )  # fmt: skip
    incoming.handoff = Handoff(spec=spec, lease=1, token=5, checksums=b"")
    incoming.add_checksums(0, [5] * NUM_BLOCKS)
    incoming.arrive(range(NUM_BLOCKS - 1))
    incoming.checks()
    assert not incoming.verifying, "its writer has to bring the last one, or to renew the lease"
    incoming.arrive([NUM_BLOCKS - 1])
    incoming.checks()
    assert incoming.verifying
    incoming.checked(list(range(NUM_BLOCKS)), [])
    assert not incoming.verifying


def _granted() -> Incoming:
    incoming = Incoming((7, 1), ("prefill-0", 1), "r", 0, 4 * NUM_BLOCKS, [], 0.0, lease=1)
    incoming.blocks = list(range(NUM_BLOCKS))
    return incoming


def _anything_happens(random: Random, incoming: Incoming) -> None:
    first = random.randrange(NUM_BLOCKS)
    positions = range(first, random.randint(first, NUM_BLOCKS))
    event = random.choice(["checksums", "arrive", "checks", "checked", "again"])
    if event == "checksums":
        incoming.add_checksums(first, [random.choice([5, 5, 5, 6]) for _ in positions])
    elif event == "arrive":
        incoming.arrive(positions)
    elif event == "checks":
        incoming.checks()
    elif event == "checked" and incoming.checking:
        part = sorted(incoming.checking)[: random.randint(1, 4)]
        incoming.checked(part, part[: random.randint(0, 1)])
    elif event == "again" and incoming.wrong and not incoming.checking:
        incoming.expect_again()
