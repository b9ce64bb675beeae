"""The layers of a running prefill step, which become final one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...worker.steps import RunningStep


@dataclass(slots=True)
class LeavingLayers:
    """Looked at every ``stride`` layers: times are in seconds of the virtual clock."""

    step: RunningStep
    made_at: float
    loop_s: float  # from then on, before the first layer
    seconds: float  # that all layers take
    stride: int
    num_layers: int
    awaited: int = 0  # number of final layers at the next look

    def time_of(self, num_layers: int) -> float:
        """Return the time at which this number of layers is final."""
        return self.made_at + (self.loop_s + self.seconds * num_layers / self.num_layers)

    def num_done(self, now: float) -> int:
        """How many were final at the last look that a worker would have had by now: a multiple of the
        stride."""
        share = (now - self.made_at - self.loop_s) / self.seconds if self.seconds else 1.0
        done = max(0, int(share * self.num_layers / self.stride) + 1) * self.stride
        while done > 0 and (done >= self.num_layers or self.time_of(done) > now):
            done -= self.stride
        return done

    def await_layers(self, wanted: int, num_seen: int) -> int:
        """The first look after the one at ``num_seen`` layers at which ``wanted`` are final; 0: there is none
        before the end, or it is awaited already."""
        looks = max(-(-wanted // self.stride), num_seen // self.stride + 1)
        before, self.awaited = self.awaited, looks * self.stride
        return self.awaited if before != self.awaited < self.num_layers else 0

    def ending_at(self, ends_at: float, now: float) -> LeavingLayers:
        """The same layers, where what is left of them takes until then, evenly."""
        left = 1.0 - (now - self.made_at - self.loop_s) / self.seconds if self.seconds else 0.0
        if left <= 0:
            return self
        seconds = (ends_at - now) / left
        return replace(self, made_at=ends_at - seconds, loop_s=0.0, seconds=seconds)
