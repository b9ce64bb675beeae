// Who is here, how full they are, and how requests pass between them.

import { $, count, el, percent } from "./dom.js";
import { Strip } from "./strip.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_PAIRS = 9; // with more pairs of workers, lines would hide each other: then one stands for all between two lanes
const DOTS_MS = 800; // as in panels.css
const MAX_CARDS = 8; // with more workers of a role, each role is a heat strip

export class Flow {
  constructor() {
    this.root = $("flow-body");
    this.strips = { prefill: new Strip("prefill", workerCard), decode: new Strip("decode", workerCard) };
    new ResizeObserver(() => this.state && this.draw()).observe(this.root);
  }

  show(state) {
    state.workers.sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
    this.state = state;
    this.many = this.of("prefill").length > MAX_CARDS || this.of("decode").length > MAX_CARDS;
    const focused = Object.values(this.strips).find((strip) => strip.cells === document.activeElement); // it moves, and loses the focus
    const rate = state.flows.reduce((sum, [, , r]) => sum + r, 0);
    this.queue = card("queue", "Queue", state.stages.queue ?? 0, "requests wait for a worker with room");
    this.clients = card("clients", "Clients", (state.stages.decode ?? 0) + (state.stages.handoff ?? 0), `streams open, ${count(rate)} answered a second`);
    this.nodes = new Map();
    this.lanes = { prefill: this.lane("prefill"), decode: this.lane("decode") };
    const parts = [el("div", { class: "lane" }, this.queue), this.lanes.prefill, this.lanes.decode, el("div", { class: "lane" }, this.clients)];
    this.root.replaceChildren(...parts);
    focused?.cells.focus({ preventScroll: true });
    this.draw();
  }

  lane(role) {
    const workers = this.of(role);
    const lane = (...children) => el("div", { class: "lane", role: "group", "aria-label": `${role} workers` }, el("h3", {}, role), ...children);
    if (!workers.length) return lane(el("p", { class: "empty" }, `No ${role} worker is here. Start one on any host: `, el("code", {}, `splitserve ${role} --coordinator tcp://HOST:7700`)));
    if (this.many) {
      this.strips[role].show(workers);
      return lane(this.strips[role].root);
    }
    return lane(...workers.map((worker) => {
      const node = workerCard(worker);
      this.nodes.set(worker.id, node);
      return node;
    }));
  }

  of(role) {
    return this.state.workers.filter((worker) => worker.role === role);
  }

  /** The lines: as wide as requests a second; thin and grey where nothing has passed. */
  draw() {
    this.svg?.remove();
    this.svg = shape("svg", { "aria-hidden": "true" });
    this.root.prepend(this.svg);
    const prefills = this.of("prefill"), decodes = this.of("decode");
    const few = !this.many && prefills.length * decodes.length <= MAX_PAIRS;
    const taken = [];
    for (const label of (few ? this.pairs(prefills, decodes) : this.sums()).filter(Boolean)) this.place(label, taken);
  }

  /** A label `at` this share of its line, or elsewhere on it where that would cover another label; none where there is no room. */
  place({ path, words, kind, at }, taken) {
    const [width, height] = [6.4 * words.length + 8, 17];
    const there = [at, 0.5, 0.38, 0.62, 0.25, 0.75].map((share) => path.getPointAtLength(share * path.getTotalLength()))
      .find(({ x, y }) => taken.every((other) => Math.abs(other.x - x) >= (other.width + width) / 2 || Math.abs(other.y - y) >= height));
    if (!there) return;
    taken.push({ x: there.x, y: there.y, width });
    const ground = shape("rect", { x: there.x - width / 2, y: there.y - height / 2, width, height, rx: 4, class: kind });
    const label = shape("text", { x: there.x, y: there.y + 4 });
    label.textContent = words;
    this.svg.append(ground, label);
  }

  /** A line between any two lanes; returns their labels. */
  sums() {
    const rate = this.state.flows.reduce((sum, [, , r]) => sum + r, 0);
    const { prefill, decode } = this.lanes;
    return [[this.queue, prefill, "prefill"], [prefill, decode, "handoff"], [decode, this.clients, "decode"]].map(([a, b, kind]) => this.link(a, b, rate, rate || 1, kind, 0.5));
  }

