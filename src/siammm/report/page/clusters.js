"use strict";
// The clusters: a grid to search and sort, and the view of one.

const ORDERS = {
  size: ["Size", (c) => -c.size],
  concentration: ["Concentration", (c) => -c.concentration],
  purity: ["Purity", (c) => -(c.purity ?? -1)],
  impurity: ["Purity, lowest first", (c) => c.purity ?? 2],
  cohesion: ["Cohesion", (c) => -c.cohesion],
  scatter: ["Cohesion, lowest first", (c) => c.cohesion],
  label: ["Label", (c) => (c.label < 0 ? "\uffff" : labelName(c.label))],
  nearest: ["Nearest to another", (c) => -(c.nearest[0]?.[1] ?? -2)],
  number: ["Number", (_, i) => i],
};
const LABEL_ORDERS = new Set(["purity", "impurity", "label"]);

const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

function sortedClusters(order, keys) {
  const [, value] = ORDERS[order];
  const values = new Map(keys.map((i) => [i, value(clusters[i], i)]));
  return keys.sort((a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    return (typeof x === "string" ? collator.compare(x, y) : x - y) || a - b;
  });
}

/** Clusters whose number, label or one of whose images' names holds the text. */
function matchingClusters(query) {
  const all = range(clusters.length);
  const text = query.trim().toLowerCase();
  if (!text) return all;
  const byNumber = /^#?\d+$/.test(text) ? Number(text.replace("#", "")) : -1;
  const found = new Set();
  if (byNumber >= 0 && byNumber < clusters.length) found.add(byNumber);
  const labels = new Set(range(labelNames.length).filter((i) => labelNames[i].toLowerCase().includes(text)));
  clusters.forEach((cluster, i) => labels.has(cluster.label) && found.add(i));
  // A number means the cluster first of all: names of files are full of digits.
  if (byNumber < 0 || !found.size) {
    images.id.forEach((id, row) => {
      if (images.cluster[row] >= 0 && id.toLowerCase().includes(text)) found.add(images.cluster[row]);
    });
  }
  return all.filter((i) => found.has(i));
}

function labelParts(counts, most = 6) {
  return counts.slice(0, most).map(([label, n]) => [colourOf(label), n]);
}

function labelBar(cluster) {
  const total = cluster.label_counts.reduce((sum, [, n]) => sum + n, 0);
  return total ? shareBar(labelParts(cluster.label_counts), total) : null;
}

function clusterCard(index, width) {
  const cluster = clusters[index];
  const title = majority(cluster.label, "card-label");
  const purity = hasLabels && cluster.purity !== null && span("card-purity", percent(cluster.purity));
  const facts = `${plural(cluster.size, "image")} \u00b7 \u03ba\u00a0${figure(cluster.concentration)}`;
  const spoken = `${clusterTitle(index)}, ${plural(cluster.size, "image")}`;
  return el(
    "a",
    { class: "card", href: clusterAddress(index), "data-focus": true, "data-cluster": index, "aria-label": spoken },
    heroMosaic(cluster.central, width),
    span("card-line", span("card-number", `#${index}`), title, purity),
    span("card-facts", facts),
    hasLabels && labelBar(cluster),
  );
}

function mosaicHeight(width) {
  const cell = (width - 6) / 4;
  return 3 * ((cell * thumbs.height) / thumbs.width) + 4;
}

let shownClusters = range(clusters.length); // in the order of the grid: previous and next go along it

sections.set("clusters", {
  title: "Clusters",
  icon: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z",
  build(root) {
    let [query, order] = [null, null];
    const search = el(
      "input",
      {
        type: "search",
        placeholder: hasLabels ? "Label, image name or number" : "Image name or number",
        autocomplete: "off",
        spellcheck: "false",
      },
    );
    const orders = Object.entries(ORDERS).filter(([key]) => hasLabels || !LABEL_ORDERS.has(key));
    const sort = picker(
      orders.map(([key, [text]]) => [key, text]),
      "size",
      (key) => adjust({ sort: key }, { replace: true }),
    );
    const total = el("p", { class: "result", role: "status" });
    const grid = new VirtualGrid({
      label: "Clusters",
      minWidth: 216,
      gap: 26,
      rowHeight: (width) => mosaicHeight(width) + (hasLabels ? 66 : 54),
      make: clusterCard,
    });
    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => adjust({ q: search.value }, { replace: true }), 120);
    });
    const empty = el("p", { class: "empty", hidden: true }, "No cluster matches.");
    root.append(
      el("header", { class: "head" }, el("h1", {}, "Clusters"), total),
      el("div", { class: "controls" }, field("Search", search, "grow"), field("Sort by", sort)),
      grid.element,
      empty,
    );
    themeWatchers.add(() => grid.rebuild());
    this.update = (params) => {
      // An address may hold anything, also what every object has, such as "constructor".
      const asked = params.get("sort");
      const [q, by] = [params.get("q") ?? "", Object.hasOwn(ORDERS, asked) ? asked : "size"];
      if (q === query && by === order) return;
      [query, order] = [q, by];
      if (document.activeElement !== search) search.value = q;
      sort.value = by;
      shownClusters = sortedClusters(by, matchingClusters(q));
      total.textContent = q ? `${count(shownClusters.length)} of ${count(clusters.length)}` : count(clusters.length);
      empty.hidden = shownClusters.length > 0;
      grid.setKeys(shownClusters);
    };
  },
  update() {},
});

