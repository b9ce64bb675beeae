"""A cluster of tests of the pool controller, without processes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from splitserve.bench.studies.steer_workload import worker
from splitserve.steering.capacity import Capacity
from splitserve.steering.controller import PoolController
from splitserve.steering.fleet import Decision, Fleet
from splitserve.steering.load_watch import LoadPicture
from splitserve.steering.options import SteeringOptions
from splitserve.transport.messages.messages import Role

OPTIONS = SteeringOptions(ttft_s=4.0, tpot_s=0.15, mode="act")
CODE = LoadPicture(200, 8.0, new_tokens=2600, pairs=3.4e6, output_tokens=30, context=2615, num_judged=100)
CHAT = LoadPicture(200, 9.0, new_tokens=500, pairs=1.25e5, output_tokens=450, context=725, num_judged=100)


def arriving(picture: LoadPicture, **more: int) -> LoadPicture:
    """The same, also of the newest second."""
    newest = round(picture.rate) if math.isfinite(picture.rate) else 0
    return replace(
        picture, newest=newest, newest_tokens=picture.new_tokens, newest_pairs=picture.pairs, **more
    )  # type: ignore[arg-type]


class SteeredCluster:
    """Does what is decided, at once; its clock goes on by seconds. Prompts wait, answers run by the latency
    model."""

    def __init__(self, controller: PoolController, prefill: int, decode: int) -> None:
        self.controller, self.now = controller, 100.0
        self.roles = ["prefill"] * prefill + ["decode"] * decode
        self.decisions: list[Decision] = []
        self.in_use: dict[Role, float] = {}
        self.waiting = self.running = 0.0

    def serve(self, picture: LoadPicture) -> LoadPicture:
        """Return what is seen of a second of this load."""
        capacity, decode = Capacity(worker(), OPTIONS, 2048, 128), self.roles.count("decode")
        self.waiting += picture.rate
        begun = min(self.waiting, self.roles.count("prefill") / capacity.prompt_s(picture))
        self.waiting, self.running = self.waiting - begun, self.running + begun
        tokens = self.running / capacity.step_s(max(1.0, self.running / decode), picture)
        ends = min(self.running, tokens / picture.output_tokens)
        self.running -= ends
        return arriving(
            picture, num_waiting=max(picture.num_waiting, round(self.waiting)),
            num_decoding=round(self.running), newest_ends=round(ends), newest_output=round(tokens),
        )  # fmt: skip

    @property
    def fleet(self) -> Fleet:
        names: Any = {
            role: [f"w{i}" for i, r in enumerate(self.roles) if r == role] for role in ("prefill", "decode")
        }
        spare = {role: of_role[1:] for role, of_role in names.items()}
        return Fleet(
            len(names["prefill"]), len(names["decode"]), names, 0, 2048, 128, spare, in_use=self.in_use
        )

    def run(self, seconds: int, picture: LoadPicture) -> list[Decision]:
        found = []
        for _ in range(seconds):
            self.now += 1
            for decision in self.controller.decide(self.serve(picture), self.fleet, self.now):
                found.append(decision)
                if decision.kind == "flip":
                    self.roles[int(decision.worker[1:])] = decision.role
        self.decisions += found
        return found


def cluster(prefill: int = 4, decode: int = 4, **options: Any) -> SteeredCluster:
    return SteeredCluster(PoolController(replace(OPTIONS, **options), worker()), prefill, decode)
