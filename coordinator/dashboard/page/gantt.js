// The newest requests, one a row, cut into their stages.

import { $, choice, clock, copy, count, el, seconds, stageBar, stageClass } from "./dom.js";

const NUM_ROWS = 18;
const TICK_PX = 110; // the least between two labels of the axis

export class Gantt {
  constructor() {
    Object.assign(this, { root: $("gantt"), requests: [], shown: [], stages: [], mode: "arrival", held: false, chosen: null });
    choice($("gantt-mode"), [["arrival", "arrival"], ["clock", "clock"]], "arrival", (mode) => {
      this.mode = mode;
      this.draw();
    });
    $("pause").addEventListener("click", () => this.hold(!this.held));
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  /** Held still, the list shows what it showed. */
  hold(held) {
    this.held = held;
    $("pause").setAttribute("aria-pressed", String(held));
    $("pause").textContent = held ? "Go on" : "Pause";
    if (!held) this.show(this.requests, this.stages);
  }

  show(requests, stages) {
    this.requests = requests;
    if (stages.join() !== this.stages.join()) $("gantt-legend").replaceChildren(...stages.map((stage) => el("span", {}, el("i", { class: stageClass(stage) }), stage)));
    this.stages = stages;
    if (this.held) return;
    this.shown = requests.slice(-NUM_ROWS).reverse();
    this.draw();
  }

  draw() {
    if (!this.shown.length) {
      this.root.replaceChildren(el("p", { class: "empty" }, "No request has ended since this page knows the coordinator. Ask something in the playground, or: ",
        el("code", {}, `curl ${location.origin}/v1/chat/completions -H 'content-type: application/json' -d '{"messages":[{"role":"user","content":"Hi"}]}'`)));
      return;
    }
    const byClock = this.mode === "clock";
    const from = byClock ? Math.min(...this.shown.map((r) => r.begin)) : 0;
    const span = Math.max(1e-6, ...this.shown.map((r) => (byClock ? r.begin : 0) + r.total_s - from));
    this.root.replaceChildren(this.axis(span), ...this.shown.map((r) => this.row(r, byClock ? r.begin - from : 0, span)));
    if (!this.shown.some((r) => r.n === this.chosen)) this.choose(null);
  }

  axis(span) {
    const track = this.root.querySelector(".track")?.clientWidth ?? this.root.clientWidth / 2;
    const step = niceStep((span * TICK_PX) / Math.max(TICK_PX, track));
    const ticks = [];
    for (let t = 0; t <= span; t += step) ticks.push(el("span", { style: { left: `${(100 * t) / span}%` } }, t ? seconds(t) : "0"));
    const names = [["at", "began"], ["id", "request id"], ["code", ""]].map(([kind, name]) => el("span", { class: kind }, name));
    return el("div", { class: "row axis", "aria-hidden": "true" }, ...names, el("div", { class: "ticks" }, ...ticks), el("span", { class: "total" }, "total"), el("span", { class: "tokens" }, "tokens in, out"));
  }

  row(request, offset, span) {
    const at = (s) => `${(100 * (offset + s)) / span}%`;
    const bars = request.spans.map(([stage, begin, end]) => el("i", { class: stageClass(stage), style: { left: at(begin), width: `${(100 * (end - begin)) / span}%` } }));
    const button = el("button", { type: "button", tabindex: "-1", class: "copy", title: `Copy ${request.id}`, "aria-label": `Copy ${request.id}`,
      onclick: (event) => { event.stopPropagation(); copy(request.id, event.currentTarget); } }, "Copy");
    return el("div", { class: "row", role: "row", id: `request-${request.n}`, "aria-selected": String(request.n === this.chosen), onclick: () => this.choose(request.n) },
      el("span", { class: "at", role: "gridcell" }, clock(request.begin)),
      el("span", { class: "id", role: "gridcell" }, el("span", { title: request.id }, request.id), button),
      el("span", { class: `code ${statusClass(request.status)}`, role: "gridcell" }, request.status === "cancelled" ? "gone" : request.status),
      el("div", { class: "track", role: "gridcell", "aria-label": request.spans.map(([stage, begin, end]) => `${stage} ${seconds(end - begin)}`).join(", ") }, ...bars),
      el("span", { class: "total", role: "gridcell" }, seconds(request.total_s)),
      el("span", { class: "tokens sub", role: "gridcell" }, `${count(request.prompt)}, ${count(request.output)}`));
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const index = this.shown.findIndex((r) => r.n === this.chosen);
    const to = event.key === "Home" ? 0 : event.key === "End" ? this.shown.length - 1 : step && Math.max(0, Math.min(this.shown.length - 1, index + step));
    if (to === undefined || !this.shown.length) return;
    event.preventDefault();
    this.hold(true);
    this.choose(this.shown[to].n);
  }

  /** The chosen request's id to the clipboard. */
  copyChosen() {
    $("gantt-detail").querySelector("button")?.click();
  }

  choose(n) {
    const again = this.chosen === n && $("gantt-detail").dataset.n === String(n);
    this.chosen = n;
    for (const row of this.root.querySelectorAll("[role=row]")) row.setAttribute("aria-selected", String(row.id === `request-${n}`));
    const request = this.shown.find((r) => r.n === n);
    if (request) this.root.setAttribute("aria-activedescendant", `request-${n}`);
    else this.root.removeAttribute("aria-activedescendant");
    if (again) return; // its button may have the focus
    $("gantt-detail").dataset.n = String(n);
    $("gantt-detail").replaceChildren(...(request ? detail(request, this.stages) : []));
  }
}

function detail(request, stages) {
  const sums = stages.map((stage) => [stage, request.spans.filter((s) => s[0] === stage).reduce((sum, s) => sum + s[2] - s[1], 0)]);
  const button = el("button", { type: "button", onclick: (event) => copy(request.id, event.currentTarget) }, "Copy id");
  const facts = [["status", request.status], ["prefill on", request.workers[0] || "–"], ["decode on", request.workers[1] || "–"],
    ["prompt", `${count(request.prompt)} tokens, ${count(request.cached)} cached`], ["output", `${count(request.output)} tokens`]];
  if (request.dispatches > 1) facts.push(["dispatched", `${request.dispatches} times`]);
  if (request.tenant) facts.push(["tenant", request.tenant]);
  return [el("p", { class: "whole-id" }, el("code", {}, request.id), button), ...stageBar(sums.filter(([, s]) => s > 0)), el("div", { class: "facts" }, ...facts.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, value))))];
}

const statusClass = (status) => (status === "200" ? "status-good" : status >= "500" && status < "600" ? "status-bad" : "status-warn");

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least);
}
