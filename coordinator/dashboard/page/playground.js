// A chat with the served model, by the same API as everybody's, and under each answer where its time went.

import { $, MODEL, el, stageBar } from "./dom.js";

const KEY = "splitserve-api-key";

export class Playground {
  constructor() {
    this.messages = [];
    this.stop = null;
    $("chat-key").value = sessionStorage.getItem(KEY) ?? "";
    $("chat-key").addEventListener("change", (event) => sessionStorage.setItem(KEY, event.target.value));
    $("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    $("chat-reset").addEventListener("click", () => this.reset());
    this.reset();
  }

  reset() {
    this.stop?.abort();
    this.messages = [];
    $("chat").replaceChildren(el("p", { class: "empty" }, "Each message sends the whole conversation, as the API wants it. Earlier prompts may be in the prefix cache of a prefill worker; earlier answers were generated on a decode worker, and a prefill worker computes them anew, unless the workers are mixed. What was cached stands under each answer."));
  }

  async send() {
    const question = $("chat-input").value.trim();
    if (this.stop) return void this.stop.abort();
    if (!question) return;
    if (!this.messages.length) $("chat").replaceChildren();
    $("chat-input").value = "";
    this.messages.push({ role: "user", content: question });
    const turn = el("div", { class: "turn" });
    const text = turn.appendChild(el("span"));
    $("chat").append(el("div", { class: "turn user" }, question), turn);
    this.stop = new AbortController();
    $("chat-send").textContent = "Stop";
    try {
      await this.stream(text, turn);
      this.messages.push({ role: "assistant", content: text.textContent });
    } catch (error) {
      this.broke(error, turn, text, question);
    } finally {
      this.stop = null;
      $("chat-send").textContent = "Send";
      scroll();
    }
  }

  broke(error, turn, text, question) {
    if (error.name === "AbortError") {
      turn.append(el("span", { class: "sub" }, " [stopped]"));
      this.messages.push({ role: "assistant", content: text.textContent });
      return;
    }
    this.messages.pop();
    $("chat-input").value ||= question;
    turn.classList.add("error");
    turn.append(error.status === 401 ? `${error.message} Put it into the field "API key" below.` : error.message);
  }

  async stream(text, turn) {
    const key = $("chat-key").value;
    const body = { ...(MODEL === null ? {} : { model: MODEL }), messages: this.messages, stream: true, stream_options: { include_usage: true }, temperature: Number($("chat-temperature").value), max_tokens: Number($("chat-max-tokens").value) || undefined };
    const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: this.stop.signal });
    if (!response.ok) {
      const answer = await response.json().catch(() => null);
      throw Object.assign(new Error(answer?.error?.message ?? `The server answered ${response.status}.`), { status: response.status });
    }
    for await (const line of lines(response.body)) {
      if (!line.startsWith("data: {")) continue;
      const usage = take(JSON.parse(line.slice(6)), text);
      if (usage) turn.append(...stageBar(stagesOf(usage)), el("div", { class: "facts" }, factsOf(usage)));
    }
  }
}

/** Adds a chunk's text; returns its usage, if it has one. */
function take(chunk, text) {
  if (chunk.error) throw new Error(`The answer broke off: ${chunk.error.message}`);
  if (chunk.usage) return chunk.usage;
  const content = chunk.choices[0]?.delta?.content;
  if (!content) return null;
  text.append(content);
  scroll();
  return null;
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const whole = (rest + part.value).split("\n");
    rest = whole.pop();
    yield* whole;
  }
}

function factsOf(usage) {
  return `${usage.prompt_tokens} prompt tokens, ${usage.prompt_tokens_details?.cached_tokens ?? 0} of them cached, ${usage.completion_tokens} output tokens`;
}

/** [stage, seconds] of a usage. */
function stagesOf(usage) {
  const named = Object.entries(usage.splitserve ?? {}).filter(([name, value]) => name.endsWith("_s") && value > 0);
  return named.map(([name, seconds]) => [name.slice(0, -2), seconds]);
}

function scroll() {
  $("chat").scrollTop = $("chat").scrollHeight;
}
