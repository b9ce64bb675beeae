"""Ranks on GPUs call NCCL for what ranks on a CPU do by themselves."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine.ranks.played_nccl import PlayedNccl

from splitserve.engine.errors import RankFailedError
from splitserve.engine.model.ranks import Rank
from splitserve.engine.ranks.host import HostRank, mailboxes
from splitserve.engine.ranks.nccl import Communicators, NcclRank

SIZE = 3


def on_each(ranks: list[Rank], work: Callable[[Rank], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


@pytest.fixture(params=["host", "nccl"])
def ranks(request: pytest.FixtureRequest) -> list[Rank]:
    boxes = mailboxes(SIZE)
    if request.param == "host":
        return [HostRank(number, boxes) for number in range(SIZE)]
    communicators = Communicators(SIZE, PlayedNccl(SIZE), lambda: 0)
    return [NcclRank(number, boxes, communicators, torch.device("cpu")) for number in range(SIZE)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_sums(ranks: list[Rank], dtype: torch.dtype) -> None:
    parts = [torch.full((4, 5), float(2**number), dtype=dtype) for number in range(SIZE)]
    found = on_each(ranks, lambda rank: rank.sum(parts[rank.number].clone()))
    assert all(torch.equal(each, torch.full((4, 5), 7.0, dtype=dtype)) for each in found)


def test_a_part_that_is_not_contiguous_is_summed(ranks: list[Rank]) -> None:
    parts = torch.arange(SIZE * 8.0).view(SIZE, 2, 4)
    found = on_each(ranks, lambda rank: rank.sum(parts[rank.number].t()))
    assert all(torch.equal(each, parts.sum(0).t()) for each in found)


@pytest.mark.parametrize("width", [9, 8, 7])
def test_parts_side_by_side(ranks: list[Rank], width: int) -> None:
    whole = torch.arange(2.0 * width).view(2, width)
    found = on_each(ranks, lambda rank: rank.joined(whole[:, rank.tokens(width)], width))
    assert all(torch.equal(each, whole) and each.is_contiguous() for each in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_for_each(ranks: list[Rank], dtype: torch.dtype) -> None:
    """[from, to, 2, 4]; of parts that are not contiguous."""
    parts = torch.arange(SIZE * SIZE * 8).view(SIZE, SIZE, 2, 4).to(dtype)
    for _ in range(2):
        found = on_each(ranks, lambda rank: rank.exchanged(parts[rank.number].transpose(1, 2)))
        for to, each in enumerate(found):
            assert torch.equal(each, parts[:, to].transpose(1, 2))


def test_what_rank_0_gives(ranks: list[Rank]) -> None:
    tokens = torch.tensor([5, 7], dtype=torch.int32)
    found = on_each(ranks, lambda rank: rank.shared(None if rank.number else tokens, 2))
    assert all(torch.equal(each, tokens) for each in found)
    numbers = on_each(ranks, lambda rank: torch.tensor(rank.agreed(0.25 + rank.number)))
    assert numbers == [0.25] * SIZE


def test_a_rank_that_fails_releases_the_others(ranks: list[Rank]) -> None:
    on_each(ranks, lambda rank: rank.sum(torch.ones(1)))  # all have met

    def work(rank: Rank) -> torch.Tensor:
        if rank.number == 1:
            rank.fail()
            return torch.zeros(1)
        with pytest.raises(RankFailedError):
            rank.sum(torch.ones(1))
        return torch.ones(1)

    assert on_each(ranks, work) == [1, 0, 1]
