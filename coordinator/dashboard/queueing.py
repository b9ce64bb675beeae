"""What one more worker would do to the time to first token. Pure; times in seconds.

Two models of c servers, each where it holds. Of both only the ratio of the waits with c+1 and with c servers
is used, so that what they leave out (how arrivals and lengths vary) cancels as far as it can.

- Below saturation, arrivals that wait for nobody. The mean wait is proportional to rho^(sqrt(2(c+1)) - 1) /
  (c (1 - rho)), where rho is the servers' busy share: H. Sakasegawa, "An approximation formula Lq = alpha
  rho^beta / (1 - rho)", Annals of the Institute of Statistical Mathematics 29, 1977.
- At saturation rho predicts no wait, and clients that ask again only when they are answered are its
  likely cause: as many requests stay in flight. Mean value analysis (M. Reiser, S. Lavenberg, Journal of the
  ACM 27, 1980) of one queue and a delay; c servers are one of c times the speed and a delay of (c-1)/c of
  the work (A. Seidmann et al., Computer Performance 8, 1987). Where arrivals do not wait for answers, the
  gain is larger.
"""

from __future__ import annotations

from math import pow, sqrt

SATURATED = 0.9
"""Busy share from which on the pool is taken as saturated."""
MAX_CLIENTS = 2000


def open_wait(busy: float, servers: int) -> float:
    """The mean wait in a queue, in units that depend on the work alone. ``busy``: share of the servers' time,
    less than 1."""
    return pow(busy, sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy))


def closed_wait(clients: int, work_s: float, delay_s: float, servers: int) -> float:
    """The mean wait for servers of ``work_s`` each, where each client spends ``delay_s`` elsewhere between
    two visits."""
    fast_s, spread_s = work_s / servers, work_s * (servers - 1) / servers
    stay_s = queued = 0.0
    for number in range(1, clients + 1):
        stay_s = fast_s * (1 + queued)
        queued = stay_s * number / (stay_s + spread_s + delay_s)
    return max(0.0, stay_s + spread_s - work_s)


def ttft_with_one_more(
    ttft_s: float, queue_s: float, total_s: float, per_s: float, busy: float, servers: int
) -> float:
    """Mean time to first token with one more server of the pool that requests queue for.

    ``queue_s``: the part of ``ttft_s`` that is queueing; ``total_s``: a request's whole stay; all are means
    over requests.
    ``per_s``: requests that end a second; ``busy``: share of the servers' time.
    """
    if busy <= 0 or per_s <= 0:
        return ttft_s
    if busy < SATURATED:
        before, after = open_wait(busy, servers), open_wait(busy * servers / (servers + 1), servers + 1)
    else:
        clients = min(MAX_CLIENTS, max(1, round(per_s * total_s)))  # Little's law
        work_s = busy * servers / per_s
        delay_s = max(0.0, total_s - queue_s - work_s)
        before, after = (closed_wait(clients, work_s, delay_s, number) for number in (servers, servers + 1))
    return ttft_s - queue_s + queue_s * (min(1.0, after / before) if before > 0 else 1.0)
