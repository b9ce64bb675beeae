"""The load as the pool controller sees it: rates, lengths and attainment of ended and of running
requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.lifecycle.snapshot import RunningRequest, finished
from splitserve.coordinator.lifecycle.time_ledger import TimeLedger
from splitserve.steering.load_watch import MIN_JUDGED, LoadPicture, LoadWatch
from splitserve.steering.options import SteeringOptions
from splitserve.transport.latency_bounds import LatencyBound
from splitserve.transport.messages.messages import SamplingParams

OPTIONS = SteeringOptions(ttft_s=1.0, tpot_s=0.1)


class Sink:
    def push(self, token_id: int, logprobs: object) -> None: ...
    def push_prompt_logprobs(self, logprobs: object) -> None: ...
    def flush(self) -> None: ...
    def end(self, ended: object) -> None: ...


def request(arrival: float, prompt: int = 10) -> Request:
    return Request("r", [1] * prompt, SamplingParams(max_tokens=5), Sink(), arrival, arrival + 1e3)


def end(
    watch: LoadWatch,
    arrival: float,
    ttft_s: float,
    tpot_s: float,
    output: int,
    prompt: int = 10,
    **more: object,
) -> None:
    """Return a request with this arrival, time to its first token and time for each further one."""
    ledger = TimeLedger("queue", arrival)
    ledger.enter("prefill", arrival)
    ledger.enter("decode", arrival + ttft_s)
    now = arrival + ttft_s + tpot_s * (output - 1)
    ledger.close(now)
    over = finished(
        request(arrival, prompt), Ended("length", num_output_tokens=output, ledger=ledger, **more)
    )  # type: ignore[arg-type]
    assert over is not None
    watch.note(over, now)


def constant(rate: float, seconds: float, until: float = 100.0) -> LoadPicture:
    """What is seen at ``until`` of short requests that came evenly and ended 50 ms later."""
    watch = LoadWatch(OPTIONS)
    for i in range(int(rate * seconds)):
        end(watch, until - seconds + i / rate, 0.01, 0.01, 5)
    return watch.look([], until)


@pytest.mark.parametrize("rate", [2.0, 40.0, 900.0, 2500.0])
def test_the_rate_is_that_of_the_arrivals_however_many_there_are(rate: float) -> None:
    """Of 2,500 requests a second it remembers less than its window is long."""
    picture = constant(rate, 60.0 if rate < 100 else 6.0)
    assert picture.rate == pytest.approx(rate, rel=0.1)
    assert picture.output_tokens == pytest.approx(5, rel=0.05)


def test_good_is_what_met_both_objectives() -> None:
    watch = LoadWatch(OPTIONS)
    for ttft_s, tpot_s in ((0.5, 0.05), (1.5, 0.05), (0.5, 0.15), (0.5, 0.05)):
        end(watch, 95.0, ttft_s, tpot_s, 5)
    end(watch, 95.0, 0.5, 0.05, 5, error="deadline")
    picture = watch.look([], 100.0)
    assert (picture.num_judged, picture.attainment) == (5, pytest.approx(0.4))


def test_what_waits_too_long_is_bad_before_it_has_ended() -> None:
    watch = LoadWatch(OPTIONS)
    waiting = [queued(arrival) for arrival in (98.0, 99.8)]
    running = RunningRequest(97.0, 10, 0, 11, "decode", 97.5, token_at=99.5)
    picture = watch.look([*waiting, running], 100.0)
    assert (picture.num_waiting, picture.num_decoding) == (2, 1)
    assert (picture.num_judged, picture.attainment) == (
        2,
        0.0,
    )  # one waits for 2 s, one has a token every 0.2 s


def test_those_that_were_never_taken_in_are_no_load() -> None:
    assert finished(request(99.0), Ended(error="unavailable", ledger=TimeLedger("queue", 99.0))) is None
    assert finished(request(99.0), Ended(error="overloaded")) is None


def queued(arrival: float, prompt: int = 10) -> RunningRequest:
    return RunningRequest(arrival, prompt, 0, 0, "queue", arrival, 0.0)


def running(arrival: float, output: int, now: float, prompt: int = 10) -> RunningRequest:
    """A sequence that has had a token every 0.1 s until now."""
    return RunningRequest(arrival, prompt, 0, output, "decode", now - 0.1 * output, now - 0.1)


def test_in_a_steady_state_outputs_are_tokens_generated_over_requests_ended() -> None:
    """Ten a second come and stay for 20 s, a token every 0.1 s: within any 10 s 20,000 tokens are made and
    100 end."""
    watch = LoadWatch(OPTIONS)
    for now in range(60, 101):
        for i in range(10):
            end(watch, (10 * (now - 20) - i) / 10, 0.0, 0.1, 200)
        requests = [running((10 * (now - 20) + i) / 10, 200 - i, float(now)) for i in range(1, 200)]
        picture = watch.look(requests, float(now))
    assert picture.output_tokens == pytest.approx(200, rel=0.1)
    assert (picture.newest_ends, picture.newest_output) == (10, pytest.approx(2000, rel=0.02))


def test_longer_answers_show_before_any_of_them_has_ended() -> None:
    watch = LoadWatch(OPTIONS)
    for i in range(100):
        end(watch, 60 + i / 10, 0.01, 0.01, 30)
    before = watch.look([], 71.0).output_tokens
    after = watch.look([running(70.0, 100, 80.0) for _ in range(40)], 80.0).output_tokens
    assert before == pytest.approx(30, rel=0.1)
    assert after > 3 * before


def test_what_waits_counts_as_requests_with_such_prompts_did_before() -> None:
    """Conversations run still, but it is code that comes, and none of it has begun."""
    watch = LoadWatch(OPTIONS)
    for i in range(100):
        end(watch, i / 10, 0.01, 0.01, 30, prompt=3000)
        end(watch, 30 + i / 10, 0.01, 0.01, 450, prompt=500)
    talk = [running(80.0, 150, 95.1, prompt=500) for _ in range(100)]
    code = [queued(95.0 + i / 20, 3000) for i in range(100)]
    picture = watch.look([*talk, *code], 100.0)
    assert picture.output_tokens == pytest.approx(30, rel=0.2)
    assert picture.context == 650, "of those that run"
    assert picture.remaining_tokens > 200, "of those that run"


def test_which_share_keeps_the_bounds_of_the_scaling_rules() -> None:
    """Each for itself, whatever the objectives are; what has waited too long already does not."""
    watch = LoadWatch(
        replace(OPTIONS, scale_up_ttft=LatencyBound(2.0, 0.95), scale_up_tpot=LatencyBound(0.01, None))
    )
    for number in range(40):
        end(watch, 95.0, 2.5 if number < 10 else 0.5, 0.02 if number < 4 else 0.005, 5)
    assert watch.look([], 100.0).ttft_kept == pytest.approx(0.75)
    assert watch.look([], 100.0).tpot_kept == pytest.approx(0.9)
    waiting = [queued(97.5) for _ in range(10)]
    assert watch.look(waiting, 100.0).ttft_kept == pytest.approx(0.6)
    assert watch.look([], 200.0).ttft_kept == 1.0, "of none it is not said"
    few = LoadWatch(replace(OPTIONS, scale_up_ttft=LatencyBound(2.0, 0.95)))
    for number in range(MIN_JUDGED):
        assert few.look([], 100.0).ttft_kept == 1.0, f"{number} are too few"
        end(few, 95.0, 2.5, 0.005, 5)
    assert few.look([], 100.0).ttft_kept == 0.0