  /** A line between any two workers; returns their labels. */
  pairs(prefills, decodes) {
    const into = new Map(), outOf = new Map(), pairs = new Map();
    for (const [prefill, decode, rate] of this.state.flows) {
      into.set(prefill, (into.get(prefill) ?? 0) + rate);
      outOf.set(decode, (outOf.get(decode) ?? 0) + rate);
      pairs.set(`${prefill}\n${decode}`, rate);
    }
    const most = Math.max(1e-9, ...into.values(), ...outOf.values());
    const labels = [];
    for (const p of prefills) labels.push(this.link(this.queue, this.nodes.get(p.id), into.get(p.id) ?? 0, most, "prefill", 0.72));
    for (const [i, p] of prefills.entries()) for (const [j, d] of decodes.entries()) { // labels of lines that cross lie apart
      labels.push(this.link(this.nodes.get(p.id), this.nodes.get(d.id), pairs.get(`${p.id}\n${d.id}`) ?? 0, most, "handoff", i === j ? 0.75 : 0.32));
    }
    for (const d of decodes) labels.push(this.link(this.nodes.get(d.id), this.clients, outOf.get(d.id) ?? 0, most, "decode", 0.28));
    return labels;
  }

  /** Returns the rate as a label to place on the line. Dots run along it to where requests go. */
  link(source, target, rate, most, kind, at) {
    const base = this.root.getBoundingClientRect(), a = source.getBoundingClientRect(), b = target.getBoundingClientRect();
    const [x1, y1, x2, y2] = [a.right - base.left + 3, (a.top + a.bottom) / 2 - base.top, b.left - base.left - 3, (b.top + b.bottom) / 2 - base.top];
    const middle = (x1 + x2) / 2;
    const path = shape("path", { d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, class: rate ? kind : "idle",
      "stroke-width": rate ? 1.5 + (4.5 * rate) / most : 1, "stroke-opacity": rate ? 0.75 : 1 });
    this.svg.append(path);
    if (!rate) return null;
    const dots = shape("path", { d: path.getAttribute("d"), class: "dots" });
    dots.style.animationDelay = `${-(performance.now() % DOTS_MS)}ms`; // drawn anew every second, they go on where they were
    this.svg.append(dots);
    return { path, words: `${count(rate)}/s`, kind, at };
  }
}

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

function card(kind, title, number, words) {
  return el("div", { class: `node ${kind}` }, el("div", { class: "head" }, el("b", {}, title)), el("div", { class: "big" }, count(number)),
    el("div", { class: "sub", title: words }, words));
}

function adaptersOf({ num_adapters: num = 0, adapters: names = [] }) {
  const title = names.join(", ") + (num > names.length ? " ..." : "");
  return num ? el("div", { class: "sub", title }, `${count(num)} adapter${num === 1 ? "" : "s"}`) : null;
}

function workerCard(worker) {
  const [used, leased, cached, free, total] = worker.blocks;
  const parts = [["used", used], ["leased", leased], ["cached", cached], ["free", free]];
  const sum = Math.max(1, used + leased + cached + free);
  const say = `KV blocks: ${parts.map(([name, n]) => `${count(n)} ${name}`).join(", ")} of ${count(total)}`;
  const gpu = worker.gauges.gpu_utilization_ratio === undefined ? null : el("div", { class: "sub" }, gpuWords(worker.gauges));
  const tokens = worker.role === "prefill" ? `${count(worker.waiting_tokens)} prompt tokens waiting` : `${count(worker.counters.preemptions ?? 0)} preemptions`;
  const busy = worker.busy === null ? [] : [el("span", { class: "sub" }, "busy"),
    el("div", { class: "kvbar" }, el("i", { class: `busy ${worker.role}`, style: { width: percent(worker.busy) } })), el("span", { class: "num" }, percent(worker.busy))];
  return el("div", { class: `node ${worker.role}`, title: `${say}; pid ${worker.pid} on ${worker.host}` },
    el("div", { class: "head" }, el("b", {}, worker.id), worker.draining ? el("span", { class: "badge" }, "draining") : el("span", { class: "sub" }, worker.host)),
    el("div", { class: "bars" }, ...busy, el("span", { class: "sub" }, "KV"),
      el("div", { class: "kvbar", role: "img", "aria-label": say }, ...parts.map(([name, n]) => el("i", { class: `kv ${name}`, style: { width: `${(100 * n) / sum}%` } }))),
      el("span", { class: "num" }, percent(used / Math.max(1, total)))),
    el("div", { class: "sub" }, `${count(worker.running)} running, ${count(worker.waiting)} waiting, ${tokens}`), gpu, adaptersOf(worker));
}

/** What the GPU has told of itself. */
function gpuWords(gauges) {
  const parts = [["gpu_utilization_ratio", percent], ["gpu_power_watts", (w) => `${Math.round(w)} W`], ["gpu_temperature_celsius", (c) => `${c} °C`],
    ["gpu_memory_used_bytes", (b) => `${(b / 2 ** 30).toFixed(1)} GiB`]];
  return `GPU ${parts.filter(([name]) => gauges[name] !== undefined).map(([name, say]) => say(gauges[name])).join(", ")}`;
}
