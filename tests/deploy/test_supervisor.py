"""The supervisor's promises, kept with small child processes instead of the serving roles."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from splitserve.deploy.child_process import Command
from splitserve.deploy.restart import RestartPolicy
from splitserve.deploy.supervisor import Supervisor

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(60)"
)
POLITE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1]).touch() or sys.exit())
print('up', flush=True); time.sleep(60)
"""
COUNTING = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.open('a').write('x'); sys.exit(1 if "
    "len(p.read_text()) < 4 else 0)"
)


class Lines:
    """The children's output, with a way to wait for it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.seen.append((name, line))

    async def until(self, count: int, text: str) -> None:
        async with asyncio.timeout(60):
            while sum(text in line for _, line in self.seen) < count:
                await asyncio.sleep(0.01)


def python(name: str, code: str, *arguments: str) -> Command:
    return Command(name, [sys.executable, "-c", code, *arguments], dict(os.environ))


async def unknown() -> None:
    """The coordinator does not answer."""


def supervisor(
    commands: list[Command], lines: Lines, *, ready: bool = True, grace_s: float = 5.0
) -> Supervisor:
    async def is_ready() -> bool:
        return ready

    return Supervisor(
        commands,
        is_ready=is_ready,
        known_workers=unknown,
        log=lines,
        grace_s=grace_s,
        policy=lambda: RestartPolicy(first_delay_s=0.01),
    )


def returning(status: int, wait: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[int]]:
    async def work() -> int:
        await wait()
        return status

    return work


async def forever() -> int:
    await asyncio.Event().wait()
    return 0


def test_delays_double_and_begin_again_after_a_stable_while() -> None:
    policy, now, delays = RestartPolicy(), 0.0, []
    for _ in range(11):
        policy.started(now)
        delays.append(policy.delay_after_exit(now + 1, ever_ready=True))
        now += 1
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    policy.started(now)
    assert policy.delay_after_exit(now + 20, ever_ready=True) == 0.1


def test_what_never_worked_is_not_tried_again() -> None:
    policy = RestartPolicy()
    policy.started(0)
    assert policy.delay_after_exit(1, ever_ready=False) is None


async def test_a_crashed_process_starts_again(tmp_path: Path) -> None:
    lines = Lines()
    watched = supervisor(
        [python("steady", SLEEPER), python("shaky", COUNTING, str(tmp_path / "count"))], lines
    )
    status = await watched.run(returning(7, lambda: lines.until(4, "starts again")))
    assert status == 7
    assert (tmp_path / "count").read_text().startswith("xxxx")
    assert {name for name, line in lines.seen if "starts again" in line} == {"shaky"}
    assert not any(child.running for child in watched.children)


async def test_a_process_that_starts_again_gets_more_arguments() -> None:
    lines = Lines()
    message = Command(
        "worker",
        [sys.executable, "-c", "import sys; print('got', sys.argv[1:])"],
        dict(os.environ),
        argv_again=["--less"],
    )
    watched = supervisor([python("steady", SLEEPER), message], lines)
    assert await watched.run(returning(0, lambda: lines.until(2, "got ['--less']"))) == 0
    assert next(line for _, line in lines.seen if "got" in line) == "got []"


async def test_a_process_that_cannot_start_ends_all_with_its_last_words() -> None:
    lines = Lines()
    watched = supervisor(
        [python("steady", SLEEPER), python("broken", "raise SystemExit('no such model')")], lines, ready=False
    )
    assert await watched.run(forever) == 1
    assert watched.failure == "broken could not start (exit status 1): no such model"
    assert not any(child.running for child in watched.children)


async def test_stop_asks_first_and_kills_what_does_not_listen() -> None:
    lines = Lines()
    watched = supervisor([python("polite", SLEEPER), python("stubborn", STUBBORN)], lines, grace_s=0.5)

    async def stop_when_up() -> int:
        await lines.until(2, "up")
        watched.stop()
        return await forever()

    assert await watched.run(stop_when_up) == 0
    assert not any(child.running for child in watched.children)


async def test_a_stopped_process_is_still_ended_politely(tmp_path: Path) -> None:
    lines = Lines()
    watched = supervisor([python("frozen", POLITE, str(tmp_path / "polite"))], lines, grace_s=60.0)

    async def freeze() -> None:
        await lines.until(1, "up")
        watched.children[0].signal(signal.SIGSTOP)

    assert await watched.run(returning(0, freeze)) == 0
    assert (tmp_path / "polite").exists(), "and not killed when its time was over"


async def test_a_failed_work_shows_its_error_and_still_stops_all() -> None:
    lines = Lines()
    watched = supervisor([python("steady", SLEEPER)], lines)

    async def fail() -> int:
        await lines.until(1, "up")
        raise RuntimeError("broken work")

    with pytest.raises(RuntimeError, match="broken work"):
        await watched.run(fail)
    assert not any(child.running for child in watched.children)


async def test_not_ready_in_time_is_a_failure() -> None:
    watched = supervisor([python("steady", SLEEPER)], Lines(), ready=False)
    watched._ready_timeout_s = 0.1
    assert await watched.run(forever) == 1
    assert "not ready after 0.1 s" in watched.failure


KILLED_SUPERVISOR = f"""
import asyncio, os, sys
from splitserve.deploy.child_process import Command
from splitserve.deploy.supervisor import Supervisor
async def never(): return False
async def unknown(): return None
def log(name, line): print(child.pid, flush=True)
command = Command("child", [sys.executable, "-c", {STUBBORN!r}], dict(os.environ))
supervisor = Supervisor([command], is_ready=never, known_workers=unknown, log=log)
child = supervisor.children[0]
asyncio.run(supervisor.run(never))
"""


def test_nobody_outlives_a_killed_supervisor() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_SUPERVISOR], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        child = psutil.Process(int(killed.stdout.readline()))
        killed.kill()
        killed.wait()
        child.wait(timeout=60)


@pytest.mark.parametrize("answers", [True, False])
async def test_a_rolling_restart_waits_for_the_coordinators_answer_or_says_that_nothing_was_restarted(
    answers: bool,
) -> None:
    """Only the coordinator knows which processes are workers; one that is busy just then is asked again."""
    lines, asked = Lines(), 0

    async def known_workers() -> dict[str, int] | None:
        nonlocal asked
        asked += 1
        return {} if answers and asked > 3 else None

    async def is_ready() -> bool:
        return True

    both = Supervisor(
        [python("coordinator", SLEEPER)],
        is_ready=is_ready,
        log=lines,
        known_workers=known_workers,
        leave_within_s=60 if answers else 0.1,
    )

    async def work() -> int:
        await lines.until(1, "up")
        both.roll()
        await lines.until(1, "every worker is new" if answers else "nothing was restarted")
        return 0

    assert await both.run(work) == 0
