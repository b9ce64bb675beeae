"""The two roles of a worker's process."""

from __future__ import annotations

from typing import Any

from ..decode.core import DecodeCore
from ..decode.scheduler import DecodeScheduler
from ..prefill.core import PrefillCore
from ..prefill.scheduler import PrefillScheduler
from ..transport.handoff.layer_slicing import LayerSlicing
from ..transport.handoff.protocol import Join, Supersede, ToPeer
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.handoff.receiving_end import RECEIVING, ReceivingEnd
from ..transport.messages.messages import FROM_DECODE
from .played_role import PlayedRole
from .settings import DecodeSettings, PrefillSettings


class PrefillRole(PlayedRole):
    """Computes prompts and hands their blocks to decode workers."""

    role = "prefill"
    core: PrefillCore

    def complete_steps(self, now: float) -> None:
        """Send first tokens before the next step is made and before any block is copied: a client waits for
        them."""
        super().complete_steps(now)
        if reports := self.core.take_reports():
            self._reports.send(*reports)

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
        )
        self.core = PrefillCore(
            self._meet(),
            scheduler,
            model.eos_token_ids,
            model.max_model_len,
            process.times.handoff,
            settings.drain_timeout_s,
            slicing=LayerSlicing(model.num_layers, identity.block_bytes, process.slicing),
            is_local=host.hands_to_itself if host else lambda _: False,
            tests_movers=True,
        )


class DecodeRole(PlayedRole):
    """Receives prompts' blocks and generates; hands sequences over to other decode workers on demand."""

    role = "decode"
    core: DecodeCore
    _receiving: ReceivingEnd

    def _open_receiving(self) -> ReceivingEnd:
        settings, parts = self._settings, self._parts
        assert isinstance(settings, DecodeSettings)
        assert parts.targets is not None, "a decode role has some"
        return ReceivingEnd(
            parts.environment,
            parts.targets,
            settings.listen,
            parts.advertised_host,
            self._process.check_bytes,
        )

    def carry_out(self, now: float) -> None:
        super().carry_out(now)
        if self._receiving.has_checks:
            self._receiving.check(self.core, now)
            super().carry_out(now)

    def _report(self, now: float) -> None:
        self._receiving.release_dead_writers(self.core, now)
        super()._report(now)

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
        )
        worker = (settings.worker_id, self.links.incarnation)
        receiver = HandoffReceiver(
            worker,
            identity,
            process.blocks,
            self._receiving.endpoints,
            lambda: self.core.room(),
            process.secret,
            process.times.handoff,
        )
        self.core = DecodeCore(
            self._meet(), scheduler, receiver, settings.drain_timeout_s, True, process.times.answers
        )

    def _do(self, action: Any) -> None:
        if isinstance(action, RECEIVING) or (
            isinstance(action, ToPeer) and isinstance(action.message, FROM_DECODE)
        ):
            self._receiving.carry_out(action)
        elif not isinstance(action, Join | Supersede):  # the core's own
            super()._do(action)
