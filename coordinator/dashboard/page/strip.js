// Many workers of one role as a heat strip: a cell each, as strong in colour as it is busy, with its KV use as a line below.

import { count, el, percent } from "./dom.js";

export class Strip {
  /** `detail(worker)`: elements that say all about one. */
  constructor(role, detail) {
    this.detail = detail;
    this.chosen = null;
    this.workers = [];
    this.head = el("p", { class: "sub" });
    this.cells = el("div", { class: `cells ${role}`, role: "listbox", tabindex: "0", "aria-label": `${role} workers; arrow keys choose one`,
      onkeydown: (event) => this.key(event), onclick: (event) => this.choose(event.target.closest("[data-id]")?.dataset.id) });
    this.about = el("div", { class: "about", "aria-live": "polite" });
    this.root = el("div", { class: "strip" }, this.head, this.cells, this.about);
    this.role = role;
  }

  show(workers) {
    this.workers = workers;
    const busy = workers.map((w) => w.busy).filter((b) => b !== null).sort((a, b) => a - b);
    const used = workers.reduce((sum, w) => sum + w.blocks[0], 0) / Math.max(1, workers.reduce((sum, w) => sum + w.blocks[4], 0));
    const draining = workers.filter((w) => w.draining).length;
    const middle = busy.length ? `busy ${percent(busy[busy.length >> 1])} (${percent(busy[0])} to ${percent(busy.at(-1))})` : "busy share not known";
    this.head.textContent = `${count(workers.length)} workers, ${middle}, KV ${percent(used)}, ${count(workers.reduce((sum, w) => sum + w.running, 0))} running` +
      (draining ? `, ${draining} draining` : "");
    this.cells.replaceChildren(...workers.map((w, i) => this.cell(w, i)));
    this.choose(this.chosen);
  }

  cell(worker, i) {
    const kv = worker.blocks[0] / Math.max(1, worker.blocks[4]);
    const label = `${worker.id}, busy ${percent(worker.busy)}, KV ${percent(kv)}${worker.draining ? ", draining" : ""}`;
    return el("div", { role: "option", id: `${this.role}-cell-${i}`, "data-id": worker.id, title: label, "aria-label": label, "aria-selected": "false", class: worker.draining ? "draining" : undefined },
      el("i", { class: "heat", style: { opacity: String((worker.busy ?? 0) ** 1.5) } }), el("i", { class: "level", style: { width: percent(kv) } }));
  }

  choose(id) {
    const worker = this.workers.find((w) => w.id === id);
    this.chosen = worker?.id ?? null;
    this.cells.removeAttribute("aria-activedescendant");
    for (const cell of this.cells.children) {
      const on = cell.dataset.id === this.chosen;
      cell.setAttribute("aria-selected", String(on));
      if (on) this.cells.setAttribute("aria-activedescendant", cell.id);
    }
    this.about.replaceChildren(...(worker ? [this.detail(worker)] : []));
  }

  key(event) {
    const at = this.workers.findIndex((w) => w.id === this.chosen), last = this.workers.length - 1;
    const row = Math.max(1, [...this.cells.children].filter((cell) => cell.offsetTop === this.cells.firstElementChild?.offsetTop).length);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - row, ArrowDown: at < 0 ? 0 : at + row, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.choose(this.workers[Math.max(0, Math.min(last, to))].id);
  }
}
