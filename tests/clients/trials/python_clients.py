"""Clients for Python: each streams a text, has a tool called, and asks for a format; the results are printed.

    python python_clients.py http://127.0.0.1:8000 CLIENT VARIANT

Each client is imported only by its own function: it has an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL, CLIENT, VARIANT = sys.argv[1:]
MODEL, HI = "tiny", "Hi"
os.environ |= {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
os.environ |= {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none"}


class Place(BaseModel):
    """A place."""

    city: Literal["Paris"]


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}
Seen = dict[str, Any]


def seen(streamed: str, name: str, arguments: Any, structured: Any) -> Seen:
    """Return what all trials print."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if isinstance(structured, BaseModel):
        structured = structured.model_dump()
    return {"streamed": streamed, "called": {"name": name, "arguments": arguments}, "structured": structured}


def openai() -> Seen:
    """Chat completions, or the Responses API with a call answered."""
    from openai import OpenAI

    client, tool = OpenAI(max_retries=0), {"name": "weather", "parameters": SCHEMA, "strict": True}
    if VARIANT == "chat":
        ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": HI}]}
        with client.chat.completions.stream(**ask) as stream:
            streamed = stream.get_final_completion().choices[0].message.content
        tools = [{"type": "function", "function": tool}]
        with client.chat.completions.stream(**ask, tools=tools, tool_choice="required") as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        parsed = client.chat.completions.parse(**ask, response_format=Place).choices[0].message.parsed
        return seen(streamed, call.function.name, call.function.arguments, parsed)
    ask = {"model": MODEL, "input": HI}
    with client.responses.stream(**ask) as stream:
        streamed = stream.get_final_response().output_text
    tools = [{"type": "function", **tool}]
    with client.responses.stream(**ask, tools=tools, tool_choice="required") as stream:
        asked = stream.get_final_response()
    (call,) = asked.output
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answered = client.responses.create(model=MODEL, tools=tools, previous_response_id=asked.id, input=result)
    assert answered.output_text == streamed
    parsed = client.responses.parse(**ask, text_format=Place).output_parsed
    return seen(streamed, call.name, call.arguments, parsed)


def anthropic() -> Seen:
    """The Messages API."""
    from anthropic import Anthropic

    api: Any = Anthropic(max_retries=0).messages
    ask: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": HI}]}
    with api.stream(**ask) as stream:
        streamed = stream.get_final_text()
    tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    with api.stream(**ask, tools=tools, tool_choice={"type": "any"}) as stream:
        (call,) = stream.get_final_message().content
    parsed = api.parse(**ask, output_format=Place).parsed_output
    return seen(streamed, call.name, call.input, parsed)


def openai_agents() -> Seen:
    """An agent with its default model: the Responses API."""
    from agents import Agent, Runner, function_tool

    @function_tool
    def weather(city: Literal["Paris"]) -> str:
        return "sunny"

    async def run() -> Seen:
        text = Runner.run_streamed(Agent(name="a", model=MODEL), HI)
        pieces = [event.data async for event in text.stream_events() if event.type == "raw_response_event"]
        streamed = "".join(piece.delta for piece in pieces if piece.type == "response.output_text.delta")
        ran = await Runner.run(Agent(name="a", model=MODEL, tools=[weather]), "Weather?")
        assert text.final_output == ran.final_output == streamed
        call = next(item.raw_item for item in ran.new_items if item.type == "tool_call_item")
        parsed = (await Runner.run(Agent(name="a", model=MODEL, output_type=Place), HI)).final_output
        return seen(streamed, call.name, call.arguments, parsed)

    return asyncio.run(run())


def pydantic_ai() -> Seen:
    """An agent whose model is given by name, ``openai:...`` or ``anthropic:...``."""
    from pydantic_ai import Agent, NativeOutput, ToolCallPart

    name = f"{VARIANT}:{MODEL}"

    async def text() -> str:
        async with Agent(name).run_stream(HI) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    streamed, agent = asyncio.run(text()), Agent(name)

    @agent.tool_plain
    def weather(city: Literal["Paris"]) -> str:
        return "sunny"

    ran = agent.run_sync("Weather?")
    assert ran.output == streamed
    parts = [part for message in ran.all_messages() for part in message.parts]
    (call,) = (part for part in parts if isinstance(part, ToolCallPart))
    if VARIANT == "openai":
        assert type(agent.model).__name__ == "OpenAIResponsesModel"
        assert Agent(name, output_type=NativeOutput(Place)).run_sync(HI).output == Place(city="Paris")
    parsed = Agent(name, output_type=Place).run_sync(HI).output  # by a tool
    return seen(streamed, call.tool_name, call.args, parsed)


def instructor() -> Seen:
    """A mode."""
    from instructor import Mode, from_anthropic, from_openai

    mode = Mode[VARIANT]
    ask: Any = {"model": MODEL, "max_retries": 0, "messages": [{"role": "user", "content": HI}]}
    if VARIANT.startswith("ANTHROPIC"):
        from anthropic import Anthropic

        client, ask = from_anthropic(Anthropic(), mode=mode), {**ask, "max_tokens": 200}
    else:
        from openai import OpenAI

        client = from_openai(OpenAI(max_retries=0), mode=mode)
    if "PARALLEL" in VARIANT:
        from collections.abc import Iterable

        (parsed,) = client.chat.completions.create(**ask, response_model=Iterable[Place])
        return {"structured": parsed.model_dump()}
    parsed = client.chat.completions.create(**ask, response_model=Place)
    if VARIANT.startswith("RESPONSES"):
        return {"structured": parsed.model_dump()}
    *_, last = client.chat.completions.create_partial(**ask, response_model=Place)
    assert isinstance(last, BaseModel)
    return {"structured": parsed.model_dump(), "streamed": last.model_dump()}


def langchain() -> Seen:
    """Chat completions, the Responses API, or Anthropic's messages."""
    from langchain_core.tools import tool

    if VARIANT == "anthropic":
        from langchain_anthropic import ChatAnthropic

        model: Any = ChatAnthropic(model=MODEL, max_tokens=200, max_retries=0)
    else:
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model=MODEL, max_retries=0, use_responses_api=VARIANT == "responses")

    @tool
    def weather(city: Literal["Paris"]) -> str:
        """Return the weather."""
        return "sunny"

    streamed = "".join(chunk.text for chunk in model.stream(HI))
    bound = model.bind_tools([weather], tool_choice="weather")
    first, *more = bound.stream("Weather?")
    for chunk in more:
        first += chunk
    (call,) = first.tool_calls
    parsed = model.with_structured_output(Place, method="json_schema").invoke(HI)
    return seen(streamed, call["name"], call["args"], parsed)


TRIALS: dict[str, Callable[[], Seen]] = {
    "openai": openai,
    "anthropic": anthropic,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "instructor": instructor,
    "langchain": langchain,
}
if __name__ == "__main__":
    print(json.dumps(TRIALS[CLIENT]()))
