"use strict";
// The overview: what was trained, what was found, the map, the curves, the figures.

const words = (name) => visible(name).replaceAll("_", " ").replace(/\bknn\b/g, "kNN");

function clusterTitle(index) {
  const { label, purity } = clusters[index];
  return visible(`Cluster ${index}${hasLabels && label >= 0 ? `, ${percent(purity)} ${labelName(label)}` : ""}`);
}

function headline() {
  const text = `${plural(run.n_clusters, "cluster")} in ${plural(run.n_images, "image")}`;
  const told = [];
  if (run.seconds) told.push(`in ${duration(run.seconds)}`);
  const lead = el(
    "p",
    { class: "lead" },
    named(run.method),
    " trained ",
    named(run.backbone),
    " on ",
    named(run.data),
    ` at ${run.image_size}\u00a0px for ${plural(run.epochs, "epoch")}`,
    told.length ? ` ${told.join(" ")}` : "",
    ", without labels.",
  );
  const firsts = clusters.map((cluster, index) => [index, cluster]).sort((a, b) => b[1].size - a[1].size);
  const ribbon = el(
    "div",
    { class: "ribbon", role: "group", "aria-label": "One image of each of the largest clusters" },
  );
  for (const [index, cluster] of firsts.slice(0, 24)) {
    if (!cluster.central.length) continue;
    const item = el(
      "a",
      {
        class: "thumb",
        href: clusterAddress(index),
        "data-cluster": index,
        "aria-label": clusterTitle(index),
        title: clusterTitle(index),
      },
    );
    item.append(thumbnailCanvas(cluster.central[0]));
    ribbon.append(item);
  }
  roving(ribbon, "a");
  return el("header", { class: "hero" }, el("h1", {}, text), lead, ribbon);
}

function panel(title, lead, ...children) {
  return el("section", { class: "panel" }, el("h2", {}, title), lead && el("p", { class: "note" }, lead), ...children);
}

function mapPanel() {
  const placed = (row) => Number.isFinite(images.x[row]) && Number.isFinite(images.y[row]);
  const known = range(images.id.length).filter(placed);
  if (!known.length) return null;
  const [xs, ys] = [known.map((row) => images.x[row]), known.map((row) => images.y[row])];
  let by = "cluster";
  let chosen = -1;
  let palette = [];
  const groupOf = (i) => images[by][known[i]];
  const paletteFor = () => {
    const n = by === "cluster" ? clusters.length : labelNames.length;
    palette = range(n).map(rgbOf);
    palette[-1] = rgbOf(-1);
  };
  paletteFor();
  const plot = new PointPlot({
    xs,
    ys,
    colour: (i) => palette[groupOf(i)] ?? palette[-1],
    radius: clamp(90 / Math.sqrt(known.length), 1.3, 3.2),
    stretch: true,
    padding: [18, 18, 18, 18],
    label:
      `Map of ${count(known.length)} images. Arrow keys go from image to image, Enter opens its cluster, ` +
      "plus and minus change the scale.",
    onHover: (i, box) => (i < 0 ? hideTip() : showTip(known[i], box)),
    onOpen: (i) => openCluster(images.cluster[known[i]]),
    describe: (i) => imageWords(known[i]),
  });
  themeWatchers.add(() => (paletteFor(), legendFor()));
  const legend = el("div", { class: "chips", role: "group", "aria-label": "Show one group" });
  const legendFor = () => {
    const n = by === "cluster" ? clusters.length : labelNames.length;
    legend.replaceChildren();
    if (n > 40) return;
    for (const i of range(n)) {
      const dot = el("span", { class: "dot", style: { background: colourOf(i) }, "aria-hidden": "true" });
      const text = by === "cluster" ? String(i) : named(labelName(i));
      const chip = el("button", { type: "button", class: "chip", "aria-pressed": String(i === chosen) }, dot, text);
      if (by === "cluster") chip.setAttribute("aria-label", `Cluster ${i}`);
      chip.addEventListener("click", () => {
        chosen = chosen === i ? -1 : i;
        plot.dim = chosen < 0 ? null : (at) => groupOf(at) !== chosen;
        for (const other of legend.children) other.setAttribute("aria-pressed", String(other === chip && chosen >= 0));
        plot.draw();
      });
      legend.append(chip);
    }
    roving(legend);
  };
  legendFor();
  const colourBy = (key) => {
    by = key;
    chosen = -1;
    plot.dim = null;
    paletteFor();
    legendFor();
    plot.draw();
  };
  const middle = () => [plot.canvas.clientWidth / 2, plot.canvas.clientHeight / 2];
  const tools = el(
    "div",
    { class: "map-tools" },
    button("+", () => plot.zoomAt(1.6, ...middle()), { class: "tool", "aria-label": "Enlarge the map" }),
    button("\u2212", () => plot.zoomAt(1 / 1.6, ...middle()), { class: "tool", "aria-label": "Make the map smaller" }),
    button("Fit", () => plot.reset(), { class: "tool", "aria-label": "Show the whole map" }),
  );
  const share = contents.map_share === null ? "" : ` It shows ${percent(contents.map_share)} of the variance.`;
  const pca = `The two main directions of the embeddings (PCA).${share}`;
  const how = contents.map_method === "umap" ? "UMAP of the embeddings." : pca;
  const shown = known.length < run.n_images ? ` ${count(known.length)} of the ${count(run.n_images)} images are on it.` : "";
  const head = el("div", { class: "panel-head" }, el("h2", {}, "Map"));
  if (hasLabels) head.append(choice("Colour by", [["cluster", "Cluster"], ["label", "Label"]], by, colourBy));
  return el(
    "section",
    { class: "panel wide" },
    head,
    el("p", { class: "note" }, how + shown),
    el("div", { class: "map" }, plot.canvas, tools),
    legend,
  );
}

