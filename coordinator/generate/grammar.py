"""Which grammar an answer must follow, and whether it compiles: what cannot is rejected with 400 before a
worker sees it."""

from __future__ import annotations

import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ...transport.messages.fields import MAX_GRAMMAR_BYTES
from ...transport.messages.token_rules import TokenRules
from ..chat_output.call_formats import ARGS
from ..errors import WrongField
from ..text.served_model import ServedModel
from ..text.tokenizer import Tokenizer
from .bodies.chat import ChatCompletionRequest
from .bodies.output_format import grammar_of
from .call_grammar import after_thought, call_grammar, calls_at_will, either, in_final_channel
from .prompts import GenerateRequest, Prompt
from .structural_tags import structural_grammar

_log = logging.getLogger(__name__)
MAX_REMEMBERED = 1024
MAX_LEXER_STATES = 50_000
"""The workers' limit; with the library's others it bounds the work to about a second."""
MAX_REASON_CHARS = 500
DIVISOR = re.compile(rb'multipleOf[\\"\s:nrt]*([\d.]+)')
HIDDEN = re.compile(rb"\\u00[2-7]")  # may spell that word in a schema within Lark
MAX_DIVISORS = 20_000
"""Product of a grammar's different ones. No limit of the library's bounds them: 999,983 takes 35 s."""


def grammar_for(request: GenerateRequest, model: ServedModel, prompt: Prompt) -> tuple[bytes, str]:
    """Return the grammar that the output must follow (empty: none), and the field to blame if it does not
    compile."""
    wanted = request.output_format
    style, term, grammar, param = model.chat_style, model.tokenizer.as_lark, b"", ""
    if wanted is not None:
        tagged = wanted.kind == "structural_tag"
        grammar, param = structural_grammar(wanted, term) if tagged else grammar_of(wanted), wanted.param
    if not isinstance(request, ChatCompletionRequest):
        return grammar, param
    if grammar and style.tools == "gpt_oss" and not request.continue_final_message:
        grammar = in_final_channel(grammar, term)
    if request.must_call:
        grammar, param = _calls(request, model), request.field_of_tools
    elif grammar and request.callable_tools:
        grammar = either(grammar, _calls(request, model))
    elif request.holds_calls:
        grammar, param = _calls(request, model, make=calls_at_will), request.field_of_tools
    if grammar and (marks := style.thought_marks) is not None:
        grammar = after_thought(grammar, marks, term, opened=style.thinks_already(prompt.text))
    return grammar, param


def with_rules(request: GenerateRequest, model: ServedModel, grammar: bytes) -> bytes:
    """Return the grammar with the request's rules about tokens. Raises InvalidRequest."""
    allowed, bad = request.allowed_token_ids or (), request.bad_words or ()
    if not allowed and not bad:
        return grammar
    if wrong := [token_id for token_id in allowed if token_id >= model.vocab_size]:
        found = f"token ids {', '.join(map(str, wrong[:20]))}"
        raise WrongField(
            "allowed_token_ids", f"{found} are outside the vocabulary of {model.vocab_size} tokens"
        )
    # as it stands, and in a sentence
    spelled = [text for word in bad for text in (word, f" {word.lstrip()}")]
    runs = dict.fromkeys(
        tuple(ids) for ids in model.tokenizer.encode(spelled, add_special_tokens=False) if ids
    )
    rules = TokenRules(allowed=tuple(allowed), bad=tuple(runs), grammar=grammar.decode()).packed()
    if len(rules) > MAX_GRAMMAR_BYTES:
        raise WrongField("bad_words", "are too long, together with the format")
    return rules


def _calls(
    request: ChatCompletionRequest, model: ServedModel, make: Callable[..., bytes] = call_grammar
) -> bytes:
    tokenizer = model.tokenizer
    form = model.chat_style.forced_format(has_args_mark=tokenizer.fast.token_to_id(ARGS) is not None)
    return make(form, request.callable_tools, tokenizer.as_lark, parallel=not request.one_call)


class GrammarCheck:
    """Compiles grammars for one model's vocabulary, and remembers those that compiled. Methods may be called
    on several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._loaded: LLTokenizer | None = None
        self._good: OrderedDict[bytes, None] = OrderedDict()
        self._lock = Lock()

    def check(self, grammar: bytes, param: str) -> None:
        """Raise InvalidRequest with the library's reason if the grammar does not compile, or no text
        satisfies it."""
        with self._lock:
            if grammar in self._good:
                self._good.move_to_end(grammar)
                return
            tokenizer = self._loaded or self._load()
        divisors = {int(found.replace(b".", b"")[:20].strip(b"0") or 1) for found in DIVISOR.findall(grammar)}
        if math.prod(divisors) > MAX_DIVISORS or (b"%json" in grammar and HIDDEN.search(grammar)):
            raise WrongField(param, "`multipleOf` has too many digits, or is hidden")
        matcher = LLMatcher(
            tokenizer, grammar.decode(), log_level=0, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES)
        )
        reason = matcher.get_error()
        if not matcher.is_error():
            matcher.compute_bitmask()
            reason = matcher.get_error() and "no text satisfies it"
        for warning in matcher.get_grammar_warnings():
            _log.info("%s: left to the model: %s", param, warning[:MAX_REASON_CHARS])
        if reason:
            raise WrongField(param, _for_people(reason))
        with self._lock:
            self._good[grammar] = None
            if len(self._good) > MAX_REMEMBERED:
                self._good.popitem(last=False)

    def _load(self) -> LLTokenizer:
        """The end-of-text token makes no difference to whether a grammar compiles."""
        self._loaded = LLTokenizer(self._tokenizer.fast.to_str(), n_vocab=self._vocab_size, eos_token=[0])
        return self._loaded


def _for_people(reason: str) -> str:
    """Keep the part of the library's reason that is about what the client wrote, not about the grammar made
    of it."""
    if found := re.search(r"^error: (.+)$", reason, re.MULTILINE) if "regex parse error" in reason else None:
        return f"the regular expression cannot be read: {found[1]}"
    if found := re.match(r'at \d+\(\d+\): invalid regex ".*?" \(in regex\): ([^\n;]+)', reason):
        return f"the regular expression cannot be followed: {found[1]}"
    if "JSON schema" in reason or "Unimplemented keys" in reason:
        fault = reason.partition("failed to compile JSON schema:")[2] or reason
        first = fault.strip().partition("\n")[0]
        return f"the schema cannot be followed: {first[:MAX_REASON_CHARS]}"
    return reason.partition("\n")[0][:MAX_REASON_CHARS].strip()
