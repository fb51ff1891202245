"use strict";
// The overview: what was trained, what was found, the map, the curves, the evaluation.

const words = (name) => visible(name).replaceAll("_", " ").replace(/\bknn\b/g, "kNN");
const clusterTitle = (index) => visible(`${clusterName(index)}${majorityWords(clusters[index])}`);

/** The name of a folder or file, without the folders above it, which say nothing of the images. */
const shortName = (path) => (/^(\/|[A-Za-z]:[\\/])/.test(path) && path.split(/[\\/]/).filter(Boolean).pop()) || path;

function headline() {
  const data = shortName(run.data);
  const what = [named(run.method), " trained ", named(run.backbone), " on ", named(data)];
  const size = ` at ${run.image_size}\u00a0px`;
  const trained = [...what, `${size} for ${plural(run.epochs, "epoch")}`, run.seconds && ` in ${duration(run.seconds)}`];
  const encoded = [named(data), ", encoded by ", named(run.backbone), `${size}, clustered without training`];
  const made = run.epochs ? trained : run.backbone ? encoded : [named(data), ", a table, clustered"];
  const unlabelled = run.epochs ? ", without labels." : run.backbone ? " and without labels." : " without labels.";
  const lead = el("p.lead", ...made, hasLabels ? unlabelled : ".");
  const largest = sortedClusters("size", range(clusters.length)).slice(0, 24);
  const items = largest.filter((index) => clusters[index].central.length).map((index) => {
    const title = clusterTitle(index);
    return clusterLink("thumb", index, { "aria-label": title, title }, thumbnailCanvas(clusters[index].central[0]));
  });
  const label = "One image of each of the largest clusters";
  const ribbon = roving(el("div.ribbon", { role: "group", "aria-label": label }, ...items), "a");
  const coarser = hasGroups ? `${plural(groups.length, "group")} and ` : "";
  const text = `${coarser}${plural(run.n_clusters, "cluster")} in ${plural(run.n_images, "image")}`;
  const level = !hasGroups && note(contents.how_found.levels);
  return el("header.hero", el("h1", text), lead, level, ribbon);
}

function panel(title, lead, ...children) {
  return el("section.panel", el("h2", title), lead && note(lead), ...children);
}

