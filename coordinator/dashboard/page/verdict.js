// What is in the way, in a sentence; where requests' time goes; and which objectives they keep.

import { $, el, percent, seconds, stageBar, words } from "./dom.js";

const MARKS = { good: "✓", idle: "–", unknown: "?", warn: "!", bad: "!" };
const LEVELS = { good: "All is well", idle: "Idle", unknown: "Too little data", warn: "Slow", bad: "Trouble" };
const KEY = "splitserve-slo";

export class Verdict {
  /** `onObjectives(text)`: the viewer's own, in the notation of --steer-slo; null: the operator's. */
  constructor(onObjectives) {
    this.announced = "";
    const saved = localStorage.getItem(KEY);
    if (saved !== null) onObjectives(saved);
    $("slo").addEventListener("submit", (event) => {
      event.preventDefault();
      const at = `@p${$("slo-percent").value || 90}`;
      const bounds = [["ttft", $("slo-ttft").value], ["tpot", $("slo-tpot").value]].filter(([, value]) => Number(value) > 0);
      this.save(bounds.map(([name, value]) => `${name}=${Number(value) / (name === "tpot" ? 1000 : 1)}${at}`).join(","), onObjectives);
    });
    $("slo").addEventListener("reset", () => this.save(null, onObjectives));
  }

  save(text, onObjectives) {
    if (text === null) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, text);
    $("slo").closest("details").open = false;
    onObjectives(text);
  }

  show(state) {
    const [first, ...others] = state.findings;
    $("verdict").dataset.level = first.level;
    $("verdict").replaceChildren(
      el("span", { class: "mark", "aria-hidden": "true" }, MARKS[first.level]),
      el("div", { class: "sentence" },
        el("p", { class: "what" }, el("span", { class: "offscreen" }, `${LEVELS[first.level]}: `), ...words(first.what)),
        first.remedy ? el("p", { class: "remedy" }, ...words(first.remedy)) : null,
        first.basis ? el("p", { class: "basis" }, `Estimated as ${first.basis}.`) : null,
        others.length ? el("ul", { class: "also" }, ...others.map((f) => el("li", { "data-level": f.level }, ...words(`${f.what} ${f.remedy}`.trim())))) : null));
    if (first.kind !== this.announced) $("announce").textContent = `${LEVELS[first.level]}: ${first.what}`; // not with each new number
    this.announced = first.kind;
    this.time(state.window, state.stage_names);
    this.objectives(state.window);
  }

  time(window, names) {
    const parts = names.map((name) => [name, window.stages[name] ?? 0]);
    $("time-note").textContent = window.requests ? `of ${window.requests.toLocaleString("en-US")} requests answered in the last minute; mean of each` : "";
    $("time-bar").replaceChildren(...(window.requests ? stageBar(parts, true) : [el("p", { class: "empty" }, "No request was answered in the last minute.")]));
  }

  objectives(window) {
    const bounds = window.objectives;
    const own = localStorage.getItem(KEY) !== null;
    const parts = [];
    if (bounds?.ttft_s != null) parts.push(`first token within ${seconds(bounds.ttft_s)}`);
    for (const [name, s] of bounds && bounds.ttft_s == null ? Object.entries(bounds.ttft_by_class) : []) parts.push(`${name}: first token within ${seconds(s)}`);
    if (bounds?.tpot_s != null) parts.push(`${seconds(bounds.tpot_s)} per token`);
    const rule = parts.length ? `${parts.join(", ")}, for ${percent(bounds.attainment)} of requests` : "none";
    const kept = window.kept === null ? "" : `; kept by ${percent(window.kept)}: ${window.goodput} good requests a second`;
    $("slo-state").textContent = `Objectives${own ? " (yours)" : ""}: ${rule}${kept}`;
    $("slo-state").dataset.level = window.kept === null ? "" : window.kept >= bounds.attainment ? "good" : "warn";
  }
}
