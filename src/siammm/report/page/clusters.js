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
  group: ["Group", (c) => c.group],
  number: ["Number", (_, i) => i],
};
const LABEL_ORDERS = new Set(["purity", "impurity", "label"]);
const canOrder = (key) => (hasLabels || !LABEL_ORDERS.has(key)) && (hasGroups || key !== "group");
const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

function sortedClusters(order, keys) {
  const [, value] = ORDERS[order];
  const values = new Map(keys.map((i) => [i, value(clusters[i], i)]));
  return keys.sort((a, b) => {
    const [x, y] = [values.get(a), values.get(b)];
    return (typeof x === "string" ? collator.compare(x, y) : x - y) || a - b;
  });
}

/** Clusters whose number, label, group or one of whose images' names holds the text. */
function matchingClusters(query) {
  const all = range(clusters.length);
  const text = query.trim().toLowerCase();
  if (!text) return all;
  const byNumber = /^#?\d+$/.test(text) ? Number(text.replace("#", "")) : -1;
  const found = new Set();
  if (byNumber >= 0 && byNumber < clusters.length) found.add(byNumber);
  const labels = new Set(range(labelNames.length).filter((i) => labelNames[i].toLowerCase().includes(text)));
  clusters.forEach((cluster, i) => labels.has(cluster.label) && found.add(i));
  clusters.forEach((_, i) => givenName(i).toLowerCase().includes(text) && found.add(i));
  // A number means the cluster first of all: names of files are full of digits.
  if (byNumber < 0 || !found.size) {
    images.id.forEach((id, row) => {
      if (images.cluster[row] >= 0 && id.toLowerCase().includes(text)) found.add(images.cluster[row]);
    });
  }
  return all.filter((i) => found.has(i));
}

/** A bar of the most common labels of a cluster. */
function labelBar({ label_counts: counts }, most = 6, className = "") {
  return shareBar(counts.slice(0, most).map(([label, n]) => [colourOf(label), n]), sumOf(counts), className);
}

/** The number of a cluster in a list, without its group where there is one level. */
function clusterChip(index) {
  return hasGroups || !givenName(index) ? String(index) : named(givenName(index));
}

/** The first line of a card: the number of a cluster, its name or most common label, and what comes after them. */
function cardLine(index, ...more) {
  const { group, label } = clusters[index];
  const own = !hasGroups && givenName(index);
  const name = own ? named(own, "card-label") : majority(label, "card-label");
  return span("card-line", hasGroups && dot(group), span("card-number", `#${index}`), name, ...more);
}

const catchAllBadge = () => span("badge mixed", "catch-all");

/** What makes a cluster or group a catch-all. */
function catchAllWords({ concentration, foreign }, what) {
  const spread = `Its concentration is ${figure(concentration)}, unusually low, and `;
  const mixed = `${percent(foreign)} of the nearest neighbours of its images are in other ${what}s. `;
  const means = `It holds images that fit no other ${what}, rather than images of one kind.`;
  return el("p.catch-all", el("strong", "A catch-all. "), spread, mixed, means);
}

function clusterCard(index, width) {
  const cluster = clusters[index];
  const shown = hasLabels && cluster.purity !== null && (hasGroups || !givenName(index));
  const purity = shown && span("card-purity", percent(cluster.purity));
  const size = plural(cluster.size, "image");
  const where = hasGroups ? `, ${visible(groupName(cluster.group))}` : "";
  const mixed = cluster.is_catch_all && catchAllBadge();
  const facts = span("card-facts", `${size} \u00b7 ${percent(cluster.size / run.n_images)}`, mixed);
  const odd = cluster.is_catch_all ? ", a catch-all" : "";
  const bar = hasLabels && cluster.label_counts.length > 0 && labelBar(cluster);
  const attributes = { "data-focus": true, "aria-label": `${clusterTitle(index)}, ${size}${where}${odd}` };
  const parts = [heroMosaic(cluster.central, width), cardLine(index, purity), facts, bar];
  return clusterLink("card", index, attributes, ...parts);
}

const cardHeight = (width) => 3 * stripHeight(width) + (hasLabels ? 70 : 58);

/** The title of a page that begins with the clusters. */
function foundHead(total) {
  const title = `${plural(clusters.length, "cluster")} in ${plural(run.n_images, "image")}`;
  const lead = el("p.lead", visible(contents.how_found.levels), " Open a cluster to see its images.");
  return el("header.hero", el("h1", title), lead, total);
}

