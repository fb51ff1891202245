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

/** One row of a view: the images of one label in one cluster, and their share of all. */
function classRow(title, index, label, n, whole, colour) {
  const rows = clusters[index].by_label.find(([found]) => found === label)?.[1] ?? [];
  const spoken = `Images labelled ${visible(labelName(label))} in cluster ${index}`;
  const shown = thumbnailRow(rows, spoken, (row) => openCluster(images.cluster[row]));
  return el(
    "li.class-row",
    el("div.class-head", title, shareBar([[colour, n]], whole), span("number", countAndShare(n, whole))),
    rows.length ? shown : note("None of these images is on this page."),
  );
}

const classLink = (view, of, text) => el("a.class-name", { href: address("classes", { view, of }) }, text);

/** What makes each row of a view, most images first. */
function rowsOfCluster(index) {
  const pairs = clusters[index].label_counts;
  return pairs.map(([label, n]) => () =>
    classRow(classLink("label", label, named(labelName(label))), index, label, n, sumOf(pairs), colourOf(label)),
  );
}

function rowsOfLabel(label) {
  const pairs = clustersOf(label);
  return pairs.map(([index, n]) => () => {
    const most = clusters[index].label;
    const mostly = most !== label && most >= 0 && span("note", "mostly ", named(labelName(most)));
    const title = el("span", classLink("cluster", index, `Cluster ${index}`), " ", mostly);
    return classRow(title, index, label, n, sumOf(pairs), colourOf(index));
  });
}

/** Shows the first rows now and the rest when they come near. */
function lazyList(holder, makers, step = 12) {
  let shown = 0;
  const end = el("li.list-end", { "aria-hidden": "true" });
  const grow = () => {
    for (const make of makers.slice(shown, shown + step)) holder.insertBefore(make(), end);
    shown += step;
    if (shown >= makers.length) {
      watch.disconnect();
      end.remove();
    }
  };
  const near = (entries) => entries.some((entry) => entry.isIntersecting) && grow();
  const watch = new IntersectionObserver(near, { rootMargin: "500px" });
  holder.replaceChildren(end);
  grow();
  if (end.isConnected || shown < makers.length) watch.observe(end);
}

if (hasLabels) {
  sections.set("classes", {
    title: "Classes",
    icon: "M4 6h4v4H4zM4 14h4v4H4zM11 7h9v2h-9zM11 15h9v2h-9z",
    build(root) {
      const views = [["label", "One label, by cluster"], ["cluster", "One cluster, by label"]];
      const switcher = choice("View", views, "label", (key) => go(address("classes", { view: key })));
      const labels = range(labelNames.length).filter((label) => clustersOf(label).length);
      const largest = sortedClusters("size", range(clusters.length));
      const pickers = {
        label: picker(labels.map((i) => [i, labelName(i)]), labels[0], (of) => adjust({ of })),
        cluster: picker([], "", (of) => adjust({ of })),
      };
      const byLabel = field("Label", pickers.label, "grow");
      const byCluster = field("Cluster", pickers.cluster, "grow");
      const jump = (by) => {
        const select = pickers[view];
        const next = select.selectedIndex + by;
        if (next >= 0 && next < select.options.length) adjust({ of: select.options[next].value }, { replace: true });
      };
      const earlier = button("\u2190", () => jump(-1), { class: "tool" });
      const later = button("\u2192", () => jump(1), { class: "tool" });
      const lead = el("p.lead.small", { role: "status" });
      const list = el("ul.class-rows");
      let [view, shown] = ["label", ""];
      const controls = el("div.controls", switcher, byLabel, byCluster, el("div.tools", earlier, later));
      root.append(head("Classes"), controls, lead, list);
      const draw = (key) => {
        shown = key;
        const of = Number(pickers[view].value);
        const makers = view === "label" ? rowsOfLabel(of) : rowsOfCluster(of);
        const total = plural(view === "label" ? sumOf(clustersOf(of)) : clusters[of].size, "image");
        if (view === "label") {
          const rest = ` in ${plural(makers.length, "cluster")}.`;
          lead.replaceChildren(total, " labelled ", named(labelName(of), "strong"), rest);
        } else lead.replaceChildren(`Cluster ${of} has ${total} of ${plural(makers.length, "label")}.`);
        lazyList(list, makers);
      };
      themeWatchers.add(() => {
        for (const option of pickers.cluster.options) option.textContent = clusterTitle(Number(option.value));
        if (shown) draw(shown);
      });
      return (params) => {
        view = params.get("view") === "cluster" ? "cluster" : "label";
        const select = pickers[view];
        // Thousands of options wait until they are asked for.
        if (!select.options.length) select.append(...largest.map((i) => el("option", { value: i }, clusterTitle(i))));
        select.value = params.get("of") ?? select.options[0]?.value;
        if (select.selectedIndex < 0) select.selectedIndex = 0;
        switcher.set(view);
        byLabel.hidden = view !== "label";
        byCluster.hidden = view !== "cluster";
        earlier.setAttribute("aria-label", `Previous ${view}`);
        later.setAttribute("aria-label", `Next ${view}`);
        earlier.disabled = select.selectedIndex <= 0;
        later.disabled = select.selectedIndex >= select.options.length - 1;
        const key = `${view} ${select.value}`;
        if (key !== shown) draw(key);
      };
    },
  });
}
