"""What arrives, what waits and how well it is served, as the pool controller sees it. Pure; times in seconds.

A request's output length is known at its end only. Requests with prompts of about one length count as one
kind; its mean output is the tokens that it brings over the answers that end, the newest weighing most. The
mean over all is that over what arrives, by kind: those that wait count too, of which nothing is known but the
prompt.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import takewhile
from typing import NamedTuple

from ..coordinator.lifecycle.snapshot import FinishedRequest, RunningRequest
from ..transport.latency_bounds import LatencyBound
from .options import SteeringOptions

MEMORY = 4096  # ended requests
LENGTHS_MEMORY = 15  # ended answers of a kind after which older ones weigh 1/e
ALL = -1  # kinds
# of the mean output: what a running sequence of a steady state has still before it, by lengths as they are
# found
REMAINING = 0.7
MIN_TOKENS = 8  # of a running sequence before its pace is judged
MIN_JUDGED = 20  # requests before the share of good ones means anything


class Note(NamedTuple):
    """One request, ended or not. ``ttft_s``: so far, where it has no token; ``tpot_s`` None: not known."""

    arrival: float
    prompt: int
    cached: int
    output: int
    ended: float | None
    ttft_s: float
    tpot_s: float | None
    has_token: bool

    @property
    def kind(self) -> int:
        """By the prompt's length."""
        return self.prompt.bit_length()


@dataclass(frozen=True, slots=True)
class LoadPicture:
    """The load now. Means are per request that arrived in the window."""

    num_requests: int  # that they are of
    rate: float  # arrivals a second
    new_tokens: float = 0.0  # of the prompt, not cached
    pairs: float = 0.0  # of a new token and one that it attends to
    output_tokens: float = 0.0
    context: float = 0.0  # tokens in a running sequence's cache
    variation: float = 1.0  # squared coefficient of variation of new_tokens
    num_waiting: int = 0  # in the coordinator, or not begun on a prefill worker
    num_decoding: int = 0
    remaining_tokens: float = 0.0  # that those have still before them, each
    num_judged: int = 0
    attainment: float = 1.0  # of the judged: ended lately, or late already
    in_time: float = 1.0  # share of them with a first token in time
    in_pace: float = 1.0  # share of them that made their TPOT
    ttft_kept: float = 1.0  # share that keeps ``scale_up_ttft``: 1 where there is none, or too few
    tpot_kept: float = 1.0  # likewise ``scale_up_tpot``
    newest: int = 0  # requests of the last ``every_s``, and the means of these
    newest_tokens: float = 0.0
    newest_pairs: float = 0.0
    newest_ends: int = 0  # answers that ended then
    newest_output: int = 0  # tokens that all answers have brought then