// ------------------------------------------------------------------------------------------------- one cluster

function nearestList(cluster) {
  const list = el("ul", { class: "nearest" });
  for (const [other, cosine] of cluster.nearest) {
    const title = majority(clusters[other].label);
    const item = el(
      "a",
      { href: clusterAddress(other), class: "near", "data-cluster": other },
      stripMosaic(clusters[other].central, 4, 176),
      span("near-text", span("card-number", `#${other}`), title, span("near-value", figure(cosine, 2))),
    );
    list.append(el("li", {}, item));
  }
  return list;
}

function labelTable(cluster) {
  const total = cluster.label_counts.reduce((sum, [, n]) => sum + n, 0);
  const list = el("ul", { class: "label-counts" });
  for (const [label, n] of cluster.label_counts.slice(0, 8)) {
    const dot = el("span", { class: "dot", style: { background: colourOf(label) }, "aria-hidden": "true" });
    const link = el("a", { href: address("classes", { view: "label", of: label }) }, named(labelName(label)));
    list.append(el("li", {}, dot, link, span("number", `${count(n)} \u00b7 ${percent(n / total)}`)));
  }
  const rest = cluster.label_counts.length - 8;
  if (rest > 0) list.append(el("li", { class: "note" }, `and ${plural(rest, "label")} more`));
  return el("div", {}, shareBar(labelParts(cluster.label_counts, 8), total, "tall"), list);
}

function mergeWords(cluster) {
  if (cluster.n_merged <= 1) return "One component from the start of training; nothing was merged into it.";
  return `${count(cluster.n_merged)} of the components at the start of training became this cluster.`;
}

function mergeList(cluster) {
  if (!cluster.merges.length) return null;
  const lines = cluster.merges.slice(0, 60).map(([epoch, left, right]) => el(
    "li",
    {},
    span("epoch", `epoch ${figure(epoch)}`),
    meterPair(left, right, cluster.n_merged),
    span("number", `${count(left)} + ${count(right)}`),
  ));
  const rest = cluster.merges.length - lines.length;
  if (rest > 0) lines.push(el("li", { class: "note" }, `and ${plural(rest, "earlier merge")}`));
  const list = el("ol", { class: "merges" }, ...lines);
  return lines.length > 6 ? el("details", {}, el("summary", {}, plural(cluster.merges.length, "merge")), list) : list;
}

function meterPair(left, right, total) {
  return el(
    "span",
    { class: "pair", "aria-hidden": "true" },
    el("span", { style: { width: `${(100 * left) / total}%` } }),
    el("span", { style: { width: `${(100 * right) / total}%` } }),
  );
}

/** The images of a cluster page by page, from the server. */
function morePages(index) {
  const holder = el("div", { class: "thumbnails large", role: "group", "aria-label": "All images of the cluster" });
  roving(holder);
  const status = el("p", { class: "note", role: "status" });
  let [order, offset, turn] = ["central", 0, 0];
  const more = button("More images", () => load(), { class: "primary" });
  const load = async () => {
    const mine = ++turn; // an answer in another order than the one that is chosen by now is dropped
    more.disabled = true;
    try {
      const page = await ask(`cluster/${index}?offset=${offset}&limit=60&order=${order}`);
      if (mine !== turn) return;
      for (const item of page.images) holder.append(remoteThumb(item));
      offset += page.images.length;
      status.textContent = `${count(offset)} of ${count(page.total)}`;
      more.hidden = offset >= page.total || !page.images.length;
      more.textContent = "More images";
      holder.resetRoving();
    } catch (error) {
      if (mine !== turn) return;
      status.textContent = error.message;
    }
    more.disabled = false;
  };
  const orders = choice("Order", [
    ["central", "Most central first"],
    ["outlying", "Most outlying first"],
  ], order, (key) => {
    [order, offset] = [key, 0];
    holder.replaceChildren();
    load();
  });
  more.textContent = "Show all images";
  return el(
    "section",
    { class: "strip" },
    el("div", { class: "panel-head" }, el("h3", {}, "All images"), orders),
    holder,
    status,
    more,
  );
}

const STRIPS = [
  ["central", "Central", "Closest to its mean direction."],
  ["boundary", "Boundary", "Almost as well in another cluster."],
  ["outliers", "Outliers", "They fit no cluster well."],
  ["sample", "Sample", "Drawn at random."],
];

/** The order that previous and next follow: that of the grid, if the cluster is in it. */
function orderAround(index) {
  return shownClusters.includes(index) ? shownClusters : range(clusters.length);
}

