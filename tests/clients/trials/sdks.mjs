// The clients of OpenAI (chat completions, the Responses API) and Anthropic for JavaScript, in Node or bundled for a browser.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const schema = { type: "object", properties: { city: { type: "string", enum: ["Paris"] } }, required: ["city"], additionalProperties: false };
const messages = [{ role: "user", content: "Hi" }];
const settings = { apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true };
const told = { name: "weather", description: "The weather." };

export async function chat(url) {
  const { chat: { completions } } = new OpenAI({ ...settings, baseURL: `${url}/v1` });
  const ask = { model: "tiny", messages };
  const streamed = await completions.stream(ask).finalContent();
  const tools = [{ type: "function", function: { ...told, parameters: schema } }];
  const { function: call } = (await completions.stream({ ...ask, tools, tool_choice: "required" }).finalMessage()).tool_calls[0];
  const format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
  const structured = (await completions.parse({ ...ask, response_format: format })).choices[0].message.content;
  return { streamed, called: { name: call.name, arguments: JSON.parse(call.arguments) }, structured: JSON.parse(structured) };
}

export async function responses(url) {
  const { responses: api } = new OpenAI({ ...settings, baseURL: `${url}/v1` });
  const ask = { model: "tiny", input: messages };
  const streamed = (await api.stream(ask).finalResponse()).output_text;
  const tools = [{ type: "function", ...told, parameters: schema, strict: true }];
  const asked = await api.stream({ ...ask, tools, tool_choice: "required" }).finalResponse();
  const call = asked.output.find((item) => item.type === "function_call");
  const result = [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }];
  const answered = await api.create({ model: "tiny", tools, previous_response_id: asked.id, input: result });
  if (answered.output_text !== streamed) throw new Error(`after the tool's result: ${answered.output_text}`);
  const format = { type: "json_schema", name: "place", schema, strict: true };
  const structured = (await api.parse({ ...ask, text: { format } })).output_text;
  return { streamed, called: { name: call.name, arguments: JSON.parse(call.arguments) }, structured: JSON.parse(structured) };
}

export async function anthropic(url) {
  const { messages: api } = new Anthropic({ ...settings, baseURL: url });
  const ask = { model: "tiny", max_tokens: 200, messages };
  const streamed = await api.stream(ask).finalText();
  const tools = [{ ...told, input_schema: schema }];
  const asked = await api.stream({ ...ask, tools, tool_choice: { type: "any" } }).finalMessage();
  const call = asked.content.find((block) => block.type === "tool_use");
  const format = { type: "json_schema", schema };
  const { content } = await api.create({ ...ask, output_config: { format } });
  return { streamed, called: { name: call.name, arguments: call.input }, structured: JSON.parse(content[0].text) };
}

const variants = { chat, responses, anthropic };
if (globalThis.process?.argv) {
  const [url, variant] = process.argv.slice(2);
  console.log(JSON.stringify(await variants[variant](url)));
} else {
  globalThis.trials = variants;
}