function mapPanel() {
  const placed = (row) => Number.isFinite(images.x[row]) && Number.isFinite(images.y[row]);
  const known = range(images.id.length).filter(placed);
  if (!known.length) return null;
  const hasPictures = known.some((row) => images.thumbnail[row] >= 0);
  let [by, chosen, palette] = [hasGroups ? "group" : "cluster", -1, []];
  const groupOf = (i) => images[by][known[i]];
  const nGroups = () => ({ group: groups, cluster: clusters, label: labelNames })[by].length;
  const plot = new PointPlot({
    xs: known.map((row) => images.x[row]),
    ys: known.map((row) => images.y[row]),
    colour: (i) => palette[groupOf(i)] ?? palette[-1],
    radius: clamp(90 / Math.sqrt(known.length), 1.3, 3.2),
    padding: [18, 18, hasPictures ? 72 : 56, 18], // nothing is below the buttons
    label:
      `Map of ${count(known.length)} images. Arrow keys go from image to image, Enter opens its cluster, ` +
      "plus and minus change the scale.",
    onHover: (i, box) => (i < 0 ? hideTip() : showTip(known[i], box)),
    onOpen: (i) => openCluster(images.cluster[known[i]]),
    onSelect: (points) => selection.show(points.map((i) => known[i])),
    picture: hasPictures && ((i) => readyThumbnail(known[i], () => plot.draw())),
    describe: (i) => imageWords(known[i]),
  });
  const pointOf = new Map(known.map((row, i) => [row, i]));
  const chooseRows = (rows) => plot.select(rows.filter((row) => pointOf.has(row)).map((row) => pointOf.get(row)));
  const selection = selectionPanel(() => plot.select([]), chooseRows);
  const legend = roving(el("div.chips", { role: "group" }));
  const chip = (i) => {
    const press = () => {
      chosen = chosen === i ? -1 : i;
      plot.dim = chosen < 0 ? null : (at) => groupOf(at) !== chosen;
      for (const other of legend.children) other.setAttribute("aria-pressed", String(other === made && chosen >= 0));
      plot.draw();
    };
    const attributes = { type: "button", "aria-pressed": String(i === chosen), on: { click: press } };
    if (by === "cluster") attributes["aria-label"] = visible(clusterName(i));
    const names = { group: () => named(groupName(i)), cluster: () => clusterChip(i), label: () => named(labelName(i)) };
    const made = el("button.chip", attributes, dot(i), names[by]());
    return made;
  };
  const colours = () => {
    palette = range(nGroups()).map(rgbOf);
    palette[-1] = rgbOf(-1);
    legend.setAttribute("aria-label", `Show one ${by}`);
    legend.replaceChildren(...(nGroups() > 40 ? [] : range(nGroups()).map(chip)));
    legend.resetRoving();
  };
  colours();
  themeWatchers.add(colours);
  const colourBy = (key) => {
    [by, chosen, plot.dim] = [key, -1, null];
    colours();
    plot.draw();
  };
  const tool = (text, action, label) => button(text, action, { class: "tool", "aria-label": label });
  const chooses = { class: "tool", "aria-pressed": "false", title: "Draw a line around images to select them" };
  const choose = button("Select", () => {
    plot.setLasso(!plot.lasso);
    choose.setAttribute("aria-pressed", String(plot.lasso));
    if (plot.lasso) announce("Draw a line around images to select them, or press Enter on an image.");
    else plot.select([]);
  }, chooses);
  const pictures = button("Images", () => {
    plot.pictures = !plot.pictures;
    pictures.setAttribute("aria-pressed", String(plot.pictures));
    plot.draw();
  }, { class: "tool", "aria-pressed": "true", title: "Show images on the map where there is room" });
  const tools = el(
    "div.map-tools",
    hasPictures && pictures,
    choose,
    tool("+", () => plot.zoomAt(1.6), "Enlarge the map"),
    tool("\u2212", () => plot.zoomAt(1 / 1.6), "Make the map smaller"),
    tool("Fit", () => plot.reset(), "Show the whole map"),
  );
  const share = contents.map_share === null ? "" : ` It shows ${percent(contents.map_share)} of the variance.`;
  const pca = `The first two principal components of the embeddings (PCA).${share}`;
  const how = contents.map_method === "umap" ? "UMAP of the embeddings." : pca;
  const part = known.length < run.n_images && ` ${count(known.length)} of the ${count(run.n_images)} images are shown.`;
  const options = [hasGroups && ["group", "Group"], ["cluster", "Cluster"], hasLabels && ["label", "Label"]];
  const given = options.filter(Boolean);
  const top = el("div.panel-head", el("h2", "Map"), given.length > 1 && choice("Colour by", given, by, colourBy));
  return el("section.panel.wide", top, note(how, part), el("div.map", plot.canvas, tools), legend, selection.element);
}

/** The images that were chosen on the map: how many, what they look like, a table to take away, and those kept before. */
function selectionPanel(clear, choose) {
  let rows = [];
  const total = el("h3", { role: "status" });
  const name = el("input", { type: "text", maxlength: 80, autocomplete: "off", dir: "auto" });
  const save = () => {
    const lines = rows.map((row) => [name.value.trim(), ...imageCells(row)]);
    download(csvText([["selection", ...IMAGE_COLUMNS], ...lines]), `${fileName(name.value) || "selection"}.csv`);
  };
  const status = note({ role: "status" });
  const kept = el("div.kept");
  const listKept = () => {
    const chips = contents.selections.map(({ name: own, images: chosen }) => {
      const open = () => {
        name.value = own;
        choose(chosen);
      };
      return button([named(own), ` ${count(chosen.length)}`], open, { class: "chip" });
    });
    kept.replaceChildren(...(chips.length ? [el("h3", "Kept selections"), el("div.chips", ...chips)] : []));
  };
  const keep = async (positions, said) => {
    try {
      const body = JSON.stringify({ name: name.value, images: positions });
      contents.selections = (await send("selection", "application/json", body)).selections;
      status.textContent = said;
      listKept();
    } catch (error) {
      status.textContent = error.message;
    }
  };
  const inRun = "Kept in the run folder; siammm sort --by selection makes a folder of it.";
  const tools = [
    live && button("Keep", () => keep(rows.map((row) => images.position[row]), inRun), { class: "primary" }),
    button("Download CSV", save, { class: live ? "tool" : "primary" }),
    live && button("Forget", () => keep([], "It is not kept any more."), { class: "tool", title: "Forget the kept selection of this name" }),
    button("Clear", clear, { class: "tool" }),
  ].filter(Boolean);
  const controls = el("div.controls", field("Name", name, "grow"), ...tools);
  const shown = el("div");
  const current = el("section.selection", { hidden: true }, total, controls, status, shown);
  listKept();
  return {
    element: el("div", kept, current),
    show(chosen) {
      rows = chosen;
      current.hidden = !rows.length;
      status.textContent = "";
      total.textContent = rows.length ? `${plural(rows.length, "image")} selected` : "";
      shown.replaceChildren(...(rows.length ? [moreThumbnails(rows, "Selected images")] : []));
    },
  };
}

