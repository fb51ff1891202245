"use strict";
// This run beside another: what they are, their curves and figures, how alike they are, where each cluster went.

const RUN_FACTS = [
  ["Data", (r) => named(r.data)],
  ["Images", (r) => count(r.n_images)],
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
  const line = (title, mine, theirs, className) =>
    el("tr", { class: className }, el("th", { scope: "row" }, title), el("td", {}, mine), el("td", {}, theirs));
  const rows = RUN_FACTS.map(([title, value]) => line(title, value(run), value(other)));
  // Settings that differ, and no others: what is the same explains nothing.
  const theirs = new Map(other.settings.map(([group, key, value]) => [`${group} ${key}`, value]));
  for (const [group, key, value] of run.settings) {
    const found = theirs.get(`${group} ${key}`);
    if (SAID_ABOVE.has(key)) continue;
    if (found !== undefined && found !== value) rows.push(line(words(key), named(value), named(found), "differs"));
  }
  const heads = [run.name, name].map((title) => el("th", { scope: "col" }, named(title)));
  return tableHolder("The two runs", [el("tr", {}, el("td"), ...heads)], rows, "two");
}

function matchCard(match, other) {
  const cluster = clusters[match.cluster];
  const shared = match.n_shared; // more than are listed, where a cluster is in many of the other run
  const share = (n) => percent(n / Math.max(1, shared));
  const spoken = match.others.slice(0, 3).map(([index, n]) => `${share(n)} in ${index}`);
  const parts = match.others.slice(0, 5).map(([index, n]) => [colourOf(index), n]);
  const text = match.others.slice(0, 4).map(([index, n]) =>
    span(
      "went",
      el("span", { class: "dot", style: { background: colourOf(index) }, "aria-hidden": "true" }),
      `#${index}`,
      span(
        "number",
        ` ${share(n)} of its images; ${percent(n / Math.max(1, other.other_sizes[index] ?? n))} of the other`,
      ),
    ),
  );
  return el(
    "a",
    {
      class: "match",
      href: clusterAddress(match.cluster),
      "data-cluster": match.cluster,
      "data-focus": true,
      "aria-label": `${clusterTitle(match.cluster)}, ${plural(cluster.size, "image")}: ${spoken.join(", ")}`,
    },
    stripMosaic(cluster.central, 4, 192),
    span(
      "match-text",
      span(
        "card-line",
        span("card-number", `#${match.cluster}`),
        majority(cluster.label, "card-label"),
        span("card-facts", plural(cluster.size, "image")),
      ),
      shareBar(parts, shared, "tall"),
      span("wents", ...text),
    ),
  );
}

function addComparison(other) {
  sections.set("comparison", {
    title: "Comparison",
    short: "Compare",
    icon: "M4 5h7v14H4zM13 5h7v14h-7zM6 7v10h3V7zM15 7v10h3V7z",
    build(root) {
      root.append(
        el("header", { class: "head" }, el("h1", {}, "Comparison")),
        el(
          "p",
          { class: "lead small" },
          named(run.name, "strong"),
          " beside ",
          named(other.name, "strong"),
          other.n_shared
            ? `, on ${plural(other.n_shared, "shared image")}.`
            : ". They have no image in common, so their clusters cannot be matched.",
        ),
      );
      if (other.scores.length) {
        const scores = other.scores.map(([name, value]) => el(
          "div",
          { class: "score-box" },
          el("dt", {}, words(name)),
          el("dd", {}, value.toFixed(3), meter(value)),
        ));
        root.append(panel(
          "Agreement",
          "How alike the two clusterings are; 1 is the same, 0 is what chance gives.",
          el("dl", { class: "scores" }, ...scores),
        ));
      }
      root.append(panel("Runs", null, runsTable(other.other, other.name)));
      const names = [...new Set([...Object.keys(contents.curves), ...Object.keys(other.curves)])];
      const rank = (name) => (name === "n_clusters" ? 0 : name === "loss" ? 1 : /loss/.test(name) ? 2 : 3);
      names.sort((a, b) => rank(a) - rank(b));
      const charts = names.slice(0, 6).map((name) => {
        const lines = [
          [run.name, contents.curves[name], ""],
          [other.name, other.curves[name], "second"],
        ].filter(([, points]) => points?.length);
        const step = name === "n_clusters";
        const values = lines.flatMap(([, points]) => points.map(([, value]) => value));
        return lineChart({
          title: step ? "Clusters" : words(name),
          lines: lines.map(([title, points, style]) => ({ name: visible(title), points, style, step })),
          log: step && Math.max(...values) > 12 * Math.max(1, Math.min(...values)),
        });
      });
      if (charts.length) root.append(el(
        "section",
        { class: "panel wide" },
        el("h2", {}, "Curves"),
        el("div", { class: "charts" }, ...charts),
      ));
      if (contents.figures.length || other.figures.length) {
        const both = [{ title: run.name, figures: contents.figures }, { title: other.name, figures: other.figures }];
        root.append(panel("Evaluation", null, figureBlocks(both)));
      }
      if (other.clusters.length) {
        const byNumber = new Map(other.clusters.map((match) => [match.cluster, match]));
        const share = (i) => {
          const { others, n_shared: shared } = byNumber.get(i);
          return (others[0]?.[1] ?? 0) / Math.max(1, shared);
        };
        const keys = [...byNumber.keys()];
        const orders = {
          size: (i) => -clusters[i].size,
          split: (i) => share(i),
          kept: (i) => -share(i),
          number: (i) => i,
        };
        const sort = (key) => grid.setKeys([...keys].sort((a, b) => orders[key](a) - orders[key](b) || a - b));
        const select = picker(
          [["size", "Size"], ["split", "Most split first"], ["kept", "Most alike first"], ["number", "Number"]],
          "size",
          sort,
        );
        const grid = new VirtualGrid({
          label: "Where each cluster went",
          minWidth: 430,
          maxColumns: 2,
          gap: 18,
          rowHeight: (width) => (width < 430 ? 200 : 136),
          make: (i) => matchCard(byNumber.get(i), other),
        });
        const head = el(
          "div",
          { class: "panel-head" },
          el("h2", {}, "Where each cluster went"),
          field("Sort by", select),
        );
        root.append(el(
          "section",
          { class: "panel wide" },
          head,
          el("p", { class: "note" }, "The numbers beside the dots are clusters of ", named(other.name), "."),
          grid.element,
        ));
        themeWatchers.add(() => grid.rebuild());
        sort("size");
      }
    },
    update() {},
  });
}

if (contents.comparison) addComparison(contents.comparison);
