// What went wrong, and when.

import { $, clock, count, el } from "./dom.js";

const TOTALS = [["lost", "workers lost", "bad"], ["failed", "failed (5xx)", "bad"], ["refused", "refused (429)", "warn"], ["retry", "retries", "warn"],
  ["recovery", "recovered", "good"], ["preempted", "preemptions", "warn"]];
const WORDS = { good: "good", info: "note", warn: "warning", bad: "error" };

export class Trouble {
  show(state) {
    $("totals").replaceChildren(...TOTALS.map(([kind, label, level]) =>
      el("div", { "data-level": state.totals[kind] ? level : "none" }, el("dt", {}, label), el("dd", {}, count(state.totals[kind])))));
    const reasons = Object.entries(state.refusals).map(([reason, n]) => `${reason} ${count(n)}`).join(", ");
    $("refusals").textContent = reasons ? `Refusals by reason: ${reasons}` : "";
    const body = state.events.map((event) => el("li", { "data-level": event.level },
      el("time", {}, clock(event.t)),
      el("span", {}, el("span", { class: "offscreen" }, `${WORDS[event.level]}: `), event.text,
        event.for_s ? el("small", {}, ` over ${Math.round(event.for_s)} s`) : null, event.detail ? el("small", {}, ` newest: ${event.detail}`) : null))).reverse();
    const log = $("events"), top = log.scrollTop;
    log.replaceChildren(...(body.length ? body : [el("li", { class: "empty" }, "Nothing has happened since the coordinator started.")]));
    log.scrollTop = top;
  }
}
