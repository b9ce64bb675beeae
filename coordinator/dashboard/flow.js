// Who is here, how full they are, and how requests pass between them.

import { $, el, count, percent } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_LABELLED = 8; // with more workers, rates would stand on each other
const DOTS_MS = 800; // as in panels.css
const DENSE = 6; // so many in one lane are shown as bars alone

export class Flow {
  constructor() {
    this.root = $("flow-body");
    new ResizeObserver(() => this.state && this.draw()).observe(this.root);
  }

  show(state) {
    state.workers.sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
    this.state = state;
    const prefills = state.workers.filter((worker) => worker.role === "prefill");
    const decodes = state.workers.filter((worker) => worker.role === "decode");
    const rate = state.flows.reduce((sum, [, , r]) => sum + r, 0);
    this.queue = card("queue", "Queue", state.stages.queue ?? 0, "requests wait for a worker with room");
    this.clients = card("clients", "Clients", (state.stages.decode ?? 0) + (state.stages.handoff ?? 0), `streams open, ${count(rate)} answered a second`);
    this.nodes = new Map();
    this.root.replaceChildren(
      el("div", { class: "lane" }, this.queue),
      this.lane("prefill", prefills), this.lane("decode", decodes),
      el("div", { class: "lane" }, this.clients),
    );
    this.draw();
  }

  lane(role, workers) {
    const none = el("p", { class: "empty" }, `No ${role} worker is here. Start one on any host: `, el("code", {}, `splitserve ${role} --coordinator tcp://HOST:7700`));
    const cards = workers.map((worker) => {
      const node = workerCard(worker);
      this.nodes.set(worker.id, node);
      return node;
    });
    return el("div", { class: workers.length > DENSE ? "lane dense" : "lane", role: "group", "aria-label": `${role} workers` }, el("h3", {}, role), ...(cards.length ? cards : [none]));
  }

  /** The lines: as wide as requests a second; thin and grey where nothing has passed. */
  draw() {
    this.svg?.remove();
    this.svg = shape("svg", { "aria-hidden": "true" });
    this.root.prepend(this.svg);
    const into = new Map(), outOf = new Map(), pairs = new Map();
    for (const [prefill, decode, rate] of this.state.flows) {
      into.set(prefill, (into.get(prefill) ?? 0) + rate);
      outOf.set(decode, (outOf.get(decode) ?? 0) + rate);
      pairs.set(`${prefill}\n${decode}`, rate);
    }
    const prefills = this.state.workers.filter((w) => w.role === "prefill"), decodes = this.state.workers.filter((w) => w.role === "decode");
    const most = Math.max(1e-9, ...into.values(), ...outOf.values());
    const labels = [];
    for (const p of prefills) labels.push(this.link(this.queue, this.nodes.get(p.id), into.get(p.id) ?? 0, most, "prefill", 0.72));
    for (const [i, p] of prefills.entries()) for (const [j, d] of decodes.entries()) { // labels of lines that cross lie apart
      labels.push(this.link(this.nodes.get(p.id), this.nodes.get(d.id), pairs.get(`${p.id}\n${d.id}`) ?? 0, most, "handoff", i === j ? 0.75 : 0.32));
    }
    for (const d of decodes) labels.push(this.link(this.nodes.get(d.id), this.clients, outOf.get(d.id) ?? 0, most, "decode", 0.28));
    if (this.state.workers.length <= MAX_LABELLED) this.svg.append(...labels.filter(Boolean));
  }

  /** Returns the rate as a label on the line, `at` this share of the way. Dots run along it to where requests go. */
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
    const there = path.getPointAtLength(at * path.getTotalLength()), words = `${count(rate)}/s`;
    const [width, height] = [6.4 * words.length + 8, 17];
    const ground = shape("rect", { x: there.x - width / 2, y: there.y - height / 2, width, height, rx: 4, class: kind });
    const label = shape("text", { x: there.x, y: there.y + 4 });
    label.textContent = words;
    const both = shape("g", {});
    both.append(ground, label);
    return both;
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

function workerCard(worker) {
  const [used, leased, cached, free, total] = worker.blocks;
  const parts = [["used", used], ["leased", leased], ["cached", cached], ["free", free]];
  const sum = Math.max(1, used + leased + cached + free);
  const say = `KV blocks: ${parts.map(([name, n]) => `${count(n)} ${name}`).join(", ")} of ${count(total)}`;
  const gpu = worker.gauges.gpu_utilization_ratio === undefined ? null : el("div", { class: "sub" }, gpuWords(worker.gauges));
  const tokens = worker.role === "prefill" ? `${count(worker.waiting_tokens)} prompt tokens waiting` : `${count(worker.counters.preemptions ?? 0)} preemptions`;
  return el("div", { class: `node ${worker.role}`, title: `${say}; pid ${worker.pid} on ${worker.host}` },
    el("div", { class: "head" }, el("b", {}, worker.id), worker.draining ? el("span", { class: "badge" }, "draining") : el("span", { class: "sub" }, `KV ${Math.round((100 * used) / Math.max(1, total))}%`)),
    el("div", { class: "kvbar", role: "img", "aria-label": say }, ...parts.map(([name, n]) => el("i", { class: `kv ${name}`, style: { width: `${(100 * n) / sum}%` } }))),
    el("div", { class: "sub" }, `${count(worker.running)} running, ${count(worker.waiting)} waiting, ${tokens}`), gpu);
}

/** What the GPU has told of itself. */
function gpuWords(gauges) {
  const parts = [["gpu_utilization_ratio", percent], ["gpu_power_watts", (w) => `${Math.round(w)} W`], ["gpu_temperature_celsius", (c) => `${c} °C`],
    ["gpu_memory_used_bytes", (b) => `${(b / 2 ** 30).toFixed(1)} GiB`]];
  return `GPU ${parts.filter(([name]) => gauges[name] !== undefined).map(([name, say]) => say(gauges[name])).join(", ")}`;
}
