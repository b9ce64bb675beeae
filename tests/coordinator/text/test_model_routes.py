"""Shares of routes: a pure function of the route's name and the conversation's key."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.coordinator.text.model_route import ModelRoute

KEYS = [f"conversation {n}" for n in range(10_000)]
SHARES = st.dictionaries(
    st.text(min_size=1, max_size=8), st.floats(0, 1e6).map(lambda weight: round(weight, 3)), min_size=1
).filter(lambda shares: any(shares.values()))


def route(**shares: float) -> ModelRoute:
    return ModelRoute("chat", shares)


@pytest.mark.parametrize(
    "shares", [{"a": 95, "b": 5}, {"a": 1, "b": 1, "c": 2}, {"a": 0, "b": 1}, {"a": 0.99, "b": 0.01}], ids=str
)
def test_shares_hold(shares: dict[str, float]) -> None:
    found = [route(**shares).share_of(key) for key in KEYS]
    for name, weight in shares.items():
        part = weight / sum(shares.values())
        assert abs(found.count(name) / len(KEYS) - part) <= 4 * (part * (1 - part) / len(KEYS)) ** 0.5


@given(SHARES, st.text(max_size=40))
def test_a_conversation_stays_whatever_the_order_of_the_file(shares: dict[str, float], key: str) -> None:
    turned = dict(reversed(shares.items()))
    first = ModelRoute("chat", shares).share_of(key)
    assert first == ModelRoute("chat", turned).share_of(key)
    assert shares[first] > 0


@given(SHARES, st.text(max_size=40), st.data())
def test_a_raised_share_moves_conversations_to_it_alone(
    shares: dict[str, float], key: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(shares)))
    raised = {**shares, name: shares[name] + data.draw(st.floats(0, 1e6))}
    before, after = ModelRoute("chat", shares).share_of(key), ModelRoute("chat", raised).share_of(key)
    assert after in (before, name)
    if before == name:
        assert after == name


def test_a_rollout_step_by_step_moves_nobody_back() -> None:
    steps = [route(a=100 - part, b=part) for part in (0, 1, 5, 10, 50, 100)]
    moved = [{key for key in KEYS if each.share_of(key) == "b"} for each in steps]
    assert (len(moved[0]), len(moved[-1])) == (0, len(KEYS))
    assert all(before < after for before, after in pairwise(moved))


def test_routes_decide_independently() -> None:
    other = ModelRoute("other", {"a": 1, "b": 1})
    alike = sum(route(a=1, b=1).share_of(key) == other.share_of(key) for key in KEYS)
    assert 0.45 < alike / len(KEYS) < 0.55


def test_every_process_decides_alike() -> None:
    keys = KEYS[:50]
    code = (
        "from splitserve.coordinator.text.model_route import ModelRoute\n"
        f"print([ModelRoute('chat', {{'a': 1, 'b': 1}}).share_of(key) for key in {keys!r}])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str([route(a=1, b=1).share_of(key) for key in keys])


def test_the_order_of_models() -> None:
    chat = ModelRoute("chat", {"a": 1, "b": 1, "c": 0}, ("d", "a"))
    key = next(key for key in KEYS if chat.share_of(key) == "b")
    assert chat.order(key) == ["b", "d", "a"]
    assert chat.order(key, "a") == ["a", "b", "d"], "what has answered before"
    assert chat.order(key, "d") == ["d", "b", "a"]
    assert chat.order(key, "c") == ["b", "d", "a"], "its share was taken back"
    assert chat.order(key, "none") == ["b", "d", "a"]
    assert chat.order("") == ["a", "d"]
    assert chat.targets == ["a", "b", "d"]


def test_the_log_has_all_of_a_route() -> None:
    route = ModelRoute("chat", {"a": 99, "b": 1}, ("c", "d"), "e", 10.0)
    assert str(route) == "chat: a 99, b 1, else c, d, 10% copied to e"
