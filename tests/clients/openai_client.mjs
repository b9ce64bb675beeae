// What OpenAI's own client for Node makes of this server: run by test_node.py with the server's address, says what it saw as JSON.
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const tools = [{ type: "function", function: { name: "now", parameters: { type: "object", properties: {} } } }];
const base = { model: "tiny", temperature: 0 };
const saw = {};

saw.models = (await client.models.list()).data.map((model) => model.id);
const whole = await client.chat.completions.create({ ...base, messages });
saw.chat = whole.choices[0].message.content;
saw.usage = whole.usage.total_tokens === whole.usage.prompt_tokens + whole.usage.completion_tokens;
saw.completion = (await client.completions.create({ ...base, prompt: "Hi", max_tokens: 500 })).choices[0].text;

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...base, messages, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
saw.streamed = streamed;
saw.streamedUsage = usage.completion_tokens === whole.usage.completion_tokens;

const runner = client.chat.completions.stream({ ...base, messages, tools, stop: ["never"] });
saw.finalContent = await runner.finalContent();

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const weather = { type: "function", function: { name: "weather", parameters } };
const calling = client.chat.completions.stream({ ...base, messages, tools: [weather], tool_choice: "required" });
const deltas = [];
calling.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
const called = (await calling.finalMessage()).tool_calls[0].function;
saw.call = { name: called.name, arguments: called.arguments, inPieces: deltas.length > 1 && deltas.join("") === called.arguments };

const format = { type: "json_schema", json_schema: { name: "place", schema: parameters, strict: true } };
saw.json = JSON.parse((await client.chat.completions.create({ ...base, messages, response_format: format })).choices[0].message.content);

const seen = new Set();
for await (const chunk of await client.chat.completions.create({ ...base, messages, n: 3, stream: true })) {
  for (const choice of chunk.choices) seen.add(choice.index);
}
saw.indices = [...seen].sort();

try {
  await client.chat.completions.create({ ...base, messages, temperature: 9 });
} catch (error) {
  saw.error = { status: error.status, param: error.param, type: error.type, kind: error.constructor.name };
}
try {
  await client.models.retrieve("nothing");
} catch (error) {
  saw.missing = { status: error.status, code: error.code };
}

const line = { custom_id: "a", method: "POST", url: "/v1/chat/completions", body: { messages, temperature: 0 } };
const file = await client.files.create({ file: await toFile(Buffer.from(JSON.stringify(line) + "\n"), "in.jsonl"), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
for (let i = 0; i < 6000 && !["completed", "failed"].includes(batch.status); i++) {
  await new Promise((resolve) => setTimeout(resolve, 10));
  batch = await client.batches.retrieve(batch.id);
}
const output = await (await client.files.content(batch.output_file_id)).text();
saw.batch = JSON.parse(output).response.body.choices[0].message.content;

console.log(JSON.stringify(saw));
