"""Tiny tokenizers, and a dispatcher that answers from a script, for tests of the HTTP side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import get_args

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.lifecycle.time_ledger import Stage, TimeLedger
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot
from splitserve.transport.messages.messages import TokenLogprobs

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again, while naïve cats watch.",
    "Größe, Straße, 日本語のテキスト, 你好世界, emoji 😀🎉 and other things that take several bytes.",
    "def join(path, *paths): return os.path.join(path, *paths)  # END of the example",
]
ANSWER = (
    "Hello 世界 😀, this is the naïve answer: the quick brown fox jumps over the lazy dog.\nEND of it, again."
)
CITY = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_MODEL_LEN = 2048
ADMIN_KEY = "k" * 32
OPERATOR = {"authorization": f"Bearer {ADMIN_KEY}"}


def byte_level_tokenizer() -> Tokenizer:
    """Llama 3's kind, with a post-processor that adds BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


def write_tiny_model(folder: Path) -> None:
    """All of a checkpoint that a coordinator reads."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(
        json.dumps({"max_position_embeddings": MAX_MODEL_LEN, "vocab_size": 512})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 1})
    )


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's kind: Metaspace by normalizer, byte fallback, a decoder that strips the first space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for word in ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁hello", "▁world", "th", "he", "▁the", "ï", "世"]:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(vocab, [("t", "h"), ("h", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def wordpiece_tokenizer() -> Tokenizer:
    """A kind whose tokens' joins depend on their neighbours: no table for it."""
    words = ["[UNK]", "hello", "world", "##s", "##ing", ",", ".", "play", "'", "do", "not"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@dataclass
class FakeDispatcher:
    """Answers ``script(request)`` token by token, one token of every sequence each time around the event
    loop."""

    script: Callable[[Request], list[int]]
    eos: int = 1
    refuse: Callable[[Request], Ended | None] = lambda request: None
    fail_after: tuple[int, Ended] | None = None  # tokens, then this end
    workers: bool = True
    is_ready: bool = True
    is_full: bool = False
    queues: bool = False  # nothing can begin at once
    hold: bool = False  # do not start anything
    step_s: float = 0.0
    tokens_per_flush: int = 1
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    drained: list[tuple[str, float | None]] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        refusal = Ended(error="overloaded", message=self.full()) if self.is_full else self.refuse(request)
        if refusal is not None:
            request.sink.end(refusal)
            return
        if not self.queues:
            request.state = "prefill"
        self.running[request.request_id] = asyncio.get_running_loop().create_task(self._generate(request))
        self.changed.set()

    def cancel(self, request_id: str) -> None:
        task = self.running.pop(request_id, None)
        if task is None:
            return
        self.cancelled.append(request_id)
        self.changed.set()
        task.cancel()
        request = next(r for r in self.requests if r.request_id == request_id)
        request.sink.end(Ended(ledger=ledger(request), num_cached_tokens=3, num_dispatches=1))

    async def _generate(self, request: Request) -> None:
        sampling, sink = request.sampling, request.sink
        if request.prompt_logprobs is not None:
            sink.push_prompt_logprobs(
                [logprobs(i, request.prompt_logprobs) for i in request.prompt_token_ids[1:]]
            )
        if request.embeds:
            ended = Ended("length", num_cached_tokens=3, num_dispatches=1, ledger=ledger(request))
            while self.hold:
                await asyncio.sleep(0.01)
            fails = self.fails_after(request)
            self._end(request, replace(ended, embedding=hidden_state(request)) if fails is None else fails[1])
            return
        tokens = self.script(request)
        finish = "stop"
        tokens = (
            [*tokens, self.eos]
            if not sampling.ignore_eos
            else tokens * (1 + sampling.max_tokens // max(1, len(tokens)))
        )
        if len(tokens) > sampling.max_tokens:
            tokens, finish = tokens[: sampling.max_tokens], "length"
        for number, token in enumerate(tokens):
            await asyncio.sleep(self.step_s)
            while self.hold:
                await asyncio.sleep(0.01)
            if (fails := self.fails_after(request)) is not None and number == fails[0]:
                self._end(request, fails[1])
                return
            asked = sampling.logprob_token_ids
            sink.push(
                token, logprobs(token, sampling.logprobs, asked) if sampling.logprobs is not None else None
            )
            if number < len(tokens) - 1 and not (number + 1) % self.tokens_per_flush:
                sink.flush()
        ended = Ended(
            finish_reason=finish,
            num_cached_tokens=3,
            num_output_tokens=len(tokens),
            num_dispatches=1,
            ledger=ledger(request),
        )
        self._end(request, ended)

    def fails_after(self, request: Request) -> tuple[int, Ended] | None:
        return self.fail_after

    def _end(self, request: Request, ended: Ended) -> None:
        del self.running[request.request_id]
        self.changed.set()
        request.sink.flush()
        request.sink.end(ended)

    def ready(self) -> bool:
        return self.is_ready

    def failing(self) -> str:
        return ""

    def gap(self) -> str:
        return "" if self.workers else "no worker is connected"

    def full(self) -> str:
        return "9 requests are waiting already" if self.is_full else ""

    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None:
        self.drained.append((worker_id, timeout_s))
        return {"worker_id": worker_id, "draining": True} if worker_id == "prefill-0" else None

    def flip(self, worker_id: str, role: str, timeout_s: float | None) -> dict[str, object] | str | None:
        if worker_id == "worker-0":
            return {"process": worker_id, "role": role, "began_s": None, "worked_s": None, "ended_s": None}
        return "prefill-0 cannot change its role" if worker_id == "prefill-0" else None

    def flips(self) -> list[dict[str, object]]:
        return []

    def snapshot(self) -> dict[str, object]:
        return {"workers": [{"worker_id": "prefill-0", "role": "prefill"}]}

    def system(self) -> SystemSnapshot:
        worker = WorkerSnapshot(
            "decode-0",
            "decode",
            100,
            50,
            20,
            30,
            0,
            2,
            1,
            17,
            5,
            {"handoff_bytes": 12345.0, "preemptions": 2.0},
        )
        return SystemSnapshot(
            num_waiting=4, num_running=len(self.running), workers=[worker], counters={"recoveries": 1.0}
        )

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def hidden_state(request: Request) -> bytes:
    """Four numbers, which differ between prompts; or logits of two tokens, which differ by its length."""
    ids = request.prompt_token_ids
    if request.logits_of:
        return np.array([len(ids) / 100, 0.5][: len(request.logits_of)], np.float32).tobytes()
    return np.array([sum(ids), len(ids), ids[-1], -1], np.float32).tobytes()


def ledger(request: Request) -> TimeLedger:
    """Its time until now in equal parts, one for each stage up to the coordinator's."""
    ledger, now = TimeLedger("parse", request.arrival), monotonic()
    step = (now - request.arrival) / 6
    for number, stage in enumerate(get_args(Stage)[1:6], 1):
        ledger.enter(stage, request.arrival + number * step)
    ledger.close(now)
    return ledger


def logprobs(token: int, count: int, asked: tuple[int, ...] = ()) -> TokenLogprobs:
    """Made up from the token; an infinitely unlikely one among them."""
    if asked:
        return TokenLogprobs(-0.1 - token / 1000, asked, tuple(-1.0 - i for i in asked))
    top = tuple((token + i) % 256 + 6 for i in range(count))
    values = tuple(-0.1 * (i + 1) for i in range(count - 1)) + ((float("-inf"),) if count else ())
    return TokenLogprobs(logprob=-0.1 - token / 1000, top_ids=top, top_logprobs=values)
