"""Tests of the engine share the machine with tests of whole clusters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from splitserve.engine.cache import memory_claims


@pytest.fixture(scope="package", autouse=True)
def _no_claims_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What workers of other tests have claimed of the memory changes no size and no message here."""
    folder = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_claims, "default_folder", lambda: folder)
        yield
