"""How much work the clients of a world bring its decode workers, on average."""

from __future__ import annotations

from statistics import mean

from simulation.faults import Cluster, Scenario
from simulation.step_device import DECODE_STEP_S
from simulation.wishes import MAX_TOKENS, OWN, SHARED
from simulation.worker_process import BLOCK_SIZE, MAX_MODEL_LEN

ODD_AND_LONG = 0.375 / 6
"""Share of the longest answer that a request with an oddity has: a sixth are of the longest sequence, whose
prompts are of one token, half of it, or all but one or two."""


def decode_s(scenario: Scenario, num_requests: int) -> float:
    """Return the seconds that the decode workers take for these requests, if nothing befalls them and no
    draft is right. Clients with a key that come again while they wait count twice."""
    cluster = scenario.cluster
    usual = mean(MAX_TOKENS) * (3 if cluster.drafts else 1)
    tokens = usual + scenario.odd * ODD_AND_LONG * _longest(cluster)
    num_answers = num_requests * (1 + scenario.keyed * scenario.odd)
    blocks = (mean(SHARED) + mean(OWN) + usual) / BLOCK_SIZE + 2 * cluster.state_blocks
    rows = min(float(cluster.max_num_seqs), cluster.decode_blocks / blocks)
    others = cluster.num_flexible // 2 + cluster.num_mixed + cluster.num_borrowing
    return num_answers * tokens * DECODE_STEP_S / (rows * (cluster.num_decode + others))


def _longest(cluster: Cluster) -> int:
    return min(MAX_MODEL_LEN, BLOCK_SIZE * min(cluster.prefill_blocks, cluster.decode_blocks))
