// /docs: shows /openapi.json. Everything it shows is set as text.

import { $, el, words } from "./dom.js";

const nameOf = (reference) => reference.split("/").pop();

/** A schema as nodes: `string, 1 to 64 characters`, `list of` ..., or a link to a named one. */
function kind(schema) {
  if (schema === true || !Object.keys(schema ?? {}).length) return ["anything"];
  if (schema.$ref) return [el("a", { href: `#schema-${nameOf(schema.$ref)}` }, nameOf(schema.$ref))];
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" | ")];
  const several = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (several) return joined(several.map(kind), " or ");
  if (schema.type === "array") return ["list of ", ...kind(schema.items)];
  const types = [schema.type].flat().filter(Boolean).join(" or ") || "object";
  return [types + bounds(schema)];
}

function bounds(schema) {
  const low = schema.minimum ?? schema.minLength ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.maxLength ?? schema.exclusiveMaximum;
  const unit = schema.type === "string" ? " characters" : "";
  if (low === undefined && high === undefined) return "";
  if (high === undefined) return `, from ${low}${unit}`;
  return low === undefined ? `, up to ${high}${unit}` : `, ${low} to ${high}${unit}`;
}

function joined(parts, between) {
  return parts.flatMap((nodes, i) => (i ? [between, ...nodes] : nodes));
}

/** The fields of an object, one a row; of anything else its kind. */
function fields(schema) {
  const names = Object.keys(schema.properties ?? {});
  if (!names.length) return el("p", {}, ...kind(schema));
  const required = new Set(schema.required ?? []);
  return el("table", {}, el("tbody", {}, ...names.map((name) => {
    const field = schema.properties[name];
    const note = [required.has(name) ? "needed" : "", field.description ?? ""].filter(Boolean).join(". ");
    return el("tr", {}, el("td", {}, name), el("td", {}, ...kind(field)), el("td", {}, note));
  })));
}

function operation(path, method, described, shared) {
  const within = el("div", { class: "within" });
  const parameters = [...shared, ...(described.parameters ?? [])];
  if (parameters.length) within.append(el("h3", {}, "Parameters"), el("table", {}, el("tbody", {}, ...parameters.map((one) =>
    el("tr", {}, el("td", {}, one.name), el("td", {}, ...kind(one.schema)), el("td", {}, `in the ${one.in}`))))));
  for (const [media, body] of Object.entries(described.requestBody?.content ?? {})) {
    within.append(el("h3", {}, `Body, ${media}`), fields(body.schema));
  }
  within.append(el("h3", {}, "Answers"), el("table", {}, el("tbody", {}, ...Object.entries(described.responses).map(([status, answer]) => {
    const content = Object.entries(answer.content ?? {}).map(([media, body]) => [`${media} `, ...(body.schema ? kind(body.schema) : [])]);
    return el("tr", {}, el("td", {}, status), el("td", {}, ...joined(content, ", ")), el("td", {}, ...words(answer.description)));
  }))));
  return el("details", { "data-words": `${method} ${path} ${described.summary}`.toLowerCase() },
    el("summary", {}, el("b", { class: `method ${method}` }, method), el("code", {}, path), el("span", {}, ...words(described.summary))), within);
}

function show(api) {
  $("version").textContent = api.info.version;
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(methods)) {
      if (method !== "parameters") $("operations").append(operation(path, method, described, methods.parameters ?? []));
    }
  }
  for (const [name, schema] of Object.entries(api.components.schemas).sort()) {
    $("schemas").append(el("details", { id: `schema-${name}`, "data-words": name.toLowerCase() },
      el("summary", {}, el("code", {}, name), el("span", {}, schema.description ?? "")), el("div", { class: "within" }, fields(schema))));
  }
  openLinked();
}

/** Opens the schema that the address names. */
function openLinked() {
  const target = location.hash.startsWith("#schema-") ? $(location.hash.slice(1)) : null;
  if (!target) return;
  target.open = true;
  target.scrollIntoView();
}

$("filter").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  for (const row of document.querySelectorAll("[data-words]")) row.hidden = !row.dataset.words.includes(wanted);
});
addEventListener("hashchange", openLinked);
const theme = localStorage.getItem("splitserve-theme") ?? "auto";
if (theme !== "auto") document.documentElement.dataset.theme = theme;

try {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`The server answered ${response.status}.`);
  show(await response.json());
} catch (error) {
  $("notice").hidden = false;
  $("notice").textContent = `The description of the API could not be read: ${error.message}`;
}
