"""Runs one batch through the model and samples: the only place of a worker where tensors are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.interface import HostKernels, Kernels
from ...transport.messages.messages import TokenLogprobs
from ...transport.process.heap import seldom_collected
from ..device import Arrival, bring, passed
from ..engine_config import WARM_UP_TOKENS, EngineConfig
from ..loaded_model import LoadedModel
from ..model.step_inputs import AttentionMetadata
from ..ranks.threads import AllRanks, load_ranks, written_by_all
from .batch import Batch, StepOutput
from .computed import ComputedStep, embeddings_of, no_tokens
from .decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from .images import StepFeatures
from .metadata import once_only, send_batch
from .next_drafts import NO_DRAFTS, Drafts, NextDrafts, StepHidden
from .prefill_graphs import PrefillGraphs
from .sampler import SampledRows, Sampler, StepLogits, prompt_logprobs
from .step_thread import OnLayer
from .warm_up import many_seqs, run_first_steps

if TYPE_CHECKING:
    from .device_sampler import DeviceSampler

T = TypeVar("T")


class ModelRunner:
    """Loads the model at construction. ``execute`` may be called from any one thread at a time; a step fed
    from another is of the same thread."""

    def __init__(self, engine: EngineConfig, loaded: LoadedModel | None = None) -> None:
        """``loaded``: of a rank other than 0; the runner of rank 0 makes theirs."""
        self.ranks = ranks = load_ranks(engine) if loaded is None else [loaded]
        self.loaded = loaded = ranks[0]
        self.config, self.device, self.phases = loaded.config, loaded.device, loaded.phases
        self.kv_cache, self.max_model_len = loaded.kv_cache, loaded.max_model_len
        self._model = loaded.decoder
        self._sampler = _make_sampler(loaded.kernels, self.config.eos_token_ids)
        self._max_step_seqs = engine.max_step_seqs
        self._max_decode_seqs, self._max_prefill_tokens = engine.max_decode_seqs, engine.max_prefill_tokens
        self._next_drafts: NextDrafts | None = None
        if (layer := self._model.prediction) is not None:
            self._next_drafts = NextDrafts(self._model, layer, loaded.pool, loaded.layout.num_layers)
        self._images = StepFeatures(loaded.vision, self.device)
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._sampled_last = torch.empty(0, dtype=torch.int32, device=self.device)  # the last step's tokens
        self._arrived_last: Arrival = lambda: ()  # waits for them on the host
        runners = [self, *(ModelRunner(engine, other) for other in ranks[1:])]
        self._all = AllRanks(runners, [each.rank for each in ranks], self.device.type == "cuda")

    def capture(self, record: Recorder) -> None:
        """Decode steps of up to ``max_decode_seqs`` sequences are replayed from now on, and steps of few
        prompt tokens where that is faster. Raises OutOfMemoryError."""
        max_blocks = -(-self.max_model_len // self.kv_cache.layout.block_size) + 1
        vocab_size, model, pool = self.config.vocab_size, self._model, self.loaded.pool
        with torch.inference_mode():
            if most := self._max_decode_seqs:
                self._graphs = DecodeGraphs(
                    self._decode,
                    vocab_size,
                    most,
                    max_blocks,
                    self.kv_cache.layout.block_size,
                    self.device,
                    record,
                    self.loaded.adapters is not None,
                    self.loaded.layout.state_blocks,
                    self.loaded.takes_images and bool(self.config.ropes[0].axes),
                )
                self.phases.done("decode graphs")
            # a prefill graph neither leaves hidden states of all its rows nor brings vectors to all ranks
            whole = self._next_drafts is not None or self.loaded.spread is not None
            if (most := self._max_prefill_tokens) and not (self.loaded.layout.state_blocks or whole):
                self._prefill_graphs = PrefillGraphs(
                    model, pool, vocab_size, most, max_blocks, record, self.loaded.adapters is not None
                )
                self.phases.done("prefill graphs")

    def execute(self, batch: Batch, on_layer: OnLayer | None = None) -> StepOutput:
        """One step: writes the batch's keys and values to the cache and samples where ``batch.sampling``
        asks.

        ``on_layer``: see ``DecoderModel.forward``.
        """
        return self.launch(batch, on_layer)()

    def launch(self, batch: Batch, on_layer: OnLayer | None = None) -> Callable[[], StepOutput]:
        """Begin a step and return a call that waits for its output, from any thread.

        A batch of decode rows alone replays a graph, or runs all layers in one call where the kernels have
        one (on CPUs); a batch of few tokens replays one of ``PrefillGraphs``. Any other runs layer by layer:
        each linear once over the tokens of all rows and chunks, attention in one call that computes decode
        rows and chunks by the kernel of each, and the last layer's output for the rows that sample alone.

        On a CPU, and with prompt logprobs, the step is over when this returns. Two steps may be under way.

        Each rank does the same; rank 0 samples."""
        if len(self.ranks) == 1:
            return self._launch(batch, on_layer)
        others = None if on_layer is None else _nobody
        return self._all.run(
            lambda runner: runner._launch_beside(batch, others),
            lambda: self._launch_beside(batch, on_layer),
            launched=True,
        )

    def _launch_beside(self, batch: Batch, on_layer: OnLayer | None) -> Callable[[], StepOutput]:
        """A step's part on one of several ranks."""
        if on_layer is not None:
            on_layer = self._written_by_all(on_layer)
        return self._launch(batch, on_layer)

    def _written_by_all(self, on_layer: OnLayer) -> OnLayer:
        return written_by_all(on_layer, self.loaded.layout.num_layers, self.loaded.rank, self.device)

    def _launch(self, batch: Batch, on_layer: OnLayer | None) -> Callable[[], StepOutput]:
        self.loaded.use_this_thread()
        adapters = self.loaded.adapters
        slots = None if adapters is None else adapters.slots_of(batch.adapters, batch.query_start_loc)
        with torch.inference_mode():
            if self._graphs is not None and on_layer is None and self._graphs.serves(batch):
                computed = self._replay(self._graphs, batch, slots)
                tokens = self._sample(batch, computed, on_layer)
                self._graphs.sampled(self._sampled_last)
            else:
                computed = self._run_layers(batch, on_layer, slots)
                tokens = self._sample(batch, computed, on_layer)
            drafts = self._draft(batch, computed, self._sampled_last, on_layer)

        def output() -> StepOutput:
            token_ids, logprobs = tokens()
            reported = computed.prompt_logprobs, computed.embeddings(), drafts()
            return self.loaded.rank.checked(StepOutput(token_ids, logprobs, *reported))

        on_gpu = self.device.type != "cpu"
        return once_only(output) if batch.states is not None and on_gpu else output

    def _replay(self, graphs: DecodeGraphs, batch: Batch, slots: NDArray[np.int32] | None) -> ComputedStep:
        logits, newest, metadata = graphs.logits(batch, self._sampled_last, slots)
        hidden = None
        if self._next_drafts is not None:
            hidden = StepHidden(self._next_drafts.kept(batch.num_seqs), newest, metadata)
        sampled = list(range(batch.num_seqs))
        return ComputedStep(sampled, StepLogits(logits, newest, metadata.seq_lens), hidden)

    def _run_layers(
        self, batch: Batch, on_layer: OnLayer | None, slots: NDArray[np.int32] | None
    ) -> ComputedStep:
        sampled = [i for i, state in enumerate(batch.sampling) if state is not None]
        if self._prefill_graphs is not None:
            replayed = self._prefill_graphs.logits(batch, sampled, self._sampled_last, on_layer, slots)
            if replayed is not None:
                return ComputedStep(sampled, replayed)
        reported = [i for i, count in enumerate(batch.prompt_logprobs) if count is not None]
        embedded = [i for i, wanted in enumerate(batch.embeds) if wanted is not None]
        rows = (batch.query_start_loc[1:] - 1)[sampled + embedded].tolist()
        for i in reported:
            first = int(batch.query_start_loc[i])
            rows += range(first, first + len(batch.next_prompt_ids[i]))
        sent = send_batch(batch, rows, sampled, slots, self.device, self._sampled_last)
        token_ids, metadata, index, which = sent
        every_row = batch.only_decodes or rows == list(range(batch.num_tokens))
        wanted = None if every_row or self._next_drafts is not None else index
        pool, images = self.loaded.pool, self._images.of(batch)
        hidden = self._model.forward(token_ids, metadata, pool, wanted, on_layer, images)
        whole = StepHidden(hidden, token_ids, metadata) if wanted is None else None
        if wanted is None and not every_row:
            hidden = hidden[index]
        count = len(sampled)
        logits = self._model.logits(hidden[:count]) if sampled else hidden[:0]
        newest = token_ids if batch.only_decodes else token_ids[index[:count]]
        computed = StepLogits.of(logits, newest, metadata.seq_lens, which)
        last, rank = count + len(embedded), self.loaded.rank.number
        logprobs = prompt_logprobs(batch, reported, hidden[last:], self._model.logits, rank)
        vectors = embeddings_of(batch, embedded, hidden[count:last], self._model.logits)
        return ComputedStep(sampled, computed, whole, logprobs, vectors)

    def warm_up(self) -> None:
        """Runs prompts and a decode step, so that the first request pays for no first use; on a GPU then
        captures decode steps. Raises OutOfMemoryError.

        On a GPU this is done in a thread that ends: cuBLAS makes a handle and a workspace for each thread,
        and the next thread, the one that computes, takes over what an ended one leaves. Triton parses kernels
        in the thread of each rank; a collection that begins meanwhile can confuse Python's parser."""
        if self.device.type == "cpu":
            self._warm_up((16,))
            return
        never = seldom_collected(0) if len(self.ranks) > 1 else nullcontext()
        with never, ThreadPoolExecutor(1, "warm-up") as thread:
            thread.submit(
                self._warm_up, (*WARM_UP_TOKENS, self._max_prefill_tokens or WARM_UP_TOKENS[0])
            ).result()

    def _warm_up(self, lengths: Sequence[int]) -> None:
        block_size, state_blocks = self.loaded.layout.block_size, self.loaded.layout.state_blocks
        most = min(self.max_model_len, (self.loaded.num_blocks - 2 * state_blocks) * block_size) - 1
        many = many_seqs(self._max_step_seqs) if self.device.type == "cuda" and block_size > 1 else ()
        lengths = [min(length, most) for length in lengths]
        drafts = self._next_drafts is not None
        run_first_steps(self.execute, lengths, block_size, many, state_blocks, drafts)
        self.phases.done("warm-up")
        if self.device.type == "cuda" and (self._max_decode_seqs or self._max_prefill_tokens):
            alone = len(self.ranks) == 1
            self._all.run(
                lambda runner: runner.capture(CudaRecorder(alone)), lambda: self.capture(CudaRecorder(alone))
            )

    def _decode(self, token_ids: Tensor, metadata: AttentionMetadata, logits: Tensor) -> None:
        hidden = self._model.forward(token_ids, metadata, self.loaded.pool, None)
        if self._next_drafts is not None:
            self._next_drafts.keep(hidden)
        self._model.logits(hidden, logits)

    def _draft(self, batch: Batch, step: ComputedStep, tokens: Tensor, on_layer: OnLayer | None) -> Drafts:
        if self._next_drafts is None:
            return NO_DRAFTS
        assert step.hidden is not None, "it is None behind prefill graphs alone, and there are none"
        return self._next_drafts.launch(batch, step.hidden, tokens if step.sampled else None, on_layer)

    def _sample(
        self, batch: Batch, step: ComputedStep, on_layer: OnLayer | None
    ) -> Callable[[], tuple[NDArray[np.int32], dict[int, TokenLogprobs]]]:
        """The tokens of all sequences, once they are waited for. Where none samples, the wait is for the keys
        and values."""
        states = [state for state in batch.sampling if state is not None]
        sampled, computed = step.sampled, step.logits
        rank, drawn = self.loaded.rank, None
        if not states:
            rank.sum(torch.zeros(1, device=self.device))  # all have written their keys and values
            return no_tokens(batch.num_seqs, passed(self.device))
        positions = batch.seq_lens if len(states) == batch.num_seqs else batch.seq_lens[sampled]
        newest_on_host = self._newest_on_host(batch, sampled)
        read_logprobs: Callable[[], dict[int, TokenLogprobs]] = dict
        if rank.number == 0:
            rows = SampledRows(states, positions, computed.newest, newest_on_host, computed.lengths)
            try:
                drawn, read_logprobs = self._draw(computed.logits, rows)
            except Exception:  # of one request: no other rank waits for these tokens for ever
                none = torch.zeros(batch.num_seqs, dtype=torch.int32, device=self.device)
                rank.shared(none[: len(states)], len(states))
                # nor for this one's part of the layer, which is not final: it is computed again
                self._draft(batch, step, none, on_layer and self._written_by_all(_nobody))
                raise
        drawn = rank.shared(drawn, len(states))
        if computed.which is not None:
            drawn = drawn.new_full((batch.num_seqs,), -1).index_copy_(0, computed.which, drawn)
        self._sampled_last = drawn
        self._arrived_last = arrived = bring([drawn])
        return lambda: (arrived()[0].numpy(), {sampled[row]: entry for row, entry in read_logprobs().items()})

    def _draw(
        self, logits: Tensor, rows: SampledRows
    ) -> tuple[Tensor, Callable[[], dict[int, TokenLogprobs]]]:
        """Tokens int32 [n] on the device, and a call that waits for the logprobs asked for, by row."""
        if isinstance(self._sampler, Sampler):
            chosen, logprobs = self._sampler.sample(logits, rows)
            return torch.from_numpy(chosen).to(self.device), partial(dict, logprobs)
        return self._sampler.draw(logits, rows)

    def _newest_on_host(self, batch: Batch, sampled: Sequence[int]) -> Callable[[], NDArray[np.int32]]:
        """Return a call that returns the last input tokens of the rows ``sampled``, and waits for the step
        before where it has sampled them."""
        arrived = self._arrived_last

        def read() -> NDArray[np.int32]:
            at = batch.query_start_loc[1:][sampled] - 1
            if batch.fed_from is None:
                return batch.token_ids[at]
            fed = batch.fed_from[at]
            last = arrived()[0].numpy() if (fed >= 0).any() else batch.token_ids
            return np.where(fed >= 0, last[np.maximum(fed, 0)], batch.token_ids[at])

        return read


def _nobody(num_layers: int) -> None:
    pass


def _make_sampler(kernels: Kernels, eos_token_ids: tuple[int, ...]) -> Sampler | DeviceSampler:
    if isinstance(kernels, HostKernels):
        return Sampler(kernels, eos_token_ids)
    from .device_sampler import DeviceSampler  # which needs Triton

    return DeviceSampler(eos_token_ids)