/** Size against concentration, one dot a cluster. */
function sizesPanel() {
  const kept = range(clusters.length).filter((i) => clusters[i].size > 0 && clusters[i].concentration > 0);
  if (!kept.length) return null;
  const bounds = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
  };
  const size = bounds(kept.map((i) => clusters[i].size));
  const concentration = bounds(kept.map((i) => clusters[i].concentration));
  const logged = ([low, high]) => high / low > 4;
  const across = scale(...size, 0, 1, logged(size));
  const up = scale(...concentration, 0, 1, logged(concentration));
  let palette = clusters.map((_, i) => rgbOf(i));
  themeWatchers.add(() => (palette = clusters.map((_, i) => rgbOf(i))));
  const readout = el("output", { class: "readout" });
  const spoken = (i) => {
    const { size: n, concentration: kappa } = clusters[kept[i]];
    return `${clusterTitle(kept[i])}: ${plural(n, "image")}, concentration ${figure(kappa)}`;
  };
  const sizes = kept.map((i) => clusters[i].size);
  const plot = new PointPlot({
    xs: kept.map((i) => across(clusters[i].size)),
    ys: kept.map((i) => up(clusters[i].concentration)),
    colour: (i) => palette[kept[i]],
    radius: kept.length > 500 ? 2.5 : kept.length > 80 ? 3.5 : 5,
    padding: [PLOT.left, PLOT.right, PLOT.top, PLOT.bottom],
    zooms: false,
    label:
      `Sizes and concentrations of ${plural(kept.length, "cluster")}: ${count(Math.min(...sizes))} to ` +
      `${count(Math.max(...sizes))} images. Arrow keys go from cluster to cluster, Enter opens it.`,
    onHover: (i) => (readout.textContent = i < 0 ? "" : spoken(i)),
    onOpen: (i) => openCluster(kept[i]),
    describe: spoken,
  });
  const under = el("div", { class: "plot-axes", "aria-hidden": "true" });
  const holder = el("div", { class: "plot scatter" }, under, plot.canvas);
  redrawn(under, (width) => {
    const height = 220;
    const svg = el("svg", { width, height });
    const x = scale(...size, PLOT.left, width - PLOT.right, logged(size));
    axes(svg, x, scale(...concentration, height - PLOT.bottom, PLOT.top, logged(concentration)), width, height);
    svg.append(
      el("text", { class: "tick", x: PLOT.left, y: PLOT.top - 2 }, "concentration"),
      el("text", { class: "tick", x: width - PLOT.right, y: height - PLOT.bottom - 6, "text-anchor": "end" }, "images"),
    );
    under.replaceChildren(svg);
  });
  const caption = el("figcaption", {}, span("chart-title", "Size and concentration"), readout);
  return el("figure", { class: "chart" }, caption, holder);
}

