"""A prompt is computed with its adapter or not at all, and the coordinator knows what is ready."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.prefix_rig import PROMPT, SPEC, core

from splitserve.engine.adapters.slots import AdapterSlots, RoleAdapters
from splitserve.prefill.core import PrefillCore
from splitserve.transport.handoff.protocol import ToCoordinator
from splitserve.transport.messages.messages import Adapter, BlockEvents, RequestFailed

ASKED = replace(PROMPT, spec=replace(SPEC, adapter="x"))


@pytest.fixture
def slots() -> AdapterSlots:
    made = AdapterSlots(1)
    fill(made, "sql", "x")
    return made


def fill(slots: AdapterSlots, name: str, content: str) -> None:
    slots.rename({name: content})
    assert slots.take(content) is not None
    slots.filled(content)


def with_adapters(slots: AdapterSlots) -> PrefillCore:
    made = core("p")
    made.adapters = RoleAdapters(slots, made.scheduler.sequences)
    return made


def reported(core: PrefillCore, everything: bool = False) -> object:
    events = core.block_events(everything)
    assert isinstance(events, BlockEvents)
    return events.adapters


def test_a_prompt_whose_adapter_is_not_here_is_given_back() -> None:
    prefill = with_adapters(AdapterSlots(1))
    prefill.from_coordinator(ASKED, 0.0)
    (action,) = prefill.take(0.0)
    assert isinstance(action, ToCoordinator)
    assert isinstance(action.message, RequestFailed)
    assert (action.message.dispatch, action.message.kind) == (1, "handoff_failed")
    assert prefill.schedule(0.0) is None
    assert prefill.held == []


def test_it_is_in_use_until_its_last_step_is_over(slots: AdapterSlots) -> None:
    prefill = with_adapters(slots)
    prefill.from_coordinator(ASKED, 0.0)
    assert prefill.adapters.in_use == {"x"}
    prefill.scheduler.waiting[(7, 1)].prefix_by = 0.0
    step = prefill.schedule(0.0)
    assert step is not None
    assert step.batch.adapters == ["x"]
    prefill._drop((7, 1))
    assert prefill.adapters.in_use == {"x"}
    prefill.scheduler.skip(step)
    assert prefill.adapters.in_use == set()


def test_every_change_is_reported_and_all_to_a_new_coordinator(slots: AdapterSlots) -> None:
    prefill = with_adapters(slots)
    assert reported(prefill) == (Adapter(name="sql", content="x"),)
    assert prefill.block_events() is None
    slots.rename({})
    assert reported(prefill) == (Adapter(name="", content="x"),)
    assert prefill.block_events() is None
    assert reported(prefill, everything=True) == (Adapter(name="", content="x"),)
    assert prefill.adapters.reported == {"x"}


def test_a_slot_is_given_up_after_it_was_reported(slots: AdapterSlots) -> None:
    prefill = with_adapters(slots)
    prefill.block_events()
    slots.rename({"sql": "y"})
    slots.give_up(prefill.adapters.in_use, prefill.adapters.reported)
    slots.give_up(prefill.adapters.in_use, prefill.adapters.reported)
    assert slots.has("x")
    assert reported(prefill) == ()
    slots.give_up(prefill.adapters.in_use, prefill.adapters.reported)
    assert not slots.has("x")
    assert slots.wanted() == ["y"]


def test_one_that_drains_reports_none(slots: AdapterSlots) -> None:
    prefill = with_adapters(slots)
    prefill.block_events()
    prefill.drain(0.0)
    assert prefill.adapters.reported == set()
