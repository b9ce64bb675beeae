"""Chat templates: the same text as transformers, and nothing but text."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from splitserve.coordinator.errors import CannotStart, InvalidRequest
from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.generate.request_sampling import sampling_of
from splitserve.coordinator.text.chat_template import ChatTemplate
from splitserve.coordinator.text.served_model import ServedModel

LLAMA_LIKE = """{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if loop.first and message['role'] == 'system' %}
        {{- '<|system|>\n' + message['content'] | trim + '<|end|>' }}
        {%- continue %}
    {%- endif %}
    {%- generation %}{{- '<|' + message['role'] + '|>' + date_string + message | tojson }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Was ist <b>'größer'</b>? 日本"}],
    [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b & c"},
    ],
]


def messages(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    request = ChatCompletionRequest.model_validate_json(json.dumps({"messages": chat}))
    return [message.for_template() for message in request.messages]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_same_tokens_as_transformers(
    model: ServedModel, model_folder: Path, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(model_folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    options: Any = {
        "chat_template": LLAMA_LIKE,
        "add_generation_prompt": add_generation_prompt,
        "tokenize": False,
    }
    expected = theirs.apply_chat_template(chat, **options)
    text = ChatTemplate(LLAMA_LIKE, {"bos_token": "<|bos|>"}).render(
        messages(chat), add_generation_prompt=add_generation_prompt
    )
    assert text == expected
    ours = model.tokenizer.encode([text], add_special_tokens=False)[0]
    assert ours == theirs(expected, add_special_tokens=False)["input_ids"]
    assert ours.count(0) == 1  # BOS


def test_variables_of_the_request_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ add_generation_prompt }}{{ messages | length }}")
    text = template.render(
        messages(CHATS[0]), extra={"enable_thinking": 7, "add_generation_prompt": "no", "messages": []}
    )
    assert text == "7no1"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(messages(CHATS[0])) == datetime.now().strftime(
        "%Y"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source).render(messages(CHATS[0]))


def test_a_template_that_does_not_compile_is_said_so_at_start() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_loading(model_folder: Path, tmp_path: Path, model: ServedModel) -> None:
    def write(config: dict[str, Any]) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    write({})
    assert ChatTemplate.load(tmp_path, model.tokenizer) is None
    write({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]})
    template = ChatTemplate.load(tmp_path, model.tokenizer)
    assert template is not None
    assert template.render(messages(CHATS[0])) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path, model.tokenizer)
    assert template is not None
    assert template.render(messages(CHATS[0])) == "file"


@pytest.mark.parametrize(
    ("remove", "config", "message"),
    [
        ("tokenizer.json", {"max_position_embeddings": 100, "vocab_size": 512}, "no tokenizer.json"),
        ("config.json", None, "config.json does not exist"),
        ("", {"max_position_embeddings": 10, "vocab_size": 512}, "context ends at 10"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_says_why(
    model_folder: Path, tmp_path: Path, remove: str, config: dict[str, Any] | None, message: str
) -> None:
    if remove != "tokenizer.json":
        (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotStart, match=message):
        ServedModel.load(tmp_path, "x", max_model_len=20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b'{"chat_template": 5}', "its chat template cannot be read"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "its chat template cannot be read"),
        ("chat_template.jinja", b"\xff", "its chat template cannot be read .*invalid start byte"),
        ("generation_config.json", b'{"temperature": "x"}', r"generation_config.json: .*at `\$.temperature`"),
        ("generation_config.json", b'{"repetition_penalty": -1}', r"generation_config.json: .*penalty`"),
        ("generation_config.json", b'{"top_k": 1.5}', r"generation_config.json: .*at `\$.top_k`"),
    ],
)
def test_files_beside_the_tokenizer_are_checked_at_the_start(
    model_folder: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """A temperature that is no number was an error 500 of every request."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((model_folder / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CannotStart, match=message):
        ServedModel.load(tmp_path, "x")


def test_defaults_of_others_tools_are_taken_as_they_are_meant(model_folder: Path, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((model_folder / file).read_bytes())
    written = {"top_k": 50.0, "max_new_tokens": -1, "temperature": 1, "top_p": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    model = ServedModel.load(tmp_path, "x")
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    sampling = sampling_of(request, model, 20)
    assert (sampling.top_k, type(sampling.top_k)) == (50, int)
    assert sampling.max_tokens == model.max_model_len - 20
    assert sampling.temperature == sampling.top_p == 1


def test_workers_tell_the_context_that_the_config_of_a_model_for_images_leaves_out(
    model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 8}}))
    model = ServedModel.load(tmp_path, "x", workers_hold=lambda: 77)
    assert model.max_model_len == 77
    assert model.vocab_size == len(model.tokenizer.table.pieces) > 0


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "reasoning": "Hm.",
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"b":1,  "a":"é"}'}}],
    },
]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'```' + c.arguments + '```'", '```{"b":1,  "a":"é"}```'),  # DeepSeek's
        ("c.arguments | tojson", '{"b": 1, "a": "é"}'),
        ("c.arguments if c.arguments is string else c.arguments | tojson", '{"b": 1, "a": "é"}'),
        ("c.arguments.a ~ c.arguments", 'é{"b":1,  "a":"é"}'),
        ("c.arguments | items | map('first') | join", "ba"),
        ("messages[1].thinking", "Hm."),  # gpt-oss'
        ("messages[1].reasoning_content", "Hm."),
    ],
)
def test_calls_and_thoughts_as_any_family_reads_them(expression: str, text: str) -> None:
    source = f"{{% set c = messages[1].tool_calls[0].function %}}{{{{ {expression} }}}}"
    assert ChatTemplate(source).render(messages(HISTORY)) == text


@pytest.mark.parametrize("system", [True, False])
def test_tools_in_a_field_of_the_system_message(system: bool) -> None:
    """Phi-4's template looks for them there."""
    source = (
        "{% for m in messages %}{% set message = m %}{{ m.role }}:{{ m.content }}"
        "{% if 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %};{% endfor %}"
    )
    chat = [*([{"role": "system", "content": "Be brief."}] if system else []), HISTORY[0]]
    system_text = "Be brief." if system else ""
    functions = json.dumps([TOOL["function"]])
    expected = f"system:{system_text}<|tool|>{functions}<|/tool|>;user:Weather?;"
    assert ChatTemplate(source).render(messages(chat), tools=[TOOL]) == expected
