// The one source of live data: asks the coordinator once a second for what is new, and knows what to say when it does not answer.

import { MODEL } from "./dom.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 10000;
const PATIENCE_MS = 4000;
const STICK_MS = 5000; // so long this page stays with the process it knows
const MAX_POINTS = 450;
const MAX_REQUESTS = 120;
const LINK_USED = "This link opens the dashboard once, within an hour of its making, and no longer does. Enter the admin key: it opens this browser for a week. `splitserve up` prints a new link when it starts.";

export class Feed {
  /** `onState(state, history)` after each answer; `onTrouble(kind, sentence)`: kind is "lost" or "denied". */
  constructor(onState, onTrouble) {
    Object.assign(this, { onState, onTrouble, boot: "", points: [], requests: [], timer: 0, lastHeard: 0, slo: null, refused: location.hash === "#link-used" ? LINK_USED : "" });
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  /** Opens a session: the coordinator gives this browser a cookie that no script can read. */
  async login(key) {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ key }) };
    const response = await fetch("dashboard/login", options).catch(() => null);
    this.refused = "";
    if (response && !response.ok) this.refused = (await response.json().catch(() => null))?.error?.message ?? `the coordinator answered ${response.status}`;
    this.ask();
  }

  /** The viewer's objectives, in the notation of --steer-slo; null: the operator's. */
  set objectives(text) {
    this.slo = text;
    if (this.lastHeard) this.ask();
  }

  async ask() {
    clearTimeout(this.timer);
    try {
      this.take(await this.get());
    } catch (error) {
      this.fail(error);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), document.hidden ? HIDDEN_MS : EVERY_MS);
  }

  async get() {
    const after = `after_point=${this.points.at(-1)?.n ?? 0}&after_request=${this.requests.at(-1)?.n ?? 0}`;
    const slo = this.slo === null ? "" : `&slo=${encodeURIComponent(this.slo)}`;
    const model = MODEL === null ? "" : `&model=${encodeURIComponent(MODEL)}`;
    const response = await fetch(`dashboard/feed?${after}${slo}${model}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (response.ok) return response.json();
    const body = await response.json().catch(() => null);
    const error = new Error(body?.error?.message ?? `the coordinator answered ${response.status}`);
    throw Object.assign(error, { status: response.status });
  }

  take(state) {
    if (this.boot && state.boot !== this.boot && Date.now() - this.lastHeard < STICK_MS) return; // another process on the same port
    this.lastHeard = Date.now();
    if (state.boot !== this.boot) {
      const again = this.boot !== "";
      Object.assign(this, { boot: state.boot, points: [], requests: [] });
      if (again) return void setTimeout(() => this.ask()); // numbered anew since its restart: from the beginning
    }
    this.points = [...this.points, ...state.points].slice(-MAX_POINTS);
    this.requests = [...this.requests, ...state.requests].slice(-MAX_REQUESTS);
    this.onState(state, this);
  }

  fail(error) {
    if (error.status === 401) this.onTrouble("denied", this.refused); // the form says what is needed
    else if (error.status === 403) this.onTrouble("denied", error.message);
    else if (error.status) this.onTrouble("lost", `The coordinator refuses: ${error.message}`);
    else {
      const since = this.lastHeard ? ` for ${Math.round((Date.now() - this.lastHeard) / 1000)} s; what you see is from then` : "";
      this.onTrouble("lost", `No answer from the coordinator${since}. This page goes on asking. Does \`splitserve up\` still run, and can this machine reach it?`);
    }
  }
}
