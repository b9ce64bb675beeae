// LangChain for JavaScript: chat completions, the Responses API, Anthropic's messages. Arguments: the server's address, the variant.
import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const [url, variant] = process.argv.slice(2);
const common = { model: "tiny", apiKey: "none", maxRetries: 0 };
const model =
  variant === "anthropic"
    ? new ChatAnthropic({ ...common, maxTokens: 200, anthropicApiUrl: url })
    : new ChatOpenAI({ ...common, useResponsesApi: variant === "responses", configuration: { baseURL: `${url}/v1` } });
const place = z.object({ city: z.enum(["Paris"]) });
const weather = tool(() => "sunny", { name: "weather", description: "The weather.", schema: place });

let streamed = "";
for await (const chunk of await model.stream("Hi")) streamed += chunk.text;
const [call] = (await model.bindTools([weather], { tool_choice: "weather" }).invoke("Weather?")).tool_calls;
const structured = await model.withStructuredOutput(place).invoke("Where?");
console.log(JSON.stringify({ streamed, called: { name: call.name, arguments: call.args }, structured }));
