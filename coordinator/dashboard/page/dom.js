// Building elements, and numbers as people read them. Text is only ever set as text: nothing that comes from outside is parsed as HTML.

/** An element: attributes, `style` as an object, `class`, listeners as on…; children are elements or text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The model that this page is about, by its address; null: the first. */
export const MODEL = new URLSearchParams(location.search).get("model");

export const $ = (id) => document.getElementById(id);

/** The classes that colour a stage; one that the style sheet does not know has a colour too. */
export const stageClass = (stage) => `stage s-${stage}`;

/** Puts text on the clipboard; says on the button whether that worked. Pages over plain HTTP have no clipboard but the old one. */
export async function copy(text, button) {
  const before = button.dataset.label ??= button.textContent;
  const done = await write(text);
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = before; }, 1500);
}

async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = document.body.appendChild(el("textarea", { class: "offscreen", "aria-hidden": "true" }, text));
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** Text in which what stands between backquotes is a command. */
export const words = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

export const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.1) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1e3)} ms`;
  return s < 100 ? `${s.toFixed(2)} s` : `${Math.round(s)} s`;
}

export function count(n) {
  if (n === null || n === undefined) return "–";
  if (n >= 1e7) return `${(n / 1e6).toFixed(1)}M`;
  if (n >= 1e5) return `${Math.round(n / 1e3)}k`;
  return n >= 100 || Number.isInteger(n) ? Math.round(n).toLocaleString("en-US") : n.toFixed(1);
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)}%`);

/** A row of buttons of which one is chosen; arrow keys move between them, as in every radio group. */
export function choice(root, options, chosen, onChange) {
  const buttons = options.map(([value, label]) =>
    el("button", { type: "button", role: "radio", onclick: () => choose(value), "data-value": value }, label));
  function choose(value) {
    for (const button of buttons) {
      const on = button.dataset.value === String(value);
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on ? 0 : -1;
    }
    onChange(value);
  }
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  root.replaceChildren(...buttons);
  choose(chosen);
}

/** Where time went: a bar and its numbers. `parts`: [stage, seconds] in order; `share`: with each one's part of the whole. */
export function stageBar(parts, share = false) {
  const total = parts.reduce((sum, [, s]) => sum + s, 0) || 1;
  return [
    el("div", { class: "stagebar", "aria-hidden": "true" },
      ...parts.map(([stage, s]) => el("i", { class: stageClass(stage), style: { width: `${(100 * s) / total}%` } }))),
    el("div", { class: "facts" },
      ...parts.map(([stage, s]) => el("span", {}, el("i", { class: stageClass(stage) }), `${stage} `, el("b", {}, share ? `${percent(s / total)} ` : seconds(s)), share ? seconds(s) : null))),
  ];
}
