"use strict";
// What every part of the page uses: the data, elements, text that may be hostile, numbers, and where the reader is.
// Strings of the data become text nodes or attributes that cannot run (el below); nothing here ever parses HTML.

const contents = JSON.parse(document.getElementById("contents").textContent);
const { run, groups, clusters, images, tree, live } = contents;
// Without groups every cluster is its own, and the page shows clusters alone.
const hasGroups = run.has_groups;
const labelNames = contents.label_names || [];
const hasLabels = contents.label_names !== null && clusters.some((cluster) => cluster.label >= 0);

// ---------------------------------------------------------------------------------------------------------- text

// Control and format characters could reorder or hide text. They are shown by name instead. The two joiners are left:
// emoji and several scripts need them, and they cannot reorder anything.
const UNSEEN = /(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;

function visible(text) {
  return String(text).replace(UNSEEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    if (code >= 0xdc80 && code <= 0xdcff) return `\\x${(code - 0xdc00).toString(16)}`; // a byte that was not UTF-8
    return `\u2039U+${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
  });
}

/** An element that holds a string of the data, kept apart from the direction of the text around it. */
function named(text, className = "") {
  return el(`bdi.${className}`, visible(text));
}

const labelName = (label) => labelNames[label] ?? "no label";

/** The name of the most common label, or an empty element where there is none. */
function majority(label, className = "") {
  return hasLabels && label >= 0 ? named(labelName(label), className) : span(className);
}

/** The most common label and its share, to put after the name of a cluster. */
function majorityWords({ label, purity }) {
  return hasLabels && label >= 0 ? `, ${percent(purity)} ${labelName(label)}` : "";
}

/** The name that a person gave to the group that most images of a cluster are in, or an empty text. */
const givenName = (index) => groups[clusters[index]?.group]?.name ?? "";

/** What a group is called: as a person has named it, or by its number. */
const groupName = (group) => groups[group].name || `Group ${group}`;

/** What a cluster is called: where there is one level, the name of its group is its own. */
const clusterName = (index) => (hasGroups || !givenName(index) ? `Cluster ${index}` : givenName(index));

// ------------------------------------------------------------------------------------------------------- elements

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "circle", "text"]);

/**
 * An element: el("p.note", {title: "..."}, ...children). The attributes may be left out; `on` holds listeners, `style`
 * properties. Children are elements or text; empty ones (null, false, "") are skipped.
 */
function el(tag, ...children) {
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  const [name, ...classes] = tag.split(/[. ]+/).filter(Boolean);
  const element = SVG_TAGS.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (key === "style") for (const [part, text] of Object.entries(value)) element.style.setProperty(part, text);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child || child === 0));
  return element;
}

const span = (className, ...children) => el(`span.${className}`, ...children);
const note = (...children) => el("p.note", ...children);
const dot = (i) => el("span.dot", { style: { background: colourOf(i) }, "aria-hidden": "true" });
const fact = (term, value) => el("div.fact", el("dt", term), el("dd", value));
const head = (title, ...more) => el("header.head", el("h1", title), ...more);
const field = (text, control, className = "") => el(`label.field ${className}`, el("span", text), control);

const announce = (text) => (document.getElementById("announcer").textContent = text);

function icon(path) {
  return el("svg.icon", { viewBox: "0 0 24 24", "aria-hidden": "true", focusable: "false" }, el("path", { d: path }));
}

/** A choice of a few, as radio buttons that look like one switch. */
function choice(legend, options, value, onChange) {
  const name = `choice-${choice.count++}`;
  const items = options.map(([key, text]) => {
    const on = { change: () => onChange(key) };
    return el("label", el("input", { type: "radio", name, value: key, checked: key === value, on }), el("span", text));
  });
  const group = el("fieldset.choice", el("legend.unseen", legend), ...items);
  group.set = (key) => group.querySelectorAll("input").forEach((input) => (input.checked = input.value === key));
  return group;
}
choice.count = 0;

/** A select over [value, text] pairs; the texts may be hostile. */
function picker(pairs, value, onChange) {
  const select = el("select", { on: { change: () => onChange(select.value) } });
  for (const [key, text] of pairs) select.append(el("option", { value: key, dir: "auto" }, visible(text)));
  select.value = String(value);
  return select;
}

function button(text, onClick, attributes = {}) {
  return el("button", { type: "button", ...attributes, on: { click: onClick } }, text);
}

/** A box to type a search in; it calls onType when the typing pauses. */
function searchBox(placeholder, wait, onType) {
  const on = { input: debounced(() => onType(), wait) };
  return el("input", { type: "search", placeholder, autocomplete: "off", spellcheck: "false", on });
}

/** Calls the action once nobody has asked for it for some milliseconds. */
function debounced(action, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, wait);
  };
}

/** Notes may name commands between back quotes. */
function withCode(text) {
  return visible(text).split("`").map((part, i) => (i % 2 ? el("code", part) : part));
}

// -------------------------------------------------------------------------------------------------------- numbers

const wholeNumber = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const DASH = "\u2013";

const count = (n) => (Number.isFinite(n) ? wholeNumber.format(n) : DASH);
const plural = (n, one) => `${count(n)}\u00a0${one}${n === 1 ? "" : "s"}`;
const percent = (share, digits = 0) => (Number.isFinite(share) ? `${(100 * share).toFixed(digits)}\u202f%` : DASH);
const countAndShare = (n, whole) => `${count(n)} \u00b7 ${percent(n / whole)}`;

/** A number with three significant digits. */
function figure(value, digits = 3) {
  if (!Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return count(value);
  if (size < 0.001) return value.toExponential(1);
  const decimals = size >= 1 ? Math.max(0, digits - 1 - Math.floor(Math.log10(size))) : digits;
  return value.toFixed(decimals).replace("-", "\u2212");
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return DASH;
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))}\u00a0s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)}\u00a0min`;
  const hours = seconds / 3600;
  return hours < 48 ? `${hours.toFixed(1)}\u00a0h` : `${(hours / 24).toFixed(1)}\u00a0days`;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const range = (n) => Array.from({ length: n }, (_, i) => i);
const sumOf = (pairs) => pairs.reduce((sum, [, n]) => sum + n, 0);

// --------------------------------------------------------------------------------------------------------- colour

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Red, green and blue of group i in the theme that is shown. Hues are a golden angle apart, so that they differ. */
function rgbOf(i) {
  if (i < 0) return isDark() ? [110, 116, 122] : [160, 160, 158];
  const turn = Math.floor(i / 12) % 3;
  const light = (isDark() ? [0.66, 0.74, 0.56] : [0.5, 0.4, 0.6])[turn];
  const strength = (isDark() ? [0.55, 0.4, 0.5] : [0.58, 0.45, 0.5])[turn];
  const h = ((30 + i * 137.50776) % 360) / 30;
  const part = (n) => {
    const k = (n + h) % 12;
    return Math.round(255 * (light - strength * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

const colourOf = (i) => `rgb(${rgbOf(i).join(" ")})`;
const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Whatever is drawn on a canvas is drawn again when the theme changes, and whatever shows a name when that does.
const themeWatchers = new Set();
const themeChanged = () => themeWatchers.forEach((watcher) => watcher());

/** Use the browser's storage. It may be forbidden, as for some pages from disk: then a choice lasts for this visit. */
function stored(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}

function setTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  stored((storage) => storage.setItem("siammm-theme", theme));
  themeChanged();
}

// ------------------------------------------------------------------------------------------------ where we are

// The address is #/section?key=value...; `cluster` opens that cluster over any section. So links, bookmarks and the
// back button all work.
const sections = new Map(); // id -> {title, icon, build(element)}; build may return update(params)

function where() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [first] = sections.keys();
  return { section: sections.has(path) ? path : first, params: new URLSearchParams(query) };
}

function address(section, params = {}) {
  const given = Object.entries(params).filter(([, value]) => (value ?? "") !== "");
  return `#/${section}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

/** Go to an address of this page; `replace` for steps that the back button should skip. */
function go(hash, { replace = false, state = null } = {}) {
  if (hash !== location.hash) history[replace ? "replaceState" : "pushState"](state, "", hash);
  show();
}

/** The address of where we are, with some of its parameters changed. */
function changed(changes) {
  const { section, params } = where();
  return address(section, { ...Object.fromEntries(params), ...changes });
}

const adjust = (changes, options) => go(changed(changes), options);

/** A link that opens a cluster. */
function clusterLink(className, index, ...children) {
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  return el(`a.${className}`, { href: changed({ cluster: index }), "data-cluster": index, ...attributes }, ...children);
}

function openCluster(index) {
  const inside = where().params.has("cluster");
  adjust({ cluster: index }, { replace: inside, state: inside ? history.state : { opened: true } });
}
