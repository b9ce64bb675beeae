"""The two roles of a worker's process."""

from __future__ import annotations

from ..decode.core import DecodeCore
from ..decode.drafts import CHEAP_ROWS, Drafts
from ..decode.scheduler import DecodeScheduler
from ..prefill.core import PrefillCore
from ..prefill.scheduler import PrefillScheduler
from ..prefill.stored_prefixes import NO_STORE, ReadSizes
from ..transport.handoff.layer_slicing import LayerSlicing
from .played_role import PlayedRole
from .settings import DecodeSettings, PrefillSettings


class PrefillRole(PlayedRole):
    """Computes prompts, over cached blocks of its own and of others, and hands them to decode workers."""

    role = "prefill"
    core: PrefillCore

    def complete_steps(self, now: float) -> None:
        """Send first tokens before the next step is made and before any block is copied: a client waits for
        them."""
        super().complete_steps(now)
        if reports := self.core.take_reports():
            self._reports.send(*reports)

    def receive(self, ready: set[object], now: float) -> None:
        """Also what has been read from the KV store; and have the next read."""
        super().receive(ready, now)
        if (store := self._process.store) is not None:
            store.report(self.core.stored)
            for key, hashes in self.core.stored.take_orders():
                store.read(key, hashes)

    def _make_core(self) -> None:
        process, settings, host = self._process, self._settings, self._host
        model, identity = process.model, process.model.identity
        assert isinstance(settings, PrefillSettings)
        self.max_batch_tokens = settings.chunk_budget(model.device_type)
        scheduler = PrefillScheduler(
            process.blocks,
            identity.block_size,
            identity.kv_name,
            self.max_batch_tokens,
            settings.max_num_seqs,
            for_decode=host.for_decode if host and host.mixed else None,
            window=identity.window,
            state_blocks=identity.state_blocks,
            model_drafts=model.draft_cost > 0,
        )
        self.core = PrefillCore(
            self._meet(),
            scheduler,
            self._receiver(),
            model.eos_token_ids,
            model.max_model_len,
            process.times.handoff,
            settings.drain_timeout_s,
            slicing=LayerSlicing(model.num_layers, identity.block_bytes, process.slicing),
            is_local=host.hands_to_itself if host else lambda _: False,
            tests_movers=True,
            stored=ReadSizes(store.group, store.ahead) if (store := process.store) else NO_STORE,
            adapters=process.adapters,
        )


class DecodeRole(PlayedRole):
    """Receives prompts' blocks and generates; hands sequences over to other decode workers on demand."""

    role = "decode"
    core: DecodeCore

    def _make_core(self) -> None:
        process, settings = self._process, self._settings
        model, identity = process.model, process.model.identity
        assert isinstance(settings, DecodeSettings)
        self.max_batch_tokens = settings.max_num_seqs
        scheduler = DecodeScheduler(
            process.blocks,
            identity.block_size,
            settings.max_num_seqs,
            model.max_model_len,
            model.eos_token_ids,
            window=identity.window,
            drafts=Drafts(settings.num_speculative_tokens, CHEAP_ROWS[model.device_type], model.draft_cost),
            state_blocks=identity.state_blocks,
        )
        self.core = DecodeCore(
            self._meet(),
            scheduler,
            self._receiver(),
            settings.drain_timeout_s,
            True,
            process.times.answers,
            process.adapters,
        )