/** Size against concentration, one dot per cluster. */
function sizesPanel() {
  const kept = range(clusters.length).filter((i) => clusters[i].size > 0 && clusters[i].concentration > 0);
  if (!kept.length) return null;
  const sizes = kept.map((i) => clusters[i].size);
  const concentrations = kept.map((i) => clusters[i].concentration);
  const axis = (values) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const bounds = low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.04, high * (high / low) ** 0.04];
    return (from, to) => scale(...bounds, from, to, bounds[1] / bounds[0] > 4);
  };
  const [across, up] = [axis(sizes), axis(concentrations)];
  let palette = [];
  const colours = () => (palette = kept.map(rgbOf));
  colours();
  themeWatchers.add(colours);
  const readout = el("output.readout");
  const spoken = (i) =>
    `${clusterTitle(kept[i])}: ${plural(sizes[i], "image")}, concentration ${figure(concentrations[i])}`;
  const plot = new PointPlot({
    xs: sizes.map(across(0, 1)),
    ys: concentrations.map(up(0, 1)),
    colour: (i) => palette[i],
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
  const under = el("div.plot-axes", { "aria-hidden": "true" });
  redrawn(under, (width) => {
    const height = 220;
    const [right, bottom] = [width - PLOT.right, height - PLOT.bottom];
    const svg = el("svg", { width, height });
    axes(svg, across(PLOT.left, right), up(bottom, PLOT.top), width, height);
    svg.append(
      el("text.tick", { x: PLOT.left, y: PLOT.top - 2 }, "concentration"),
      el("text.tick", { x: right, y: bottom - 6, "text-anchor": "end" }, "images"),
    );
    under.replaceChildren(svg);
  });
  return captioned("Size and concentration", readout, el("div.plot.scatter", under, plot.canvas));
}

/** How the number of clusters came about, and the curves of training: for those who ask. */
function howPanel() {
  const { number, levels } = contents.how_found;
  const text = [number, levels].map((sentence) => el("p.how", visible(sentence)));
  const inside = [el("summary", el("h2", "How it was found")), ...text, charts()];
  return el("section.panel.wide", el("details.how-found", ...inside));
}

function charts() {
  const { curves, merge_rounds: rounds } = contents;
  const all = [];
  const found = curves.n_clusters ?? [];
  if (found.length > 1 || rounds.length) {
    const points = found.length ? found : rounds.map(([epoch, , after]) => [epoch, after]);
    const merged = ([epoch, before, after]) => [epoch, after, `merged ${count(before)} \u2192 ${count(after)}`];
    const [lines, marks] = [[{ name: "clusters", points, step: true }], rounds.map(merged)];
    const spoken = `${plural(rounds.length, "round")} of merging.`;
    all.push(lineChart({ title: "Clusters", lines, marks, height: 220, words: spoken }));
  }
  all.push(sizesPanel());
  const losses = Object.entries(curves).filter(([name]) => /loss/.test(name));
  const styles = ["", "second", "third", "fourth"];
  losses.sort(([a], [b]) => a.length - b.length);
  if (losses.length) {
    const lines = losses.slice(0, 4).map(([name, points], i) => ({ name: words(name), points, style: styles[i] }));
    all.push(lineChart({ title: "Loss", lines }));
  }
  const quality = /knn|accuracy|agreement|probe|purity|ami|nmi/;
  const telling = (name) => (quality.test(name) ? 0 : /second/.test(name) ? 2 : 1);
  for (const [name, points] of Object.entries(curves).sort(([a], [b]) => telling(a) - telling(b))) {
    if (name === "n_clusters" || /loss/.test(name) || points.length < 2) continue;
    all.push(lineChart({ title: words(name), lines: [{ name: words(name), points }] }));
  }
  return el("div.charts", ...all.filter(Boolean));
}

/** A table that scrolls by itself where it is too wide. */
function tableHolder(caption, head, body, className = "") {
  const parts = [el("caption.unseen", caption), el("thead", ...head), el("tbody", ...body)];
  const attributes = { tabindex: "0", role: "region", "aria-label": caption };
  return el("div.table-holder", attributes, el(`table.${className}`, ...parts));
}

/** A figure of an evaluation: fractions to three places even if they are whole, counts as counts. */
function measured(item) {
  if (!item) return DASH;
  const text = item.value >= -1 && item.value <= 1 ? item.value.toFixed(3) : figure(item.value);
  const deviation = item.deviation !== null && span("deviation", ` \u00b1 ${figure(item.deviation)}`);
  return span("", text.replace("-", "\u2212"), deviation);
}

/** Names such as "mixture, test: AMI" make a table of their own: a column for each part before the colon. */
function figureTable(names, runs, caption) {
  const parts = names.map((name) => name.split(/: (.*)/s));
  const crossed = parts.every((part) => part.length > 1);
  const tops = crossed ? [...new Set(parts.map(([top]) => top))] : [""];
  const rows = crossed ? [...new Set(parts.map(([, row]) => row))] : names;
  const line = (cells) => el("tr", el("td"), ...cells);
  const top = (text) => el("th.number", { scope: "colgroup", colspan: runs.length }, words(text));
  const titles = () => runs.map((one) => el("th.number", { scope: "col" }, named(one.title)));
  const head = [crossed && line(tops.map(top)), runs.length > 1 && line(tops.flatMap(titles))];
  const body = rows.map((row) => {
    const cells = tops.flatMap((column) =>
      runs.map((one) => el("td.number", measured(one.figures.get(crossed ? `${column}: ${row}` : row)))),
    );
    return el("tr", el("th", { scope: "row" }, words(row)), ...cells);
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
    const wide = names.some((name) => name.includes(": ")) ? "wide" : "";
    const table = figureTable(names, runs, `Evaluation: ${words(protocol)}`);
    const how = [el("summary", "How this is measured"), ...notes.map((text) => note(...withCode(text)))];
    return el(`section.figures ${wide}`, el("h3", words(protocol)), table, notes.length > 0 && el("details", ...how));
  });
  return el("div.figure-blocks", ...blocks);
}

function settingsPanel() {
  const groups = [...new Set(run.settings.map(([group]) => group))];
  const blocks = groups.map((group) => {
    const own = run.settings.filter(([other]) => other === group);
    const facts = own.map(([, name, value]) => fact(words(name), named(value)));
    return el("div.settings-group", el("h3", words(group) || "general"), el("dl.settings", ...facts));
  });
  const when = visible(contents.made).replace("T", " ").slice(0, 16);
  return el(
    "section.panel.wide",
    el("details", el("summary", el("h2", "Settings")), el("div.settings-groups", ...blocks)),
    note(`Made ${when} by siammm ${visible(contents.version)}. Random state ${run.random_state}.`),
  );
}

function notesPanel() {
  const items = contents.notes.map((text) => el("li", el("bdi", ...withCode(text))));
  return items.length ? panel("Notes", null, el("ul.notes", ...items)) : null;
}

function figuresPanel() {
  if (!run.backbone) return null; // a table was clustered, and there is no encoder to measure
  if (contents.figures.length) {
    return panel("Evaluation", null, figureBlocks([{ title: run.name, figures: contents.figures }]));
  }
  // The note that names the command, with the path of this run, says more than this panel could.
  if (!hasLabels || contents.notes.some((text) => text.includes("siammm evaluate"))) return null;
  const after = " measures the encoder; make the report again afterwards.";
  return panel("Evaluation", null, el("p.empty", "Not evaluated yet. ", el("code", "siammm evaluate RUN"), after));
}

sections.set("overview", {
  title: "Overview",
  icon: "M4 12a8 8 0 1 0 8-8v8z",
  build(root) {
    root.append(headline());
    // The rest is below the first screen or drawn by the next frame: the headline does not wait for it.
    const rest = () => [mapPanel(), figuresPanel(), notesPanel(), howPanel(), settingsPanel()].filter(Boolean);
    requestAnimationFrame(() => setTimeout(() => root.append(...rest())));
  },
});
