"""Clusters that several tests share: starting one takes seconds. They end with the last test of this folder:
until the session ended, their heartbeats took a tenth of a core from all other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster import Cluster, running
from e2e.forked_cluster import ForkedCluster, forked
from e2e.nursery import Nursery, the_nursery
from support.models import make_checkpoint
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A small seeded random checkpoint with room for long prompts, and transformers' own model of it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_checkpoint(folder, "llama2", seed=3, max_position_embeddings=4096)
    return folder, model


@pytest.fixture(scope="package")
def cluster(
    tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two prefill and two decode workers. `up` and its coordinator are new programs, as users have them."""
    arguments = ("--prefill", "2", "--decode", "2", "--kv-cache-gib", "0.1", "--ollama")
    with running(tiny[0], tmp_path_factory.mktemp("cluster"), *arguments, anew=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    """What all forked clusters get their processes from."""
    return the_nursery()


@pytest.fixture(scope="package")
def forked_cluster(
    nursery: Nursery, tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkedCluster]:
    """Two prefill and two decode workers, batch-invariant, that are back at once when they are killed."""
    options = ("--exact", "--dtype", "float32", "--kv-cache-gib", "0.1")
    with forked(nursery, tiny[0], tmp_path_factory.mktemp("forked"), *options) as cluster:
        yield cluster
