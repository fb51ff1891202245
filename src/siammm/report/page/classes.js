"use strict";
// The paper's two views of a class: the images of one cluster by their true label, those of one label by their cluster.

const labelTotals = new Map(); // label -> [[cluster, count], ...], most first; made when first asked for

function clustersOf(label) {
  if (!labelTotals.size) {
    clusters.forEach((cluster, index) => {
      for (const [found, n] of cluster.label_counts) {
        if (!labelTotals.has(found)) labelTotals.set(found, []);
        labelTotals.get(found).push([index, n]);
      }
    });
    for (const pairs of labelTotals.values()) pairs.sort((a, b) => b[1] - a[1]);
  }
  return labelTotals.get(label) ?? [];
}

const sum = (pairs) => pairs.reduce((total, [, n]) => total + n, 0);

function imagesOf(cluster, label) {
  return clusters[cluster].by_label.find(([found]) => found === label)?.[1] ?? [];
}

/** One row of a view: a name, how many, and images. */
function classRow(head, n, total, colour, rows, label) {
  const bar = shareBar([[colour, n]], total);
  return el(
    "li",
    { class: "class-row" },
    el("div", { class: "class-head" }, head, bar, span("number", `${count(n)} \u00b7 ${percent(n / total)}`)),
    rows.length ? thumbnailRow(rows, label, (row) => openCluster(images.cluster[row])) : el(
      "p",
      { class: "note" },
      "No image of these is on the page.",
    ),
  );
}

function rowsOfCluster(index) {
  const counts = clusters[index].label_counts;
  const total = sum(counts);
  return counts.map(([label, n]) => {
    const head = el(
      "a",
      { class: "class-name", href: address("classes", { view: "label", of: label }) },
      named(labelName(label)),
    );
    return () => classRow(
      head,
      n,
      total,
      colourOf(label),
      imagesOf(index, label),
      `Images labelled ${visible(labelName(label))} in cluster ${index}`,
    );
  });
}

function rowsOfLabel(label) {
  const pairs = clustersOf(label);
  const total = sum(pairs);
  return pairs.map(([index, n]) => {
    const other = clusters[index].label !== label && clusters[index].label >= 0;
    const mostly = other ? span("note", "mostly ", named(labelName(clusters[index].label))) : "";
    const head = el(
      "span",
      {},
      el("a", { class: "class-name", href: address("classes", { view: "cluster", of: index }) }, `Cluster ${index}`),
      " ",
      mostly,
    );
    return () => classRow(
      head,
      n,
      total,
      colourOf(index),
      imagesOf(index, label),
      `Images labelled ${visible(labelName(label))} in cluster ${index}`,
    );
  });
}

/** Shows the first rows now and the rest when they come near. */
function lazyList(holder, makers, step = 12) {
  let shown = 0;
  const end = el("li", { class: "list-end", "aria-hidden": "true" });
  const grow = () => {
    for (const make of makers.slice(shown, shown + step)) holder.insertBefore(make(), end);
    shown += step;
    if (shown >= makers.length) {
      watch.disconnect();
      end.remove();
    }
  };
  const watch = new IntersectionObserver(
    (entries) => entries.some((entry) => entry.isIntersecting) && grow(),
    { rootMargin: "500px" },
  );
  holder.replaceChildren(end);
  grow();
  if (end.isConnected || shown < makers.length) watch.observe(end);
}

function addClasses() {
  sections.set("classes", {
    title: "Classes",
    icon: "M4 6h4v4H4zM4 14h4v4H4zM11 7h9v2h-9zM11 15h9v2h-9z",
    build(root) {
      const switcher = choice(
        "View",
        [["label", "One label, by cluster"], ["cluster", "One cluster, by label"]],
        "label",
        (view) => go(address("classes", { view })),
      );
      const labels = range(labelNames.length).filter((label) => clustersOf(label).length);
      const largest = sortedClusters("size", range(clusters.length));
      const pickers = {
        label: picker(labels.map((i) => [i, labelName(i)]), labels[0], (of) => adjust({ of })),
        cluster: picker([], "", (of) => adjust({ of })),
      };
      const fillClusters = () => {
        if (pickers.cluster.options.length) return; // thousands of options wait until they are asked for
        for (const i of largest) pickers.cluster.append(el("option", { value: i }, clusterTitle(i)));
      };
      const holders = {
        label: field("Label", pickers.label, "grow"),
        cluster: field("Cluster", pickers.cluster, "grow"),
      };
      const jump = (by) => {
        const select = pickers[view];
        const next = select.selectedIndex + by;
        if (next >= 0 && next < select.options.length) adjust({ of: select.options[next].value }, { replace: true });
      };
      const earlier = button("\u2190", () => jump(-1), { class: "tool" });
      const later = button("\u2192", () => jump(1), { class: "tool" });
      const lead = el("p", { class: "lead small", role: "status" });
      const list = el("ul", { class: "class-rows" });
      let [view, shown] = ["label", ""];
      root.append(
        el("header", { class: "head" }, el("h1", {}, "Classes")),
        el(
          "div",
          { class: "controls" },
          switcher,
          holders.label,
          holders.cluster,
          el("div", { class: "tools" }, earlier, later),
        ),
        lead,
        list,
      );
      const draw = (key) => {
        shown = key;
        const of = Number(pickers[view].value);
        const makers = view === "label" ? rowsOfLabel(of) : rowsOfCluster(of);
        const total = view === "label" ? sum(clustersOf(of)) : clusters[of].size;
        if (view === "label") lead.replaceChildren(
          plural(total, "image"),
          " labelled ",
          named(labelName(of), "strong"),
          ` in ${plural(makers.length, "cluster")}.`,
        );
        else lead.replaceChildren(`Cluster ${of} has ${plural(total, "image")} of ${plural(makers.length, "label")}.`);
        lazyList(list, makers);
      };
      themeWatchers.add(() => shown && draw(shown));
      this.update = (params) => {
        view = params.get("view") === "cluster" ? "cluster" : "label";
        if (view === "cluster") fillClusters();
        const select = pickers[view];
        const wanted = params.get("of");
        select.value = wanted ?? select.options[0]?.value;
        if (select.selectedIndex < 0) select.selectedIndex = 0;
        switcher.set(view);
        holders.label.hidden = view !== "label";
        holders.cluster.hidden = view !== "cluster";
        earlier.setAttribute("aria-label", `Previous ${view}`);
        later.setAttribute("aria-label", `Next ${view}`);
        earlier.disabled = select.selectedIndex <= 0;
        later.disabled = select.selectedIndex >= select.options.length - 1;
        const key = `${view} ${select.value}`;
        if (key !== shown) draw(key);
      };
    },
    update() {},
  });
}

if (hasLabels) addClasses();
