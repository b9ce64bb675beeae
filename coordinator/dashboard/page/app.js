// Puts the page together: the feed on one side, what shows it on the other, and the keys.

import { $, count, el, percent, seconds, words } from "./dom.js";
import { Charts } from "./charts.js";
import { Feed } from "./feed.js";
import { Flow } from "./flow.js";
import { Gantt } from "./gantt.js";
import { Playground } from "./playground.js";
import { Trouble } from "./trouble.js";
import { Verdict } from "./verdict.js";

const THEMES = ["auto", "light", "dark"];
const RECENT_POINTS = 30; // a minute, as the window's

const charts = new Charts(), flow = new Flow(), gantt = new Gantt(), trouble = new Trouble();
new Playground();
const feed = new Feed(show, unheard);
const verdict = new Verdict((text) => { feed.objectives = text; });

function show(state, history) {
  $("notice").hidden = $("unlock").hidden = true;
  delete document.body.dataset.locked;
  if ($("model").dataset.shown !== `${state.model}\n${state.models}`) models(state);
  status(state.ready ? "ready" : "waiting", state.ready ? `ready, up ${age(state.uptime_s)}` : "not ready");
  verdict.show(state);
  tiles(state, history);
  flow.show(state);
  trouble.show(state);
  charts.show(history.points, state.stage_names);
  gantt.show(history.requests, state.stage_names);
  tenants(state.tenants);
  steering(state.steering);
}

/** The model's name; of several each is a link to its page. */
function models({ model, models }) {
  const name = (each) => (each === model ? el("b", {}, each) : el("a", { href: `?model=${encodeURIComponent(each)}` }, each));
  $("model").replaceChildren(...(models.length > 1 ? models.map(name) : [model]));
  $("model").dataset.shown = `${model}\n${models}`;
}

function unheard(kind, text) {
  if (kind === "denied") document.body.dataset.locked = "";
  status("lost", kind === "denied" ? "locked" : "no answer");
  $("unlock").hidden = kind !== "denied";
  notice(text);
}

function status(state, words) {
  $("status").dataset.state = state;
  $("status").lastElementChild.textContent = words;
}

function notice(text) {
  if ($("notice").textContent !== text.replaceAll("`", "")) $("notice").replaceChildren(el("span", {}, ...words(text)));
  $("notice").hidden = !text;
}

function tiles(state, history) {
  const recent = history.points.slice(-RECENT_POINTS);
  const mean = (key) => (recent.length ? recent.reduce((sum, p) => sum + p[key], 0) / recent.length : null);
  const [prompt, cached] = [mean("prompt"), mean("cached")];
  const latency = (label, key) => [label, seconds(state.window[key]?.[0]), `median; p95 ${seconds(state.window[key]?.[1])}`];
  const { kept, goodput } = state.window, { cost } = state;
  const price = cost.cost_per_million_tokens;
  const rows = [
    ["Requests a second", count(mean("requests")), `${count(state.num_requests)} in all`],
    ["Output tokens a second", count(mean("output")), `${count(prompt)} prompt, ${percent(prompt ? cached / prompt : 0)} cached`],
    latency("Time to first token", "ttft"),
    latency("Time per output token", "tpot"),
    latency("End to end", "e2e"),
    ["Goodput", percent(kept), kept === null ? state.window.objectives ? "no request to judge" : "no objectives are set" : `${goodput} good requests/s`],
    ["In flight", count(state.waiting + state.running), `${count(state.waiting)} wait, ${count(state.stages.prefill ?? 0)} prefill, ${count((state.stages.handoff ?? 0) + (state.stages.decode ?? 0))} decode`],
    ["Cost", price === undefined ? "–" : money(price), cost.total === undefined ? "set --price-per-hour" : `per M tokens; ${money(cost.total)} so far`],
  ];
  $("tiles").replaceChildren(...rows.map(([label, number, words]) =>
    el("div", { class: "tile" }, el("span", {}, label), el("b", {}, number), el("span", { title: words }, words))));
}

const money = (amount) => (amount >= 100 ? count(amount) : amount >= 0.01 || !amount ? amount.toFixed(2) : amount.toPrecision(1));

/** Without API keys there is nothing to show. */
function tenants(rows) {
  $("tenants").hidden = $("tenants-link").hidden = !rows.length;
  $("tenants").parentElement.classList.toggle("single", !rows.length);
  const tokens = (row) => row.prompt_tokens + row.output_tokens;
  const most = Math.max(1, ...rows.map(tokens));
  const body = rows.sort((a, b) => tokens(b) - tokens(a)).slice(0, 20).map((row) => el("tr", {},
    el("td", { title: row.tenant }, row.tenant, el("span", { class: "share", style: { width: `${(100 * tokens(row)) / most}%` } })),
    ...[row.requests, row.prompt_tokens, row.cached_tokens, row.output_tokens].map((n) => el("td", {}, count(n)))));
  const head = ["Tenant", "Requests", "Prompt tokens", "Cached", "Output tokens"].map((name) => el("th", { scope: "col" }, name));
  $("tenants-body").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}

/** What the pool controller sees, and its decisions, newest first. */
function steering(told) {
  $("steering").hidden = !told;
  if (!told) return;
  const load = told.load ? `load ${percent(told.load.prefill)} prefill, ${percent(told.load.decode)} decode` : "no prediction";
  $("steering-mode").textContent = `${told.mode}; ${load}; 100% just meets the objectives`;
  $("steering-state").textContent = told.state;
  const words = { flip: "change role", scale_up: "one more", scale_down: "one fewer", hold: "roles stay" };
  const body = told.decisions.slice(0, 20).map((one) => el("tr", {},
    el("td", {}, `${age(one.ago_s)} ago`), el("td", {}, words[one.kind]), el("td", {}, one.worker), el("td", {}, one.role), el("td", {}, one.reason)));
  const head = ["When", "What", "Worker", "Role", "Why"].map((name) => el("th", { scope: "col" }, name));
  $("steering-body").replaceChildren(body.length
    ? el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))
    : el("p", { class: "empty" }, "It has decided nothing yet."));
}

function age(s) {
  const [d, h, m] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min` : `${Math.floor(s)} s`;
}

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("splitserve-theme", name);
  $("theme").textContent = `Theme: ${name}`;
  charts.recolour();
}

const nextTheme = () => theme(THEMES[(THEMES.indexOf(localStorage.getItem("splitserve-theme") ?? "auto") + 1) % THEMES.length]);
const KEYS = { t: nextTheme, p: () => $("chat-input").focus(), " ": () => gantt.hold(!gantt.held), c: () => gantt.copyChosen(), "?": () => $("keys").showModal() };

document.addEventListener("keydown", (event) => {
  const writes = event.target.matches("input, textarea");
  if (event.key === "Escape" && writes) event.target.blur();
  const act = KEYS[event.key];
  if (!act || writes || event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (event.key === " " && event.target.matches("button, a, summary")) return;
  event.preventDefault();
  act();
});
$("theme").addEventListener("click", nextTheme);
$("help").addEventListener("click", () => $("keys").showModal());
$("unlock").addEventListener("submit", (event) => { event.preventDefault(); feed.login($("admin-key").value); $("admin-key").value = ""; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.recolour());
const chosen = new URLSearchParams(location.search).get("theme") ?? localStorage.getItem("splitserve-theme");
theme(THEMES.includes(chosen) ? chosen : "auto");
feed.ask();