function trainingPanel() {
  const { curves, merge_rounds: rounds } = contents;
  const charts = [];
  const found = curves.n_clusters ?? [];
  if (found.length > 1 || rounds.length) {
    const points = found.length ? found : rounds.map(([epoch, , after]) => [epoch, after]);
    const values = points.map(([, value]) => value);
    const marks = rounds.map(([epoch, before, after]) => [
      epoch,
      after,
      `merged ${count(before)} \u2192 ${count(after)}`,
    ]);
    charts.push(
      lineChart({
        title: "Clusters",
        lines: [{ name: "clusters", points, step: true }],
        marks,
        log: Math.max(...values) > 12 * Math.max(1, Math.min(...values)),
        height: 220,
        words: `${plural(rounds.length, "round")} of merging.`,
      }),
    );
  }
  const sizes = sizesPanel();
  if (sizes) charts.push(sizes);
  const losses = Object.entries(curves).filter(([name]) => /loss/.test(name));
  const styles = ["", "second", "third", "fourth"];
  losses.sort(([a], [b]) => a.length - b.length);
  if (losses.length) {
    const lines = losses.slice(0, 4).map(([name, points], i) => ({ name: words(name), points, style: styles[i] }));
    charts.push(lineChart({ title: "Loss", lines }));
  }
  const quality = /knn|accuracy|agreement|probe|purity|ami|nmi/;
  const telling = (name) => (quality.test(name) ? 0 : /second/.test(name) ? 2 : 1);
  for (const [name, points] of Object.entries(curves).sort(([a], [b]) => telling(a) - telling(b))) {
    if (name === "n_clusters" || /loss/.test(name) || points.length < 2) continue;
    charts.push(lineChart({ title: words(name), lines: [{ name: words(name), points }] }));
  }
  if (!charts.length) return null;
  const grid = el("div", { class: "charts" }, ...charts.slice(0, 4));
  const rest = charts.slice(4);
  const more = rest.length && el(
    "details",
    {},
    el("summary", {}, `${plural(rest.length, "more curve")}`),
    el("div", { class: "charts" }, ...rest),
  );
  return el("section", { class: "panel wide" }, el("h2", {}, "How it was found"), grid, more || "");
}

/** A table that scrolls by itself where it is too wide. */
function tableHolder(caption, head, body, className = "") {
  const table = el(
    "table",
    { class: className },
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, ...head),
    el("tbody", {}, ...body),
  );
  return el("div", { class: "table-holder", tabindex: "0", role: "region", "aria-label": caption }, table);
}

/** A figure of an evaluation: shares to three places even if they are whole, counts as counts. */
function measured(item) {
  if (!item) return DASH;
  const text = item.value >= -1 && item.value <= 1 ? item.value.toFixed(3) : figure(item.value);
  const deviation = item.deviation === null ? "" : span("deviation", ` \u00b1 ${figure(item.deviation)}`);
  return span("", text.replace("-", "\u2212"), deviation);
}

/** Names such as "mixture, test: AMI" are a table of their own: what was measured against what it was measured of. */
function figureTable(names, runs, caption) {
  const parts = names.map((name) => name.split(/: (.*)/s));
  const crossed = parts.every((part) => part.length > 1);
  const tops = crossed ? [...new Set(parts.map(([top]) => top))] : [""];
  const rows = crossed ? [...new Set(parts.map(([, row]) => row))] : names;
  const several = runs.length > 1;
  const head = [];
  if (crossed) {
    const cells = tops.map((top) => el("th", { scope: "colgroup", colspan: runs.length, class: "number" }, words(top)));
    head.push(el("tr", {}, el("td"), ...cells));
  }
  if (several) {
    const cells = tops.flatMap(() => runs.map((one) => el("th", { scope: "col", class: "number" }, named(one.title))));
    head.push(el("tr", {}, el("td"), ...cells));
  }
  const body = rows.map((row) => {
    const cells = tops.flatMap((top) =>
      runs.map((one) => el("td", { class: "number" }, measured(one.figures.get(crossed ? `${top}: ${row}` : row)))),
    );
    return el("tr", {}, el("th", { scope: "row" }, words(row)), ...cells);
  });
  return tableHolder(caption, head, body);
}

