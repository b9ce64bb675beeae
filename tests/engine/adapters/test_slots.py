"""Which adapter is in which slot: none that is used is replaced, and every one that fits is served."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve.engine.adapters.slots import AdapterSlots

NAMES = ("a", "b", "c", "d", "e")
CONTENTS = ("A", "B", "C", "D", "E", "F")
STEPS = st.one_of(
    st.tuples(st.just("rename"), st.dictionaries(st.sampled_from(NAMES), st.sampled_from(CONTENTS))),
    st.tuples(st.just("fill"), st.booleans()),
    st.tuples(st.just("begin"), st.sampled_from(CONTENTS)),
    st.tuples(st.just("end"), st.sampled_from(CONTENTS)),
    st.tuples(st.sampled_from(["report", "turn"]), st.none()),
)


class Worker:
    """What fills slots, runs requests, and reports."""

    def __init__(self, num_slots: int) -> None:
        self.slots, self.num_slots = AdapterSlots(num_slots), num_slots
        self.weights: dict[int, str] = {}
        self.used: set[str] = set()
        self.reported: set[str] = set()  # as the coordinator knows
        self.names: dict[str, str] = {}

    def fill(self, ready: bool = True) -> None:
        for content in self.slots.wanted():
            slot = self.slots.take(content)
            assert slot is not None
            assert 0 <= slot < self.num_slots
            before = self.weights.get(slot)
            assert before not in self.used, "a step uses the slot's weights"
            assert before not in self.reported, "a request may come for them"
            self.weights[slot] = content
            assert not self.slots.has(content), "it is not there yet"
            self.slots.filled(content, ready)
            if not ready:
                del self.weights[slot]

    def step(self, what: str, value: object) -> None:
        if what == "rename":
            assert isinstance(value, dict)
            self.names = value
            self.slots.rename(value)
        elif what == "fill":
            self.fill(bool(value))
        elif what == "begin" and value in self.reported and self.slots.has(str(value)):
            self.used.add(str(value))
        elif what == "end":
            self.used.discard(str(value))
        elif what == "report":
            self.reported = {adapter.content for adapter in self.slots.reported}
        elif what == "turn":
            self.slots.give_up(self.used, self.reported)
        self.check()

    def check(self) -> None:
        slots = self.slots
        there = {content for content in CONTENTS if slots.has(content)}
        assert there <= set(self.weights.values())
        assert self.used <= there, "it went while it was used"
        assert {adapter.content for adapter in slots.reported} <= there
        assert len({adapter.name for adapter in slots.reported if adapter.name}) == sum(
            bool(adapter.name) for adapter in slots.reported
        )
        assert slots.gauges == {"adapters": len(there)}

    def settle(self) -> None:
        self.used.clear()
        for _ in range(4):
            for what in ("turn", "report", "turn", "fill", "report"):
                self.step(what, True)


@given(st.integers(1, 4), st.lists(STEPS, max_size=60))
def test_every_adapter_that_fits_is_served_in_the_end(
    num_slots: int, steps: list[tuple[str, object]]
) -> None:
    worker = Worker(num_slots)
    for what, value in steps:
        worker.step(what, value)
    worker.settle()
    served = {adapter.name: adapter.content for adapter in worker.slots.reported if adapter.name}
    assert served.items() <= worker.names.items(), "each name stands for its folder's content"
    wanted = set(worker.names.values())
    assert len(set(served.values())) == min(num_slots, len(wanted))
    assert set(worker.slots.left_out()) == worker.names.keys() - served.keys()
    assert not worker.slots.lacks_slots or len(wanted) > num_slots


def test_residents_stay_and_others_follow_by_name() -> None:
    worker = Worker(2)
    worker.step("rename", {"c": "C", "d": "D"})
    worker.settle()
    worker.step("rename", {"a": "A", "b": "B", "c": "C", "d": "D"})
    worker.settle()
    assert worker.slots.left_out() == ["a", "b"]
    worker.step("rename", {"a": "A", "b": "B", "d": "D"})
    worker.settle()
    assert worker.slots.left_out() == ["b"]


def test_a_name_keeps_its_content_until_the_new_one_is_ready() -> None:
    worker = Worker(2)
    worker.step("rename", {"a": "A"})
    worker.settle()
    worker.slots.rename({"a": "B"})
    slot = worker.slots.take("B")
    assert [(one.name, one.content) for one in worker.slots.reported] == [("a", "A")]
    assert slot is not None
    worker.slots.filled("B")
    assert [(one.name, one.content) for one in worker.slots.reported] == [("", "A"), ("a", "B")]


def test_a_content_that_is_named_again_does_not_leave() -> None:
    worker = Worker(1)
    worker.step("rename", {"a": "A"})
    worker.settle()
    worker.step("rename", {"b": "B"})
    worker.step("turn", None)
    assert worker.slots.reported == ()
    assert worker.slots.has("A"), "a request may be under way"
    worker.step("rename", {"a": "A"})
    assert [(one.name, one.content) for one in worker.slots.reported] == [("a", "A")]


def test_one_that_is_used_again_while_it_leaves_stays_until_then() -> None:
    worker = Worker(1)
    worker.step("rename", {"a": "A"})
    worker.settle()
    worker.step("rename", {"b": "B"})
    worker.step("turn", None)
    worker.step("begin", "A")  # it was on its way
    worker.step("report", None)
    worker.step("turn", None)
    assert worker.slots.has("A")
    worker.step("end", "A")
    worker.step("turn", None)
    assert worker.slots.wanted() == ["B"]
