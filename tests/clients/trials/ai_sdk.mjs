// Vercel's AI SDK: OpenAI's provider as it comes (the Responses API) and for chat, and Anthropic's. Arguments: the server's address, the variant.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, variant] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(settings);
const models = { default: () => openai("tiny"), chat: () => openai.chat("tiny"), anthropic: () => createAnthropic(settings)("tiny") };
const ask = { model: models[variant](), maxRetries: 0, prompt: "Hi" };
const place = z.object({ city: z.enum(["Paris"]) });

let streamed = "";
for await (const text of streamText({ ...ask, onError: ({ error }) => { throw error; } }).textStream) streamed += text;
const tools = { weather: tool({ description: "The weather.", inputSchema: place, execute: async () => "sunny" }) };
const answered = await generateText({ ...ask, tools, stopWhen: stepCountIs(2) });
const [call] = answered.steps[0].toolCalls;
if (answered.text !== streamed) throw new Error(`after the tool's result: ${answered.text}`);
const { object: structured } = await generateObject({ ...ask, schema: place });
console.log(JSON.stringify({ streamed, called: { name: call.toolName, arguments: call.input }, structured }));