/** Figures of one or more runs [{title, figures}], a block for each protocol. */
function figureBlocks(columns) {
  const protocols = [...new Set(columns.flatMap(({ figures }) => figures.map((item) => item.protocol)))];
  const blocks = protocols.map((protocol) => {
    const own = (figures) => figures.filter((item) => item.protocol === protocol);
    const byName = (figures) => new Map(own(figures).map((item) => [item.name, item]));
    const runs = columns.map(({ title, figures }) => ({ title, figures: byName(figures) }));
    const all = columns.flatMap(({ figures }) => own(figures));
    const names = [...new Set(all.map((item) => item.name))];
    const notes = [...new Set(all.map((item) => item.note).filter(Boolean))];
    const wide = names.some((name) => name.includes(": "));
    return el(
      "section",
      { class: `figures${wide ? " wide" : ""}` },
      el("h3", {}, words(protocol)),
      figureTable(names, runs, `Evaluation: ${words(protocol)}`),
      notes.length > 0 &&
        el(
          "details",
          {},
          el("summary", {}, "How this is measured"),
          ...notes.map((text) => el("p", { class: "note" }, ...withCode(text))),
        ),
    );
  });
  return el("div", { class: "figure-blocks" }, ...blocks);
}

function settingsPanel() {
  const groups = new Map();
  for (const [group, name, value] of run.settings) {
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([name, value]);
  }
  const blocks = [...groups].map(([group, pairs]) => {
    const list = el("dl", { class: "settings" }, ...pairs.map(([name, value]) => fact(words(name), named(value))));
    return el("div", { class: "settings-group" }, el("h3", {}, words(group) || "general"), list);
  });
  const when = visible(contents.made).replace("T", " ").slice(0, 16);
  const made = `Made ${when} by siammm ${visible(contents.version)}. Random state ${run.random_state}.`;
  return el(
    "section",
    { class: "panel wide" },
    el("details", {}, el("summary", {}, el("h2", {}, "Settings")), el("div", { class: "settings-groups" }, ...blocks)),
    el("p", { class: "note" }, made),
  );
}

function notesPanel() {
  if (!contents.notes.length) return null;
  return panel(
    "Notes",
    null,
    el("ul", { class: "notes" }, ...contents.notes.map((text) => el("li", {}, el("bdi", {}, ...withCode(text))))),
  );
}

function figuresPanel() {
  // The note that names the command, with the path of this run, says more than this panel could.
  if (!contents.figures.length && contents.notes.some((text) => text.includes("siammm evaluate"))) return null;
  const table = contents.figures.length
    ? figureBlocks([{ title: run.name, figures: contents.figures }])
    : el(
      "p",
      { class: "empty" },
      ...(hasLabels ? ["Not evaluated yet. "] : ["These images have no labels to measure by. With others that have, "]),
      el("code", {}, hasLabels ? "siammm evaluate RUN" : "siammm evaluate RUN --data LABELLED"),
      " measures the encoder; make the report again afterwards.",
    );
  return el("section", { class: "panel" }, el("h2", {}, "Evaluation"), table);
}

sections.set("overview", {
  title: "Overview",
  icon: "M4 12a8 8 0 1 0 8-8v8z",
  build(root) {
    root.append(headline());
    // The rest is below the first screen or drawn by the next frame: the headline does not wait for it.
    requestAnimationFrame(() =>
      setTimeout(() => root.append(...[
        mapPanel(),
        trainingPanel(),
        figuresPanel(),
        notesPanel(),
        settingsPanel(),
      ].filter(Boolean))),
    );
  },
  update() {},
});
