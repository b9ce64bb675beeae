"""A launched step with states is not computed again: the worker ends instead."""

from __future__ import annotations

import pytest

from splitserve.engine.errors import DeviceLostError
from splitserve.engine.step.metadata import once_only


def test_a_launched_step_that_fails_late_ends_the_worker() -> None:
    def fail() -> int:
        raise ValueError("no logprobs")

    with pytest.raises(DeviceLostError, match=r"states are lost: no logprobs"):
        once_only(fail)()


def test_a_lost_device_stays_one() -> None:
    lost = DeviceLostError("the device is lost")

    def fail() -> int:
        raise lost

    with pytest.raises(DeviceLostError) as raised:
        once_only(fail)()
    assert raised.value is lost
    assert once_only(lambda: 7)() == 7