function detailTitle(index) {
  const { label, purity } = clusters[index];
  const name = hasLabels && label >= 0 ? [span("title-share", `${percent(purity)} `), named(labelName(label))] : [];
  return el("h2", { id: "detail-title", tabindex: "-1" }, `Cluster ${index} `, span("title-label", ...name));
}

function detailTools(index) {
  const order = orderAround(index);
  const at = order.indexOf(index);
  const tool = (text, action, label, key, disabled = false) =>
    button(text, action, { class: "tool", "aria-label": label, title: `${label} (${key})`, disabled });
  return [
    span("place", `${count(at + 1)} of ${count(order.length)}`),
    tool("\u2190", () => detail.step(-1), "Previous cluster", "left arrow", at <= 0),
    tool("\u2192", () => detail.step(1), "Next cluster", "right arrow", at >= order.length - 1),
    tool("\u00d7", () => detail.leave(), "Close", "Escape"),
  ];
}

function detailSide(index) {
  const cluster = clusters[index];
  const parts = [
    el(
      "dl",
      { class: "facts" },
      fact("Images", count(cluster.size)),
      fact("Weight", percent(cluster.weight, 1)),
      fact("Concentration", figure(cluster.concentration)),
      fact("Cohesion", figure(cluster.cohesion)),
      hasLabels && cluster.purity !== null ? fact("Purity", percent(cluster.purity)) : "",
    ),
  ];
  const part = (heading, aside, ...children) =>
    parts.push(el("section", {}, el("h3", {}, heading, aside && span("note", aside)), ...children));
  if (hasLabels && cluster.label_counts.length) {
    const there = address("classes", { view: "cluster", of: index });
    part("Labels", null, labelTable(cluster), el("a", { href: there, class: "more" }, "See its images by label"));
  }
  if (cluster.nearest.length) part("Nearest clusters", "cosine", nearestList(cluster));
  part("Merges", null, el("p", { class: "note" }, mergeWords(cluster)), mergeList(cluster));
  return el("div", { class: "detail-side" }, ...parts);
}

const detail = {
  dialog: null,
  index: -1,
  opener: null,

  make() {
    const { dialog: made } = this;
    if (made) return made;
    const dialog = (this.dialog = el("dialog", { class: "detail", "aria-labelledby": "detail-title" }));
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      this.leave();
    });
    dialog.addEventListener("click", (event) => event.target === dialog && this.leave());
    // A wheel beside the dialog must not move the page below it.
    dialog.addEventListener("wheel", (event) => event.target === dialog && event.preventDefault(), { passive: false });
    dialog.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select")) return;
      if (event.key === "ArrowLeft" || event.key === "[") this.step(-1);
      else if (event.key === "ArrowRight" || event.key === "]") this.step(1);
      else return;
      event.preventDefault();
    });
    document.body.append(dialog);
    return dialog;
  },

  /** Back to where the reader came from, so that the back button does not open it again. */
  leave() {
    if (history.state?.opened) history.back();
    else adjust({ cluster: null }, { replace: true });
  },

  step(by) {
    const order = orderAround(this.index);
    const at = order.indexOf(this.index) + by;
    if (at < 0 || at >= order.length) return;
    this.stepped = true;
    openCluster(order[at]);
  },

  show(index) {
    const dialog = this.make();
    if (this.index === index) return;
    const fresh = !dialog.open;
    if (fresh) this.opener = document.activeElement;
    this.index = index;
    const cluster = clusters[index];
    const title = detailTitle(index);
    const bar = el("div", { class: "detail-bar" }, title, ...detailTools(index));
    const strips = STRIPS.filter(([key]) => cluster[key].length).map(([key, heading, why]) =>
      el(
        "section",
        { class: "strip" },
        el("h3", {}, heading, span("note", why)),
        thumbnailRow(cluster[key], `${heading} images`, null, key === "central" ? "large" : ""),
      ),
    );
    const main = el("div", { class: "detail-main" }, ...strips);
    if (live) main.append(morePages(index));
    const body = el("div", { class: "detail-body" }, main, detailSide(index));
    hideTip();
    // Whoever steps with a button stays on it.
    const kept = this.stepped && document.activeElement.matches(".detail-bar button") && document.activeElement;
    dialog.replaceChildren(bar, body);
    if (fresh) dialog.showModal();
    const buttons = [...bar.querySelectorAll("button:not(:disabled)")];
    (buttons.find((item) => kept && item.ariaLabel === kept.ariaLabel) ?? title).focus();
    this.stepped = false;
    body.scrollTop = 0;
    document.title = `Cluster ${index} \u2013 ${visible(contents.title)}`;
  },

  hide() {
    if (!this.dialog?.open) return;
    hideTip();
    this.dialog.close();
    const last = this.index;
    this.index = -1;
    const again = this.opener?.isConnected ? this.opener : document.querySelector(`[data-cluster="${last}"]`);
    again?.focus?.({ preventScroll: true });
  },
};
