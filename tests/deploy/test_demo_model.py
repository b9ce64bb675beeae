"""The bundled demo model: small, loadable by transformers, and able to answer a question about Python."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import splitserve

DEMO_MODEL = Path(splitserve.__file__).parent / "deploy" / "demo_model"
MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def test_the_folder_is_small_and_carries_its_licence() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) <= MAX_BYTES
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (DEMO_MODEL / "LICENSE").read_text(
        encoding="utf-8"
    )


def test_the_chat_template_marks_every_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " What is zip? "},
        {"role": "assistant", "content": "A function."},
        {"role": "user", "content": "And map?"},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>What is zip?<|end|><|assistant|>A "
        "function.<|end|><|user|>And map?<|end|><|assistant|>"
    )
    assert tokenizer.encode("<|assistant|>") == [tokenizer.convert_tokens_to_ids("<|assistant|>")]


@pytest.mark.parametrize(
    "text", ["naïve café ☕ 你好", "  def f(x):\n\treturn x ** 2\n", "'quoted' <b>&amp;</b> 1,000.5"]
)
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_end_of_a_turn_ends_the_generation(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM
) -> None:
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(
        ["<|end|>", "<|endoftext|>"]
    )
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    ("questions", "keywords"),
    [
        (["What does os.path.join do?"], ("os.path.join", "pathname components")),
        (["Explain list comprehensions"], ("list", "comprehension", "[x for x in iterable]")),
        (
            ["Who are you?", "How do I read a file?", "What is a decorator?"],
            ("decorator expressions", "callable"),
        ),
    ],
)
def test_greedy_answers_are_on_topic(
    tokenizer: PreTrainedTokenizerFast,
    model: LlamaForCausalLM,
    questions: list[str],
    keywords: tuple[str, ...],
) -> None:
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, return_tensors="pt").input_ids
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=120,
            do_sample=False,
            temperature=None,
            top_p=None,
        )
        answer = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    assert tokens[0, -1] == tokenizer.eos_token_id
    assert [keyword for keyword in keywords if keyword not in answer] == [], answer
