"use strict";
// This run beside another: what they are, their curves and figures, how alike they are, where each cluster went.

const RUN_FACTS = [
  ["Data", (r) => named(r.data)],
  ["Images", (r) => count(r.n_images)],
  ["Groups", (r) => (r.has_groups ? count(r.n_groups) : "none")],
  ["Clusters", (r) => count(r.n_clusters)],
  ["Method", (r) => named(r.method)],
  ["Backbone", (r) => named(r.backbone)],
  ["Image size", (r) => `${r.image_size}\u00a0px`],
  ["Epochs", (r) => count(r.epochs)],
  ["Time", (r) => (r.seconds ? duration(r.seconds) : DASH)],
  ["Random state", (r) => String(r.random_state)],
];

const SAID_ABOVE = new Set(["data", "output", "method", "backbone", "image_size", "epochs", "random_state"]);

function runsTable(other, name) {
  const line = (title, mine, theirs, className = "") =>
    el(`tr.${className}`, el("th", { scope: "row" }, title), el("td", mine), el("td", theirs));
  const rows = RUN_FACTS.map(([title, value]) => line(title, value(run), value(other)));
  // Settings that differ, and no others: what is the same explains nothing.
  const theirs = new Map(other.settings.map(([group, key, value]) => [`${group} ${key}`, value]));
  for (const [group, key, value] of run.settings) {
    const found = SAID_ABOVE.has(key) ? undefined : theirs.get(`${group} ${key}`);
    if (found !== undefined && found !== value) rows.push(line(words(key), named(value), named(found), "differs"));
  }
  const heads = [run.name, name].map((title) => el("th", { scope: "col" }, named(title)));
  return tableHolder("The two runs", [el("tr", el("td"), ...heads)], rows, "two");
}

function matchCard(match, other) {
  const { cluster: index, n_shared: shared } = match; // shared counts images in clusters that are not listed, too
  const size = plural(clusters[index].size, "image");
  const share = (n) => percent(n / Math.max(1, shared));
  const spoken = match.others.slice(0, 3).map(([number, n]) => `${share(n)} in ${number}`);
  const parts = match.others.slice(0, 5).map(([number, n]) => [colourOf(number), n]);
  const lines = match.others.slice(0, 4).map(([number, n]) => {
    const ofOther = percent(n / Math.max(1, other.other_sizes[number] ?? n));
    const text = ` ${share(n)} of its images; ${ofOther} of the other`;
    return span("went", dot(number), `#${number}`, span("number", text));
  });
  const attributes = { "data-focus": true, "aria-label": `${clusterTitle(index)}, ${size}: ${spoken.join(", ")}` };
  const text = [cardLine(index, span("card-facts", size)), shareBar(parts, shared, "tall"), span("wents", ...lines)];
  const strip = stripMosaic(clusters[index].central, 192);
  return clusterLink("match", index, attributes, strip, span("match-text", ...text));
}

function curvesPanel(other) {
  const names = [...new Set([...Object.keys(contents.curves), ...Object.keys(other.curves)])];
  const rank = (name) => (name === "n_clusters" ? 0 : name === "loss" ? 1 : /loss/.test(name) ? 2 : 3);
  names.sort((a, b) => rank(a) - rank(b));
  const charts = names.slice(0, 6).map((name) => {
    const step = name === "n_clusters";
    const line = ({ name: title }, { [name]: points = [] }, style) => ({ name: visible(title), points, style, step });
    const lines = [line(run, contents.curves, ""), line(other, other.curves, "second")];
    return lineChart({ title: step ? "Clusters" : words(name), lines });
  });
  return charts.length > 0 && el("section.panel.wide", el("h2", "Curves"), el("div.charts", ...charts));
}

function matchesPanel(other) {
  const byNumber = new Map(other.clusters.map((match) => [match.cluster, match]));
  const share = (i) => (byNumber.get(i).others[0]?.[1] ?? 0) / Math.max(1, byNumber.get(i).n_shared);
  const orders = {
    size: ["Size", (i) => -clusters[i].size],
    split: ["Most split first", share],
    kept: ["Most alike first", (i) => -share(i)],
    number: ["Number", (i) => i],
  };
  const rowHeight = (width) => (width < 430 ? 200 : 136);
  const make = (i) => matchCard(byNumber.get(i), other);
  const title = "Where each cluster went";
  const grid = new VirtualGrid({ label: title, minWidth: 430, maxColumns: 2, gap: 18, rowHeight, make });
  const sort = (key) => {
    const [, value] = orders[key];
    grid.setKeys([...byNumber.keys()].sort((a, b) => value(a) - value(b) || a - b));
  };
  themeWatchers.add(() => grid.rebuild());
  sort("size");
  const select = picker(Object.entries(orders).map(([key, [text]]) => [key, text]), "size", sort);
  return el(
    "section.panel.wide",
    el("div.panel-head", el("h2", title), field("Sort by", select)),
    note("The numbers beside the dots are clusters of ", named(other.name), "."),
    grid.element,
  );
}

if (contents.comparison) {
  const other = contents.comparison;
  sections.set("comparison", {
    title: "Comparison",
    short: "Compare",
    icon: "M4 5h7v14H4zM13 5h7v14h-7zM6 7v10h3V7zM15 7v10h3V7z",
    build(root) {
      const shared = other.n_shared
        ? `, on ${plural(other.n_shared, "shared image")}.`
        : ". They have no image in common, so their clusters cannot be matched.";
      const scores = other.scores.map(([name, value]) =>
        el("div.score-box", el("dt", words(name)), el("dd", value.toFixed(3), meter(value))),
      );
      const alike = "How similar the two clusterings are: 1 is identical, 0 is what chance gives.";
      const both = [{ title: run.name, figures: contents.figures }, { title: other.name, figures: other.figures }];
      const parts = [
        head("Comparison"),
        el("p.lead.small", named(run.name, "strong"), " beside ", named(other.name, "strong"), shared),
        scores.length && panel("Agreement", alike, el("dl.scores", ...scores)),
        panel("Runs", null, runsTable(other.other, other.name)),
        curvesPanel(other),
        both.some(({ figures }) => figures.length) && panel("Evaluation", null, figureBlocks(both)),
        other.clusters.length && matchesPanel(other),
      ];
      root.append(...parts.filter(Boolean));
    },
  });
}
