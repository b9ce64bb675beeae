"""What arrives, what waits and how well it is served, as the pool controller sees it. Pure; times in seconds.

A request's output length is known at its end only. Of those that still run one knows that it is more than they have: the mean is therefore
tokens generated / requests ended (what is right for lengths without memory), over all that arrived in the window, with a few of those that
ended before thrown in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..flight import Flight
from ..request import Ended, GenerationRequest
from .options import SteeringOptions

PRIOR_REQUESTS = 4.0
MEMORY = 4096  # ended requests
MIN_TOKENS = 8  # of a running sequence before its pace is judged


@dataclass(frozen=True, slots=True)
class Note:
    """One request, ended or not. ``ttft_s``: so far, where it has no token; ``tpot_s`` None: not known."""

    arrival: float
    prompt: int
    cached: int
    output: int
    ended: float | None
    ttft_s: float
    tpot_s: float | None
    has_token: bool


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
    num_judged: int = 0
    attainment: float = 1.0  # of the judged: ended in the window, or late already


class LoadWatch:
    """``note`` every end; ``look`` for the picture."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._ended: deque[Note] = deque(maxlen=MEMORY)

    def note(self, request: GenerationRequest, ended: Ended, now: float) -> None:
        """A request is over. One that was never taken in, or refused, says nothing of the workers."""
        if ended.ledger is None or ended.error in ("refused", "unavailable"):
            return
        stages, count = ended.stages, ended.num_output_tokens
        tpot_s = (stages.handoff + stages.decode) / (count - 1) if count > 1 else None
        ttft_s = stages.parse + stages.queue + stages.prefill
        late = ended.error is not None
        prompt = len(request.prompt_token_ids)
        ttft_s = float("inf") if late else ttft_s
        self._ended.append(Note(request.arrival, prompt, min(ended.num_cached_tokens, prompt), count, now, ttft_s, tpot_s, count > 0))

    def look(self, flights: Iterable[Flight], now: float) -> LoadPicture:
        """``flights``: all that have not ended."""
        running = [_note_of(flight, now) for flight in flights]
        notes = sorted([*self._ended, *running], key=lambda note: note.arrival)
        window = self._window(notes, now)
        arrived = [note for note in notes if note.arrival > now - window]
        waiting, decoding = sum(not n.has_token for n in running), sum(n.has_token for n in running)
        judged = self._judged(running, now)
        good = sum(self._good(note) for note in judged)
        picture = LoadPicture(
            num_requests=len(arrived),
            rate=len(arrived) / window,
            num_waiting=waiting,
            num_decoding=decoding,
            num_judged=len(judged),
            attainment=good / len(judged) if judged else 1.0,
        )
        return self._with_means(picture, arrived)

    def _window(self, notes: list[Note], now: float) -> float:
        """Seconds back from now: few requests are no mix."""
        options = self._options
        if len(notes) < options.min_requests:
            return options.longest_window_s
        return min(max(options.window_s, now - notes[-options.min_requests].arrival + 1e-3), options.longest_window_s)

    def _with_means(self, picture: LoadPicture, arrived: list[Note]) -> LoadPicture:
        if not arrived:
            return picture
        known = [n for n in arrived if n.has_token] or arrived
        share = 1 - sum(n.cached for n in known) / max(1, sum(n.prompt for n in known))
        new = [n.prompt * share for n in arrived]
        mean = sum(new) / len(new)
        variance = sum((one - mean) ** 2 for one in new) / len(new)
        pairs = sum(one * (n.prompt - one) + one * (one + 1) / 2 for one, n in zip(new, arrived, strict=True)) / len(new)
        output = self._output(arrived)
        prompt = sum(n.prompt for n in arrived) / len(arrived)
        return LoadPicture(
            picture.num_requests,
            picture.rate,
            mean,
            pairs,
            output,
            prompt + output / 2,
            variance / mean**2 if mean else 1.0,
            picture.num_waiting,
            picture.num_decoding,
            picture.num_judged,
            picture.attainment,
        )

    def _output(self, arrived: list[Note]) -> float:
        before = list(self._ended)[-200:]
        prior = sum(n.output for n in before) / len(before) if before else 0.0
        weight = PRIOR_REQUESTS if before else 0.0
        ended = sum(n.ended is not None for n in arrived) + weight
        generated = sum(n.output for n in arrived) + prior * weight
        return generated / ended if ended else generated

    def _judged(self, running: list[Note], now: float) -> list[Note]:
        recent = [n for n in self._ended if n.ended is not None and n.ended > now - self._options.work_off_s]
        return recent + [n for n in running if not self._good(n)]

    def _good(self, note: Note) -> bool:
        return note.ttft_s <= self._options.ttft_s and (note.tpot_s is None or note.tpot_s <= self._options.tpot_s)


def _note_of(flight: Flight, now: float) -> Note:
    request, count = flight.request, len(flight.tokens)
    waited = 0.0 if count else now - request.arrival  # how long it took to the first token is judged at the end
    paced = flight.stage == "decode" and count > MIN_TOKENS and flight.token_at > flight.mark
    tpot_s = (flight.token_at - flight.mark) / (count - 1) if paced else None
    prompt = len(request.prompt_token_ids)
    return Note(request.arrival, prompt, min(flight.num_cached_tokens or 0, prompt), count, None, waited, tpot_s, count > 0)
