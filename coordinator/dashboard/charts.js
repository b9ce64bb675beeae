// Six small charts over one time axis (uPlot), with one cursor for all of them.

import { $, el, count, percent, seconds, choice } from "./dom.js";

const QUANTILES = ["p50", "p95", "p99"];
const quantiles = (key) => QUANTILES.map((name, i) => ({ label: name, colour: `--${name}`, of: (p) => p[key]?.[i] ?? null }));
const CHARTS = [
  { title: "Time to first token", unit: seconds, series: quantiles("ttft") },
  { title: "Time per output token", unit: seconds, series: quantiles("tpot") },
  { title: "End to end", unit: seconds, series: quantiles("e2e") },
  { title: "Tokens a second", unit: count, series: [
    { label: "output", colour: "--decode", of: (p) => p.output }, { label: "prompt", colour: "--prefill", of: (p) => p.prompt },
    { label: "of it cached", colour: "--parse", of: (p) => p.cached }] },
  { title: "Requests", unit: count, series: [
    { label: "waiting", colour: "--queue", of: (p) => p.waiting }, { label: "running", colour: "--decode", of: (p) => p.running },
    { label: "ended a second", colour: "--parse", of: (p) => p.requests }, { label: "429 and 5xx", colour: "--bad", of: (p) => p.errors }] },
  { title: "KV blocks in use", unit: percent, top: 1, series: [
    { label: "prefill", colour: "--prefill", of: (p) => p.kv_prefill }, { label: "decode", colour: "--decode", of: (p) => p.kv_decode }] },
];
const AXIS_FONT = "11px system-ui, 'DejaVu Sans', sans-serif";

export class Charts {
  constructor() {
    this.points = [];
    this.minutes = 5;
    this.charts = CHARTS.map((spec) => new Chart(spec));
    $("charts").replaceChildren(...this.charts.map((chart) => chart.root));
    choice($("range"), [[2, "2 min"], [5, "5 min"], [15, "15 min"]], 5, (minutes) => {
      this.minutes = Number(minutes);
      this.show(this.points);
    });
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe($("charts"));
  }

  /** After a change of theme: canvases know no CSS. */
  recolour() {
    this.charts.forEach((chart) => chart.clear());
    this.show(this.points);
  }

  show(points) {
    this.points = points;
    const newest = points.at(-1)?.t ?? Date.now() / 1000;
    const from = Math.max(newest - 60 * this.minutes, Math.min(points[0]?.t ?? 0, newest - 30));
    const shown = points.filter((point) => point.t >= from);
    this.charts.forEach((chart) => chart.show(shown, from, newest));
  }
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.values = spec.series.map((series) => el("span", {}));
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event), onblur: () => this.point(null) });
    this.root = el("div", { class: "chart" }, el("h3", {}, spec.title), el("p", { class: "values" }, ...this.values), this.plot);
    this.data = [[], ...spec.series.map(() => [])];
  }

  show(points, from, to) {
    this.range = [from, to];
    this.data = [points.map((p) => p.t), ...this.spec.series.map((series) => points.map(series.of))];
    if (!this.uplot) this.uplot = this.make();
    this.uplot.setData(this.data);
    this.read(this.uplot.cursor.idx);
  }

  clear() {
    this.uplot?.destroy();
    this.uplot = undefined;
  }

  resize() {
    this.uplot?.setSize({ width: this.plot.clientWidth, height: 150 });
  }

  make() {
    const { spec } = this;
    const axis = { stroke: colour("--muted"), font: AXIS_FONT, grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    return new uPlot({
      width: this.plot.clientWidth || 320,
      height: 150,
      legend: { show: false },
      padding: [8, 4, 0, 0],
      cursor: { sync: { key: "splitserve" }, y: false, points: { size: 5 }, drag: { x: false, y: false } },
      hooks: { setCursor: [(u) => this.read(u.cursor.idx)] },
      scales: { x: { range: () => this.range }, y: { range: (u, low, high) => [0, spec.top ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 22, space: 70, values: (u, ticks) => ticks.map(clock) },
        { ...axis, size: 54, space: 32, values: (u, ticks) => ticks.map((tick) => (tick === 0 ? "0" : spec.unit(tick))) },
      ],
      series: [{}, ...spec.series.map((series) => ({
        stroke: colour(series.colour), width: 1.5, points: { show: true, size: 4, fill: colour(series.colour), filter: lonely },
      }))],
    }, this.data, this.plot);
  }

  /** Values at the cursor; without one, the newest. */
  read(index) {
    const at = index ?? this.data[0].length - 1;
    this.spec.series.forEach((series, i) => {
      const value = this.data[i + 1][at];
      this.values[i].replaceChildren(el("i", { style: { background: `var(${series.colour})` } }), `${series.label} ${this.spec.unit(value)}`);
    });
    const words = this.spec.series.map((series, i) => `${series.label} ${this.spec.unit(this.data[i + 1][at])}`);
    const when = this.data[0][at] ? ` at ${clock(this.data[0][at])}` : "";
    this.plot.setAttribute("aria-label", `${this.spec.title}${when}: ${words.join(", ")}`);
  }

  key(event) {
    const last = this.data[0].length - 1;
    const now = this.uplot?.cursor.idx ?? last;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(last, to)));
  }

  /** Puts the cursor of all charts on this point of time; null: nowhere. */
  point(index) {
    if (!this.uplot) return;
    const left = index === null ? -10 : this.uplot.valToPos(this.data[0][index], "x");
    this.uplot.setCursor({ left, top: index === null ? -10 : 10 });
  }
}

/** Points that no line meets would not be seen. */
function lonely(u, seriesIndex) {
  const values = u.data[seriesIndex];
  const found = [];
  for (let i = 0; i < values.length; i++) if (values[i] != null && values[i - 1] == null && values[i + 1] == null) found.push(i);
  return found;
}

const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");

/** A colour of the style sheet, as canvases take it. */
function colour(name) {
  const probe = el("i", { style: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