sections.set("clusters", {
  title: "Clusters",
  icon: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z",
  build(root) {
    const isFirst = sections.keys().next().value === "clusters";
    let [query, order] = [null, null];
    const hint = [hasGroups && "Group", hasLabels && "label", "image name or number"].filter(Boolean).join(", ");
    const search = searchBox(hint, 120, () => adjust({ q: search.value }, { replace: true }));
    const orders = Object.entries(ORDERS).filter(([key]) => canOrder(key));
    const options = orders.map(([key, [text]]) => [key, text]);
    const sort = picker(options, "size", (key) => adjust({ sort: key }, { replace: true }));
    const total = el("p.result", { role: "status" });
    const size = { minWidth: 216, gap: 26, rowHeight: cardHeight };
    const grid = new VirtualGrid({ label: "Clusters", ...size, make: clusterCard });
    const empty = el("p.empty", { hidden: true }, "No cluster matches.");
    const controls = el("div.controls", field("Search", search, "grow"), field("Sort by", sort));
    root.append(isFirst ? foundHead(total) : head("Clusters", total), controls, grid.element, empty);
    themeWatchers.add(() => grid.rebuild());
    return (params) => {
      // An address may hold anything, also what every object has, such as "constructor".
      const asked = params.get("sort");
      const [q, by] = [params.get("q") ?? "", Object.hasOwn(ORDERS, asked) && canOrder(asked) ? asked : "size"];
      if (q === query && by === order) return;
      [query, order] = [q, by];
      if (document.activeElement !== search) search.value = q;
      sort.value = by;
      const shown = sortedClusters(by, matchingClusters(q));
      sections.get("clusters").shown = shown;
      const all = isFirst ? "" : count(clusters.length); // the title says it
      total.textContent = q ? `${count(shown.length)} of ${count(clusters.length)}` : all;
      empty.hidden = shown.length > 0;
      grid.setKeys(shown);
    };
  },
});

// What was found comes first: groups, or else the clusters, if there are several.
if (!hasGroups && clusters.length > 1) {
  const overview = sections.get("overview");
  sections.delete("overview");
  sections.set("overview", overview);
}

// ------------------------------------------------------------------------------------------------- one cluster

function nearestList(cluster) {
  const items = cluster.nearest.map(([other, cosine]) => {
    const { central, label } = clusters[other];
    const text = [span("card-number", `#${other}`), majority(label), span("near-value", figure(cosine, 2))];
    return el("li", clusterLink("near", other, stripMosaic(central, 150), span("near-text", ...text)));
  });
  return el("ul.nearest", ...items);
}

function labelTable(cluster) {
  const total = sumOf(cluster.label_counts);
  const items = cluster.label_counts.slice(0, 8).map(([label, n]) => {
    const link = el("a", { href: address("classes", { view: "label", of: label }) }, named(labelName(label)));
    return el("li", dot(label), link, span("number", countAndShare(n, total)));
  });
  const rest = cluster.label_counts.length - items.length;
  if (rest > 0) items.push(el("li.note", `and ${plural(rest, "label")} more`));
  return el("div", labelBar(cluster, 8, "tall"), el("ul.label-counts", ...items));
}

function mergeWords(cluster) {
  if (cluster.n_merged <= 1) return "One component from the start; nothing was merged into it.";
  return `${count(cluster.n_merged)} of the components at the start became this cluster.`;
}

function mergeList(cluster) {
  if (!cluster.merges.length) return null;
  const side = (n) => el("span", { style: { width: `${(100 * n) / cluster.n_merged}%` } });
  const lines = cluster.merges.slice(0, 60).map(([epoch, left, right]) => {
    const pair = el("span.pair", { "aria-hidden": "true" }, side(left), side(right));
    return el("li", span("epoch", `epoch ${figure(epoch)}`), pair, span("number", `${count(left)} + ${count(right)}`));
  });
  const rest = cluster.merges.length - lines.length;
  if (rest > 0) lines.push(el("li.note", `and ${plural(rest, "earlier merge")}`));
  const list = el("ol.merges", ...lines);
  return lines.length > 6 ? el("details", el("summary", plural(cluster.merges.length, "merge")), list) : list;
}

/** The images of a cluster or a group ("cluster/3") page by page, from the server. */
function morePages(path) {
  const holder = remoteGrid([], `All images of the ${path.split("/")[0]}`);
  const status = note({ role: "status" });
  let [order, offset, turn] = ["central", 0, 0];
  const more = button("Show all images", () => load(), { class: "primary" });
  const load = async () => {
    const mine = ++turn; // an answer in another order than the one that is chosen by now is dropped
    more.disabled = true;
    try {
      const page = await ask(`${path}?offset=${offset}&limit=60&order=${order}`);
      if (mine !== turn) return;
      holder.add(page.images);
      offset += page.images.length;
      status.textContent = `${count(offset)} of ${count(page.total)}`;
      more.hidden = offset >= page.total || !page.images.length;
      more.textContent = "More images";
      holder.resetRoving();
    } catch (error) {
      if (mine === turn) status.textContent = error.message;
    }
    if (mine === turn) more.disabled = false;
  };
  const options = [["central", "Most central first"], ["outlying", "Most outlying first"]];
  const orders = choice("Order", options, order, (key) => {
    [order, offset] = [key, 0];
    holder.clear();
    load();
  });
  return el("section.strip", el("div.panel-head", el("h3", "All images"), orders), holder, status, more);
}

