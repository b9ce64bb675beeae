// Small charts over one time axis (uPlot), with one cursor for all of them.

import { $, choice, clock, count, el, percent, seconds } from "./dom.js";

const QUANTILES = ["p50", "p95", "p99"];
/** The median is drawn last: where one request is all there was, the point has its colour. */
const quantiles = (key) => QUANTILES.map((name, i) => ({ label: name, colour: `--${name}`, of: (p) => p[key]?.[i] ?? null })).reverse();
const CHARTS = [
  { title: "Time to first token", unit: seconds, series: quantiles("ttft") },
  { title: "Time per output token", unit: seconds, series: quantiles("tpot") },
  { title: "End to end", unit: seconds, series: quantiles("e2e") },
  { title: "Tokens a second", unit: count, series: [
    { label: "of it cached", colour: "--parse", of: (p) => p.cached }, { label: "prompt", colour: "--prefill", of: (p) => p.prompt },
    { label: "output", colour: "--decode", of: (p) => p.output }] },
  { title: "Requests", unit: count, series: [
    { label: "429 and 5xx a second", colour: "--bad", of: (p) => p.errors }, { label: "ended a second", colour: "--parse", of: (p) => p.requests },
    { label: "running", colour: "--decode", of: (p) => p.running }, { label: "waiting", colour: "--queue", of: (p) => p.waiting }] },
  { title: "KV blocks in use", unit: percent, top: (high) => Math.min(1, Math.max(0.05, high * 1.25)), series: [
    { label: "decode", colour: "--decode", of: (p) => p.kv_decode }, { label: "prefill", colour: "--prefill", of: (p) => p.kv_prefill }] },
];
const SMOOTH = 5; // points over which shares of time are taken: ten seconds
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600];
const HALF_LABEL_PX = 28; // of the time axis: the last one has room to the right
const AXIS_FONT = "11px system-ui, 'DejaVu Sans', sans-serif";

export class Charts {
  constructor() {
    this.points = [];
    this.minutes = 5;
    this.stages = [];
    this.small = CHARTS.map((spec) => new Chart(spec));
    this.charts = this.small;
    $("charts").replaceChildren(...this.small.map((chart) => chart.root));
    choice($("range"), [[2, "2 min"], [5, "5 min"], [15, "15 min"]], 5, (minutes) => {
      this.minutes = Number(minutes);
      this.show(this.points, this.stages);
    });
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe($("charts").parentElement);
  }

  /** After a change of theme: canvases know no CSS. */
  recolour() {
    this.charts.forEach((chart) => chart.clear());
    this.show(this.points, this.stages);
  }

  show(points, stages) {
    if (stages.join() !== this.stages.join()) {
      const shares = new Chart(sharesOf(stages));
      $("time-chart").replaceChildren(shares.root);
      this.charts = [shares, ...this.small];
    }
    Object.assign(this, { points, stages });
    const any = points.some((p) => p.requests || p.waiting || p.running);
    $("charts").hidden = $("time-chart").hidden = !any;
    $("charts-empty").hidden = any;
    if (!any) return;
    const newest = points.at(-1)?.t ?? Date.now() / 1000;
    const from = Math.max(newest - 60 * this.minutes, Math.min(points[0]?.t ?? 0, newest - 30));
    const shown = withShares(points).filter((point) => point.t >= from);
    this.charts.forEach((chart) => chart.show(shown, from, newest));
  }
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.values = spec.series.map((series) => el("span", {}));
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (event) => this.key(event), onblur: () => this.point(null) });
    this.none = el("p", { class: "empty none" }, "nothing in this time");
    this.root = el("div", { class: "chart" }, el("h3", {}, spec.title), el("p", { class: "values" }, ...[...this.values].reverse()), el("div", { class: "ground" }, this.plot, this.none));
    this.data = [[], ...spec.series.map(() => [])];
  }

  show(points, from, to) {
    this.range = [from, to];
    this.points = points;
    this.data = [points.map((p) => p.t), ...this.spec.series.map((series) => points.map(series.of))];
    const empty = this.data.slice(1).every((values) => values.every((value) => value == null));
    this.none.hidden = !empty;
    this.plot.classList.toggle("blank", empty);
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
      padding: [8, HALF_LABEL_PX, 0, 0],
      cursor: { sync: { key: "splitserve" }, y: false, points: { size: 5 }, drag: { x: false, y: false } },
      hooks: { setCursor: [(u) => this.read(u.cursor.idx)] },
      scales: { x: { range: () => this.range }, y: { range: (u, low, high) => [0, spec.top?.(high ?? 0) ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 22, space: 70, incrs: STEPS_S, values: (u, ticks, i, space, step) => ticks.map((t) => (step < 60 ? clock(t) : clock(t).slice(0, 5))) },
        { ...axis, size: 54, space: 32, values: (u, ticks) => ticks.map((tick) => (tick === 0 ? "0" : spec.unit(tick).replace(/\.0+(?= )/, "").replace(/(\.\d*?)0+(?= )/, "$1"))) },
      ],
      series: [{}, ...spec.series.map((series) => ({
        stroke: colour(series.colour), width: spec.stacked ? 0 : 1.5, fill: spec.stacked ? colour(series.colour) : undefined, points: spec.stacked ? { show: false } : { show: true, size: 4, fill: colour(series.colour), filter: lonely },
      }))],
    }, this.data, this.plot);
  }

  /** Values at the cursor; without one, the newest that there are. */
  read(index) {
    const has = (at) => this.data.slice(1).some((values) => values[at] != null);
    let at = index ?? this.data[0].length - 1;
    if (index == null) while (at > 0 && !has(at)) at--;
    const values = this.spec.series.map((series, i) => (series.value ? series.value(this.points[at]) : this.data[i + 1][at]) ?? null);
    this.spec.series.forEach((series, i) => {
      this.values[i].replaceChildren(el("i", { style: { background: `var(${series.colour})` } }), `${series.label} ${this.spec.unit(values[i])}`);
    });
    const words = this.spec.series.map((series, i) => `${series.label} ${this.spec.unit(values[i])}`).reverse();
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

/** A stacked chart: each stage is drawn as the sum up to it, the last one first, so that those below it lie over it. */
function sharesOf(stages) {
  const series = stages.map((stage, i) => ({ label: stage, colour: known(stage), of: (p) => p.sums?.[i] ?? null, value: (p) => p && p.sums && p.sums[i] - (p.sums[i - 1] ?? 0) }));
  return { title: "Share of requests' time by stage", unit: percent, top: () => 1, stacked: true, series: series.reverse() };
}

/** Adds to each point the sums of shares up to each stage, over the last seconds; none where no request ended in them. */
function withShares(points) {
  return points.map((point, i) => {
    const near = points.slice(Math.max(0, i - SMOOTH + 1), i + 1);
    const stages = point.stages.map((_, stage) => near.reduce((sum, p) => sum + (p.stages[stage] ?? 0), 0));
    const total = stages.reduce((sum, s) => sum + s, 0);
    let upto = 0;
    return { ...point, sums: total ? stages.map((s) => (upto += s) / total) : null };
  });
}

const known = (stage) => (getComputedStyle(document.documentElement).getPropertyValue(`--${stage}`) ? `--${stage}` : "--other");

/** Points that no line meets would not be seen. */
function lonely(u, seriesIndex) {
  const values = u.data[seriesIndex];
  const found = [];
  for (let i = 0; i < values.length; i++) if (values[i] != null && values[i - 1] == null && values[i + 1] == null) found.push(i);
  return found;
}

/** A colour of the style sheet, as canvases take it. */
function colour(name) {
  const probe = el("i", { style: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
