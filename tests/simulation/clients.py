"""The clients: what they ask, what they see, and whether it is what they were promised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from simulation import images
from simulation.adapters import shift
from simulation.client import BrokenSink, Client, ClientSink
from simulation.model import EOS, expected_output, logprob
from simulation.poison import FUSES, PoisonousRequest
from simulation.wishes import OWN, Wishes
from simulation.worker_process import MAX_MODEL_LEN
from simulation.worker_role import BAD_GRAMMAR

from splitserve.coordinator.dispatcher import ClosedSink
from splitserve.coordinator.lifecycle.limits import LifecycleLimits
from splitserve.coordinator.lifecycle.request import Ended, PriorityClass, Request
from splitserve.transport.messages.messages import PeerId, Prefill, Resume, TokenLogprobs

if TYPE_CHECKING:
    from simulation.coordinator_process import CoordinatorProcess
    from simulation.world import World

SHARES: tuple[tuple[str, PriorityClass], ...] = (("a", "standard"), ("b", "premium"), ("b", "batch"))
FAIR_ENDS = ("deadline", "unavailable", "overloaded")
"""Errors that a client may meet; whether each was due is checked. (Under the product's limits also
``failed``.)"""


class Clients:
    """Every client that ever was. Each event is checked when it comes."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.counts = world, world.random, world.counts
        self.faults = world.scenario.faults
        self._draw, self._keys = Random(f"sinks {world.seed}"), Random(f"keys {world.seed}")
        self._odd, self._images = Random(f"odd {world.seed}"), Random(f"images {world.seed}")
        self.all: dict[str, Client] = {}
        self.pending: dict[str, Client] = {}
        self.wishes = Wishes(world, self.random)

    # --- what they ask ---------------------------------------------------------------------------

    def arrive(self, number: int) -> int:
        """One client's request: one sequence, or a few of the same prompt (n > 1). Returns how many."""
        draw, prompt = self.random, self.wishes.prompt()
        priority, salt = draw.choice((0, 0, 0, 1, -1)), draw.choice((b"", b"", b"", b"tenant"))
        num_choices = draw.choice((1,) * 9 + (3,))
        sampling, prompt_logprobs = self.wishes.sampling()
        timeout = (
            draw.uniform(0.02, 2.0)
            if self.faults.short_deadline and draw.random() < self.faults.short_deadline
            else 90.0
        )
        coordinator, is_odd = self.world.some_coordinator(), False
        if self.faults.poison and draw.random() < self.faults.poison:
            prompt, sampling, num_choices, timeout = prompt[: min(OWN)], self.wishes.long_answer(), 1, 90.0
            self.world.poison.requests[f"r{number}"] = PoisonousRequest(draw.choice(FUSES))
        elif is_odd := self._odd.random() < self.world.scenario.odd:
            prompt, sampling = self.wishes.odd(self._odd, prompt, sampling)
        for i in range(num_choices):
            request = Request(
                f"r{number + i}", prompt, sampling, ClosedSink(), 0.0, timeout, priority, salt=salt
            )
            request.prompt_logprobs, request.session = prompt_logprobs, draw.choice(("", "a", "b"))
            images.choose(self._images, request, self.world.scenario.cluster.images and not is_odd)
            self.world.folder.choose(request, coordinator.core.pools.adapters.names().served)
            if self._has_key(request):
                request.answer_id = request.request_id.encode().rjust(16)
            if is_odd:
                request.tenant, request.priority_class = self._odd.choice(SHARES)
                if request.answer_id:
                    self.world.queue.after(self._odd.random() ** 2, self._come_again, request, "~")
            coordinator.run(self._submit, request, coordinator)
        return num_choices

    def _has_key(self, request: Request) -> bool:
        """Whether its client has an idempotency key, and the answer is one that can be resumed."""
        has_key = self._keys.random() < self.world.scenario.keyed
        return has_key and request.prompt_logprobs is None and request.sampling.logprobs is None

    def _submit(self, request: Request, coordinator: CoordinatorProcess) -> None:
        """The coordinator reads it: it counts from now on."""
        request.arrival, request.deadline = coordinator.now, coordinator.now + request.deadline
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else EOS)
        bounds = sampling.max_tokens, sampling.min_tokens, stops, MAX_MODEL_LEN
        cluster = self.world.scenario.cluster
        of_model = cluster.window, bool(cluster.drafts), shift(request.adapter), cluster.state_blocks > 0
        read = images.read_prompt(request), partial(images.read_output, request)
        expected, reason = expected_output(request.prompt_token_ids, *read, *bounds, *of_model)
        client = Client(request, coordinator, expected, reason)
        request.sink = ClientSink(self, client)
        self.all[request.request_id] = self.pending[request.request_id] = client
        coordinator.dispatcher.submit(request)
        if self.faults.cancel and self.random.random() < self.faults.cancel:
            leaves_after_s = self.random.choice((0.02, 0.2, 1.0)) * self.random.random()
            self.world.queue.after(leaves_after_s, self._leave, client)

    def _leave(self, client: Client) -> None:
        if client.ended is None and not client.orphaned:
            self.counts["cancellations"] += 1
            client.cancelled = True
            client.coordinator.run(client.coordinator.dispatcher.cancel, client.request.request_id)

    def maybe_break(self, client: Client, where: str) -> None:
        """Raise BrokenSink with the scenario's probability."""
        if client.broken and where != "end":
            self._violated(client, f"a {where} after its sink has raised")
        if self.world.strikes(self.faults.sink_error, f"sinks that raised in {where}"):
            client.broken = True
            if where == "end":
                self.pending.pop(client.request.request_id, None)
            raise BrokenSink

    def coordinator_died(self, coordinator: CoordinatorProcess) -> None:
        for client in list(self.pending.values()):
            if client.coordinator is coordinator:
                client.orphaned = True
                self.counts["orphaned: their coordinator died"] += 1
                del self.pending[client.request.request_id]
                if client.request.answer_id and not client.cancelled:
                    self.world.queue.after(self._keys.random(), self._come_again, client.request, "+")

    def _come_again(self, before: Request, mark: str) -> None:
        """With the same key and the same body, to any coordinator."""
        if not self.world.calm and (coordinator := self.world.some_coordinator()).alive:
            self.counts["clients that came again"] += 1
            id = f"{before.request_id}{mark}"
            prompt, sampling, salt = before.prompt_token_ids, before.sampling, before.salt
            request = Request(id, prompt, sampling, ClosedSink(), 0.0, 90.0, before.priority, salt=salt)
            for name in ("answer_id", "adapter", "adapter_name", "images"):
                setattr(request, name, getattr(before, name))
            coordinator.run(self._submit, request, coordinator)

    def tried(self, order: Prefill | Resume, worker: PeerId) -> None:
        """A coordinator dispatches a request, or has one resumed."""
        if isinstance(order, Resume):
            self.counts["answers resumed"] += 1
            self.all[order.request_id].tries[order.coordinator, order.dispatch] = worker, worker
            return
        spec, decode = order.spec, order.decode
        self.all[spec.request_id].tries[spec.coordinator, spec.dispatch] = (
            worker,
            (decode.worker_id, decode.incarnation),
        )

    # --- what they see ---------------------------------------------------------------------------

    def pushed(self, client: Client, token: int, logprobs: TokenLogprobs | None) -> None:
        at = client.num_tokens
        client.num_tokens += 1
        client.flushed = False
        if client.ended is not None:
            self._violated(client, "a token after the end")
        if at >= len(client.expected) or client.expected[at] != token:
            self._violated(client, f"token {at} is wrong")
        asked = client.request.sampling.logprobs is not None
        if asked != (logprobs is not None) or (logprobs is not None and logprobs.logprob != logprob(token)):
            self._violated(client, f"the logprobs of token {at} are wrong")
        if client.request.prompt_logprobs is not None and not client.has_prompt_logprobs:
            self._violated(client, "a token before the prompt's logprobs")
        if (
            self.faults.leave_in_push
            and self._draw.random() < self.faults.leave_in_push
            and not self.world.calm
        ):
            self._leave_in_push(client)

    def _leave_in_push(self, client: Client) -> None:
        """Its own stop string was met; or another choice of the same call is not wanted any more."""
        others = [other for other in self.pending.values() if other.coordinator is client.coordinator]
        if self._draw.random() < 0.5 and others:
            client = self._draw.choice(others)
        self.counts["cancellations in the middle of a push"] += 1
        self._leave(client)

    def pushed_prompt_logprobs(self, client: Client, logprobs: Sequence[TokenLogprobs]) -> None:
        if client.has_prompt_logprobs or client.ended is not None:
            self._violated(client, "the prompt's logprobs came again or too late")
        client.has_prompt_logprobs = True
        if [entry.logprob for entry in logprobs] != [logprob(t) for t in client.request.prompt_token_ids[1:]]:
            self._violated(client, "the prompt's logprobs are wrong")

    def look(self, coordinator: CoordinatorProcess) -> None:
        """Between two turns of a coordinator's loop everything is written."""
        for client in self.pending.values():
            if client.coordinator is coordinator and not client.flushed:
                self._violated(client, "tokens were pushed and not flushed")

    def ended(self, client: Client, ended: Ended) -> None:
        coordinator = client.coordinator
        if client.ended is not None:
            self._violated(client, "ended twice")
            return
        client.ended = ended
        self.pending.pop(client.request.request_id, None)
        self.counts[f"ended: {ended.error or ended.finish_reason or 'cancelled'}"] += 1
        for problem in self._problems(client, ended, coordinator):
            self._violated(client, problem)

    def _problems(self, client: Client, ended: Ended, coordinator: CoordinatorProcess) -> Iterable[str]:
        request, now = client.request, coordinator.now
        if (ledger := ended.ledger) is not None and (
            min(ended.stages) < 0.0
            or abs(ended.stages.total - (ledger.end - ledger.begin)) > 1e-6
            or ledger.end > now
        ):
            yield f"its stages are not its time: {ended.stages}"
        if client.broken:
            if ended.error != "failed" or not ended.message.startswith("Internal error"):
                yield f"its sink has raised, and it ended otherwise: {ended}"
            return
        if ended.error == "failed" and self.world.scenario.product_limits:
            if not self._was_due(client, ended.message):
                yield f"given up too soon: {ended.message}"
        elif ended.error == "refused" and request.sampling.grammar == BAD_GRAMMAR:
            pass
        elif ended.error is not None and ended.error not in FAIR_ENDS:
            yield f"{ended.error}: {ended.message}"
        if (
            ended.error == "overloaded"
            and request.deadline - request.arrival > 2.0
            and not self._anybody_was_slow
        ):
            yield ended.message  # the forecast is wrong
        if ended.error == "deadline" and now < request.deadline - 2.1 * self.faults.clock_drift * (
            request.deadline - request.arrival
        ):
            yield "its deadline had not passed"
        pools = coordinator.core.pools
        lacks = bool(request.adapter) and not pools.adapters.serves(request.adapter)
        if ended.error == "unavailable" and not (pools.gap or lacks):
            yield "unavailable, but the workers are there"
        if request.adapter and ended.finish_reason is not None:
            self.counts["answers with an adapter"] += 1
        if ended.finish_reason is not None and client.num_tokens and request.sampling.grammar == BAD_GRAMMAR:
            yield "finished, and its grammar does not compile"
        if ended.finish_reason is not None and (
            client.num_tokens != len(client.expected) or ended.finish_reason != client.reason
        ):
            yield (
                f"finished with {client.num_tokens} of {len(client.expected)} tokens, by "
                f"{ended.finish_reason}"
            )
        if ended.finish_reason is None and ended.error is None and not client.cancelled:
            yield "ended as if cancelled"
        if (
            request.prompt_logprobs is not None
            and ended.finish_reason is not None
            and not client.has_prompt_logprobs
        ):
            yield "the prompt's logprobs never came"
        if abs(ended.stages.total - (now - request.arrival)) > 1e-3:
            yield "its stages do not add up to its time"

    def _was_due(self, client: Client, message: str) -> bool:
        """Whether a request may be given up: by the product's limits and the world's events."""
        limits, tries = LifecycleLimits(), client.tries
        if "workers in a row died" in message:
            poisonous = self.world.poison.requests
            if (
                self.world.is_merely_poisoned
                and len(poisonous) == 1
                and client.request.request_id not in poisonous
            ):
                return False  # one alone takes nobody along
            ran_on = {worker for pair in tries.values() for worker in pair}
            moves = self.faults.drain_every or self.faults.flip_every  # then it may have run elsewhere too
            strikes = sum(times for worker, times in self.world.struck.items() if moves or worker in ran_on)
            return strikes >= limits.max_deaths and len(tries) >= limits.max_deaths
        failed = tries.keys() if self._anything_is_lost else tries.keys() & self.world.given_back
        return message.startswith("gave up after") and len(failed) >= limits.max_attempts

    @property
    def _anything_is_lost(self) -> bool:
        """Whether an attempt may fail without a worker's word."""
        of = self.faults
        ends = of.kill_every or of.die_in_put or of.poison or of.drain_every or of.flip_every
        lost = of.drop or of.mangle or of.defect or of.late or of.coordinator_restart_every
        return bool(ends or lost) or self._anybody_was_slow

    @property
    def _anybody_was_slow(self) -> bool:
        faults = self.faults
        return bool(
            faults.slow_every
            or faults.late_turn
            or faults.freeze_every
            or faults.hang_every
            or faults.partition_every
            or faults.freeze_in_put
        )

    def _violated(self, client: Client, what: str) -> None:
        self.world.violated(f"{client.request.request_id}: {what}")