const STRIPS = [
  ["central", "Central", "Closest to its mean direction."],
  ["boundary", "Boundary", "Almost as likely in another cluster."],
  ["outliers", "Outliers", "They fit no cluster well."],
  ["sample", "Sample", "Drawn at random."],
];

/** The order that previous and next follow: that of the group or of the grid, if the cluster is in it. */
function orderAround(index) {
  const orders = [where().section, "clusters"].map((id) => sections.get(id).shown);
  return orders.find((order) => order?.includes(index)) ?? range(clusters.length);
}

function detailTitle(index) {
  const { label, purity } = clusters[index];
  const name = hasLabels && label >= 0 ? [span("title-share", `${percent(purity)} `), named(labelName(label))] : [];
  const title = [el("bdi", visible(clusterName(index))), " ", span("title-label", ...name)];
  return el("h2", { id: "detail-title", tabindex: "-1" }, ...title);
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
  const facts = [fact("Images", count(cluster.size)), fact("Weight", percent(cluster.weight, 1))];
  const part = cluster.n_in_group < cluster.size && span("note", ` ${count(cluster.n_in_group)} of its images`);
  if (hasGroups) facts.unshift(fact("Group", [groupLink(cluster.group), part].filter(Boolean)));
  else if (givenName(index)) facts.unshift(fact("Cluster", index));
  facts.push(fact("Concentration", figure(cluster.concentration)), fact("Cohesion", figure(cluster.cohesion)));
  if (cluster.foreign !== null) facts.push(fact("Neighbours elsewhere", percent(cluster.foreign)));
  if (hasLabels && cluster.purity !== null) facts.push(fact("Purity", percent(cluster.purity)));
  const section = (heading, aside, ...children) =>
    el("section", el("h3", heading, aside && span("note", aside)), ...children);
  const link = el("a.more", { href: address("classes", { view: "cluster", of: index }) }, "See its images by label");
  const renamed = () => document.getElementById("detail-title").replaceWith(detailTitle(index));
  return el(
    "div.detail-side",
    live && !hasGroups && nameForm(cluster.group, renamed),
    cluster.is_catch_all && catchAllWords(cluster, "cluster"),
    el("dl.facts", ...facts),
    hasLabels && cluster.label_counts.length > 0 && section("Labels", null, labelTable(cluster), link),
    cluster.nearest.length > 0 && section("Nearest clusters", "cosine", nearestList(cluster)),
    section("Merges", null, note(mergeWords(cluster)), mergeList(cluster)),
  );
}

const detail = {
  dialog: el("dialog.detail", { "aria-labelledby": "detail-title" }),
  index: -1,
  opener: null,

  listen() {
    const { dialog } = this;
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      this.leave();
    });
    dialog.addEventListener("click", (event) => event.target === dialog && this.leave());
    // A wheel beside the dialog must not move the page below it.
    dialog.addEventListener("wheel", (event) => event.target === dialog && event.preventDefault(), { passive: false });
    dialog.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select")) return;
      const by = { ArrowLeft: -1, "[": -1, ArrowRight: 1, "]": 1 }[event.key];
      if (!by) return;
      this.step(by);
      event.preventDefault();
    });
    document.body.append(dialog);
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
    if (this.index === index) return;
    const { dialog } = this;
    if (!dialog.isConnected) this.listen();
    const fresh = !dialog.open;
    if (fresh) this.opener = document.activeElement;
    this.index = index;
    const cluster = clusters[index];
    const title = detailTitle(index);
    const bar = el("div.detail-bar", title, ...detailTools(index));
    const strips = STRIPS.filter(([key]) => cluster[key].length).map(([key, heading, why]) => {
      const row = thumbnailRow(cluster[key], `${heading} images`, null, key === "central" ? "large" : "");
      return el("section.strip", el("h3", heading, span("note", why)), row);
    });
    const main = el("div.detail-main", ...strips, live && morePages(`cluster/${index}`));
    const body = el("div.detail-body", main, detailSide(index));
    hideTip();
    // Whoever steps with a button stays on it.
    const kept = this.stepped && document.activeElement.matches(".detail-bar button") && document.activeElement;
    dialog.replaceChildren(bar, body);
    if (fresh) dialog.showModal();
    const buttons = [...bar.querySelectorAll("button:not(:disabled)")];
    (buttons.find((item) => kept && item.ariaLabel === kept.ariaLabel) ?? title).focus();
    this.stepped = false;
    body.scrollTop = 0;
    document.title = `${visible(clusterName(index))} \u2013 ${visible(contents.title)}`;
  },

  hide() {
    if (!this.dialog.open) return;
    hideTip();
    this.dialog.close();
    const last = this.index;
    this.index = -1;
    const again = this.opener?.isConnected ? this.opener : document.querySelector(`[data-cluster="${last}"]`);
    again?.focus?.({ preventScroll: true });
  },
};