class LoadWatch:
    """``note`` every end; ``look`` for the picture."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._ended: deque[Note] = deque(maxlen=MEMORY)
        self._lengths = defaultdict[int, tuple[float, float]](lambda: (0.0, 0.0))  # tokens, ends; by kind
        self._unseen: list[Note] = []  # ended since the last look
        self._outputs: dict[tuple[float, int], int] = {}  # tokens of those that ran then

    def note(self, request: FinishedRequest, now: float) -> None:
        """Take in a request that is over."""
        count, prompt, cached = (
            request.num_output_tokens,
            request.num_prompt_tokens,
            request.num_cached_tokens,
        )
        note = Note(request.arrival, prompt, cached, count, now, request.ttft_s, request.tpot_s, count > 0)
        self._ended.append(note)
        self._unseen.append(note)

    def look(self, requests: Iterable[RunningRequest], now: float) -> LoadPicture:
        """Return the load now; ``requests`` are all that have not ended."""
        options = self._options
        running = [_note_of(request, now) for request in requests]
        notes = [*self._after(now - options.longest_window_s), *running]
        window = self._window([note.arrival for note in notes], now)
        arrived = [note for note in notes if note.arrival > now - window]
        judged = self._judged(running, now, self._good)
        newest_ends, newest_output = self._take(running)
        means = self._means(_so_far(running))
        decoding = [n for n in running if n.has_token]
        remaining = sum(max(REMAINING * means[n.kind], 1.0) for n in decoding) / max(1, len(decoding))
        picture = LoadPicture(
            num_requests=len(arrived),
            rate=len(arrived) / window,
            num_waiting=len(running) - len(decoding),
            num_decoding=len(decoding),
            context=sum(n.prompt + n.output for n in decoding) / max(1, len(decoding)),
            remaining_tokens=remaining,
            newest_ends=newest_ends,
            newest_output=newest_output,
            num_judged=len(judged),
            attainment=_share(judged, self._good),
            in_time=_share(judged, self._in_time),
            in_pace=_share(judged, self._in_pace),
            ttft_kept=self._kept(running, now, options.scale_up_ttft, lambda note: note.ttft_s),
            tpot_kept=self._kept(running, now, options.scale_up_tpot, lambda note: note.tpot_s or 0.0),
        )
        return self._with_mix(picture, arrived, means, now)

    def _window(self, arrivals: list[float], now: float) -> float:
        """Seconds back from now: few requests are no mix. All that came after the oldest end remembered is
        here; others may not be."""
        options, longest = self._options, self._options.longest_window_s
        if len(self._ended) == MEMORY and (oldest := self._ended[0].ended) is not None:
            longest = min(longest, max(now - oldest, 1e-3))
        if len(arrivals) < options.min_requests:
            return longest
        return min(max(options.window_s, now - nlargest(options.min_requests, arrivals)[-1] + 1e-3), longest)

    def _with_mix(
        self, picture: LoadPicture, arrived: list[Note], means: dict[int, float], now: float
    ) -> LoadPicture:
        if not arrived:
            return picture
        known = [n for n in arrived if n.has_token] or arrived
        share = 1 - sum(n.cached for n in known) / max(1, sum(n.prompt for n in known))
        new = [n.prompt * share for n in arrived]
        mean = sum(new) / len(new)
        variance = sum((one - mean) ** 2 for one in new) / len(new)
        output = sum(means[n.kind] for n in arrived) / len(arrived)
        newest = [n for n in arrived if n.arrival > now - self._options.every_s]
        many = max(1, len(newest))
        return replace(
            picture,
            newest=len(newest),
            newest_tokens=share * sum(n.prompt for n in newest) / many,
            newest_pairs=sum(share * n.prompt * (n.prompt * (1 - share / 2)) for n in newest) / many,
            new_tokens=mean,
            pairs=sum(
                one * (n.prompt - one) + one * (one + 1) / 2 for one, n in zip(new, arrived, strict=True)
            )
            / len(new),
            output_tokens=output,
            context=picture.context or sum(n.prompt for n in arrived) / len(arrived) + output / 2,
            variation=variance / mean**2 if mean else 1.0,
        )

    def _take(self, running: list[Note]) -> tuple[int, int]:
        """Return how many answers have ended since the last look, and how many tokens all have brought."""
        grown: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for note in [*self._unseen, *running]:
            for kind in (note.kind, ALL):
                grown[kind][0] += note.output - self._outputs.get((note.arrival, note.prompt), 0)
                grown[kind][1] += note.ended is not None
        for kind, (tokens, ends) in grown.items():
            keep = (1 - 1 / LENGTHS_MEMORY) ** ends
            weight = (1 - keep) * LENGTHS_MEMORY / ends if ends else 1.0
            before = self._lengths[kind]
            self._lengths[kind] = (keep * before[0] + weight * tokens, keep * before[1] + weight * ends)
        self._outputs = {(note.arrival, note.prompt): note.output for note in running}
        self._unseen.clear()
        return grown[ALL][1], grown[ALL][0]

    def _means(self, otherwise: float) -> defaultdict[int, float]:
        """Return the mean tokens of an answer, by kind. ``otherwise``: while none has ended."""
        means = {kind: tokens / ends for kind, (tokens, ends) in self._lengths.items() if ends}
        every = means.get(ALL, otherwise)
        return defaultdict(lambda: every, means)

    def _after(self, since: float) -> list[Note]:
        """Return those that ended after ``since``, the newest first."""
        return list(takewhile(lambda note: note.ended is None or note.ended > since, reversed(self._ended)))

    def _judged(self, running: list[Note], now: float, holds: Callable[[Note], bool]) -> list[Note]:
        """Those that have ended lately, and those of which it is clear already that they do not keep what
        they should."""
        return self._after(now - self._options.work_off_s) + [n for n in running if not holds(n)]

    def _kept(
        self, running: list[Note], now: float, bound: LatencyBound | None, took: Callable[[Note], float]
    ) -> float:
        """Share of requests within the bound."""
        if bound is None:
            return 1.0
        judged = self._judged(running, now, lambda note: took(note) <= bound.seconds)
        return _share(judged, lambda note: took(note) <= bound.seconds) if len(judged) >= MIN_JUDGED else 1.0

    def _good(self, note: Note) -> bool:
        return self._in_time(note) and self._in_pace(note)

    def _in_time(self, note: Note) -> bool:
        return note.ttft_s <= self._options.ttft_s

    def _in_pace(self, note: Note) -> bool:
        return note.tpot_s is None or note.tpot_s <= self._options.tpot_s


def _share(notes: list[Note], holds: Callable[[Note], bool]) -> float:
    return sum(map(holds, notes)) / len(notes) if notes else 1.0


def _so_far(running: list[Note]) -> float:
    """Return the mean output where no request has ended: the running ones count as half-way."""
    begun = [n.output for n in running if n.has_token]
    return 2 * sum(begun) / len(begun) if begun else 0.0


def _note_of(request: RunningRequest, now: float) -> Note:
    count, began = request.num_output_tokens, request.entered
    waited = 0.0 if count else now - request.arrival  # a time to a first token is judged at the end
    paced = request.state == "decode" and count > MIN_TOKENS and request.token_at > began
    tpot_s = (request.token_at - began) / (count - 1) if paced else None
    prompt, cached = request.num_prompt_tokens, request.num_cached_tokens
    return Note(request.arrival, prompt, cached, count, None, waited, tpot_s, count > 0)
