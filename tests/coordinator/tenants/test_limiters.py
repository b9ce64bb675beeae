"""Limits hold across processes by a file, and across hosts by Redis, whatever is killed."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis.asyncio

from splitserve.coordinator.tenants import redis_limiter
from splitserve.coordinator.tenants.buckets import NUM_FIELDS, Holder, Room, Shortage, admit, settle
from splitserve.coordinator.tenants.limits import Account, Limits
from splitserve.coordinator.tenants.redis_limiter import RedisLimiter
from splitserve.coordinator.tenants.shared_limiter import SharedLimiter
from splitserve.coordinator.tenants.tenancy import Admission, Limiter

ACCOUNT = Account(
    tenant="t",
    tenant_id=3,
    key_id=7,
    tenant_limits=Limits(requests_per_minute=5, max_streams=4),
    key_limits=Limits(tokens_per_minute=1000),
)


def ask(limiter: Limiter, account: Account = ACCOUNT, tokens: int = 10) -> Admission | Shortage:
    """Return the answer of a limiter that answers at once."""
    answers: list[Admission | Shortage] = []
    limiter.admit(account, tokens, answers.append)
    return answers[0]


async def asked(limiter: Limiter, account: Account = ACCOUNT, tokens: int = 10) -> Admission | Shortage:
    answer: asyncio.Future[Admission | Shortage] = asyncio.get_running_loop().create_future()
    limiter.admit(account, tokens, answer.set_result)
    return await asyncio.wait_for(answer, 60)


async def test_two_processes_share_one_bucket(tmp_path: Path) -> None:
    one, two = (SharedLimiter(tmp_path / "limits", clock=lambda: 1e9) for _ in range(2))
    answers = [ask(limiter) for _ in range(2) for limiter in (one, two)]
    assert all(isinstance(answer, Admission) for answer in answers)
    assert [answer.room.remaining_requests for answer in answers] == [4, 3, 2, 1]
    full = ask(one)
    assert isinstance(full, Shortage)
    assert (full.what, full.limit) == ("streams", 4)
    assert isinstance(answers[1], Admission)
    two.settle(answers[1], 10)
    assert isinstance(ask(one), Admission)
    spent = ask(two)
    assert isinstance(spent, Shortage)
    assert spent.what == "requests"
    await one.stop()
    await two.stop()


async def test_what_was_used_outlives_the_process_and_its_streams_do_not(tmp_path: Path) -> None:
    """Killed with kill -9, while another process goes on."""
    script = (
        "import sys, time; from pathlib import Path; from "
        "splitserve.coordinator.tenants.shared_limiter import SharedLimiter\n"
        "from splitserve.coordinator.tenants.limits import Account, Limits\n"
        "limiter = SharedLimiter(Path(sys.argv[1]), clock=lambda: 1e9)\n"
        "account = Account(tenant_id=3, tenant_limits=Limits(max_streams=2, tokens_per_month=100))\n"
        "[limiter.admit(account, 30, lambda answer: print(type(answer).__name__, flush=True)) for "
        "_ in range(2)]\n"
        "time.sleep(300)"
    )
    survivor = SharedLimiter(tmp_path / "limits", clock=lambda: 1e9)  # within one month
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "limits")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert [child.stdout.readline().strip() for _ in range(2)] == ["Admission", "Admission"]
    account = Account(tenant_id=3, tenant_limits=Limits(max_streams=2, tokens_per_month=100))
    held = ask(survivor, account)
    assert isinstance(held, Shortage)
    assert held.what == "streams"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert isinstance(ask(survivor, account, 40), Admission)
    spent = ask(survivor, account, 1)
    assert isinstance(spent, Shortage)
    assert spent.what == "month"
    await survivor.stop()


async def test_an_account_without_limits_costs_nothing(tmp_path: Path) -> None:
    limiter = SharedLimiter(tmp_path / "limits")
    admission = ask(limiter, Account(tenant_id=10**9), 10**12)
    assert isinstance(admission, Admission)
    assert admission.room == Room()
    limiter.settle(admission, 1)
    assert (tmp_path / "limits").stat().st_size < 1 << 20
    await limiter.stop()


# --- Redis ---------------------------------------------------------------------------------------


@pytest.fixture
def redis_url(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A limiter whose server is not given up because the machine stood still."""
    monkeypatch.setattr(redis_limiter, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(redis_limiter, "ALIVE_S", 600)
    return redis_server


async def test_two_hosts_share_one_bucket(redis_url: str) -> None:
    """Whatever time it takes: nothing that was spent comes back within years."""
    account = ACCOUNT.model_copy(update={"tenant_limits": Limits(max_streams=4)})
    one, two = RedisLimiter(redis_url), RedisLimiter(redis_url)
    await one.start()
    await two.start()
    first = await asked(one, account)
    assert isinstance(first, Admission)
    answers = await asyncio.gather(*(asked(limiter, account) for limiter in (one, two) * 6))
    of_two = [answer for answer in answers[1::2] if isinstance(answer, Admission)]
    assert sum(isinstance(answer, Admission) for answer in answers) == 3
    assert {answer.what for answer in answers if isinstance(answer, Shortage)} == {"streams"}
    one.settle(first, 10)
    await one.stop()  # its streams are over with it
    again = await asyncio.gather(*(asked(two, account) for _ in range(6)))
    assert sum(isinstance(answer, Admission) for answer in again) == 4 - len(of_two)
    three = RedisLimiter(redis_url)
    for admission in of_two:
        two.settle(admission, 10**12)
    two.settle(next(answer for answer in again if isinstance(answer, Admission)), 10**12)
    await two.stop()
    await three.start()
    spent = await asked(three, account)
    assert isinstance(spent, Shortage)
    assert spent.what == "tokens"
    await three.stop()


async def corrected(limiter: Limiter, admission: Admission | Shortage, tokens: int) -> Admission | Shortage:
    answer: asyncio.Future[Admission | Shortage] = asyncio.get_running_loop().create_future()
    assert isinstance(admission, Admission)
    limiter.correct(admission, tokens, answer.set_result)
    return await asyncio.wait_for(answer, 60)


async def test_an_estimate_is_corrected_before_the_request_runs(tmp_path: Path) -> None:
    limiter = SharedLimiter(tmp_path / "limits", clock=lambda: 1e9)
    await check_corrections(limiter)
    await limiter.stop()


async def test_redis_corrects_an_estimate_likewise(redis_url: str) -> None:
    limiter = RedisLimiter(redis_url)
    await limiter.start()
    await check_corrections(limiter)
    await limiter.stop()


async def check_corrections(limiter: Limiter) -> None:
    """It counts as one request and one stream; where there are too few tokens, stream and tokens are given
    back."""
    first = await corrected(limiter, await asked(limiter, tokens=1), 900)
    assert isinstance(first, Admission)
    assert (first.tokens, first.room.remaining_tokens // 10, first.room.remaining_requests) == (900, 10, 4)
    refused = await corrected(limiter, await asked(limiter, tokens=1), 500)
    assert isinstance(refused, Shortage)
    assert (refused.what, refused.asked) == ("tokens", 500)
    others = [await asked(limiter, tokens=30) for _ in range(3)]  # four streams are open with the first
    assert all(isinstance(other, Admission) for other in others)
    last = await asked(limiter, tokens=0)
    assert isinstance(last, Shortage)
    assert last.what in ("requests", "streams")  # one request of five was refused after it was counted


async def test_redis_has_the_rules_of_the_pure_core(redis_url: str) -> None:
    """A thousand steps of both, with the same clock: the same answers, the same numbers."""
    rng, now = random.Random(5), 1.7e9
    limiter = RedisLimiter(redis_url)
    limits = [
        Limits(requests_per_minute=2, tokens_per_minute=3000, tokens_per_day=6_000),
        Limits(tokens_per_minute=2000, tokens_per_month=30_000),
    ]
    holders = [Holder([0.0] * NUM_FIELDS, bounds) for bounds in limits]
    names = [("a", limits[0]), ("b", limits[1])]
    outcomes = set()
    for _ in range(1000):
        now += rng.expovariate(1 / rng.choice((0.1, 5, 2_500))) - 600 * (rng.random() < 0.01)
        tokens = rng.choice((rng.randrange(200), rng.randrange(2500)))
        if rng.random() < 0.7:
            here = admit(holders, tokens, now)
            outcomes.add(here.what if isinstance(here, Shortage) else "room")
            taken, after = await limiter.take(names, tokens, 1, now)
            assert taken == isinstance(here, Room)
        else:
            settle(holders, 1000, tokens, now)
            _, after = await limiter.take(names, tokens - 1000, -1, now)
        for a, b in zip(holders, after, strict=True):
            assert list(b.state) == pytest.approx(list(a.state))
    assert outcomes >= {"room", "requests", "tokens", "day", "month"}
    await limiter.stop()


async def test_a_redis_that_is_gone_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limiter = RedisLimiter(f"unix://{tmp_path}/nobody")
    admission = await asked(limiter)
    assert isinstance(admission, Admission)
    limiter.settle(admission, 3)
    await limiter.stop()
    assert "Redis does not answer" in caplog.text


@pytest.mark.parametrize("keeps_data", [True, False])
async def test_a_redis_that_was_away_counts_the_streams_that_are_open(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, keeps_data: bool
) -> None:
    """Those that ended meanwhile are free, those that did not are held."""
    monkeypatch.setattr(redis_limiter, "RENEW_S", 0.05)
    account = Account(tenant_id=3, tenant_limits=Limits(max_streams=4))
    limiter, server, socket = (
        RedisLimiter(redis_url),
        redis.asyncio.Redis.from_url(redis_url),
        Path(redis_url[7:]),
    )
    await limiter.start()
    admissions = [await asked(limiter, account) for _ in range(4)]
    await server.ping()
    away = socket.rename(socket.with_name("away"))
    await server.client_kill_filter(_type="normal", skipme=True)
    for admission in admissions[:3]:
        assert isinstance(admission, Admission)
        limiter.settle(admission, 10)
    beyond = [await asked(limiter, account) for _ in range(2)]
    assert all(isinstance(admission, Admission) for admission in beyond), (
        "nothing is limited while it is away"
    )
    if not keeps_data:
        await server.flushall()
    away.rename(socket)
    async with asyncio.timeout(60):
        while b"3" not in await server.hvals("splitserve:limits:tenant:3:streams"):  # of one name or another
            await asyncio.sleep(0.01)
    assert isinstance(await asked(limiter, account), Admission)
    full = await asked(limiter, account)
    assert isinstance(full, Shortage)
    assert full.what == "streams"
    await limiter.stop()
    await server.aclose()
