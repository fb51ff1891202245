"use strict";
// Images that somebody should look at, whatever they show: near duplicates, blurred, dark and other odd ones.

// Title, explanation, and the column of the table.
const ODD_KINDS = {
  blurred: ["Blurred", "Sharp edges are missing everywhere.", "blur"],
  dark: ["Dark", "Even the lightest parts are dark.", "brightness"],
  bright: ["Bright", "Even the darkest parts are light.", "brightness"],
  plain: ["Without contrast", "Hardly anything can be seen in them.", "contrast"],
  shape: ["Odd shape", "Much wider or taller than the others.", "aspect"],
  size: ["Odd size", "Much smaller or larger than the others.", "side"],
};
const MOST_OUTLIERS = 120;
const sizeText = ([width, height]) => `${count(width)}\u00a0\u00d7\u00a0${count(height)}`;

/** One kind of finding: what it is, a button for its table, and its images. */
function finding(title, n, why, file, lines, ...children) {
  const attributes = { class: "tool", "aria-label": `Download CSV: ${title}` };
  const save = button("Download CSV", () => download(csvText(lines()), file), attributes);
  const top = el("div.panel-head", el("h2", title, " ", span("result", count(n))), save);
  return el("section.panel.finding", top, note(why), ...children);
}

/** The sets of near duplicates, the largest first; more of them when they are asked for. */
function duplicateList(sets) {
  const items = ({ images: rows, similarities, sizes }) => {
    const names = rows.map((row, i) => {
      const like = i ? `, similarity ${figure(similarities[i], 2)}` : "";
      return el("li", named(images.id[row]), span("note", `${sizeText(sizes[i])}${like}`));
    });
    const shown = thumbnailRow(rows, plural(rows.length, "near duplicate"), null, "large");
    return el("li.duplicate-set", shown, el("ul.names", ...names));
  };
  const list = el("ul.duplicate-sets");
  lazyList(list, sets.map((set) => () => items(set)));
  return list;
}

function duplicatesPanel(sets) {
  const why =
    "Images that are nearly the same: copies, other sizes, edited or mirrored versions. Both the embeddings and a " +
    "perceptual hash say so. The largest image of each set comes first.";
  const lines = () => [
    ["set", ...IMAGE_COLUMNS, "similarity", "width", "height"],
    ...sets.flatMap(({ images: rows, similarities, sizes }, set) =>
      rows.map((row, i) => [set, ...imageCells(row), similarities[i], ...sizes[i]]),
    ),
  ];
  return finding("Near duplicates", sets.length, why, "near-duplicates.csv", lines, duplicateList(sets));
}

function oddPanel({ kind, images: rows, values, sizes }) {
  const [title, why, column] = ODD_KINDS[kind];
  const lines = () => [
    [...IMAGE_COLUMNS, column, "width", "height"],
    ...rows.map((row, i) => [...imageCells(row), values[i], ...sizes[i]]),
  ];
  const file = title.toLowerCase().replaceAll(" ", "-");
  return finding(title, rows.length, why, `${file}.csv`, lines, moreThumbnails(rows, title));
}

function outliersPanel() {
  const rows = range(images.id.length).filter((row) => images.cluster[row] >= 0);
  rows.sort((a, b) => images.outlier_score[b] - images.outlier_score[a] || a - b);
  const shown = rows.slice(0, Math.min(MOST_OUTLIERS, Math.ceil(rows.length / 20)));
  const line = (row) => [...imageCells(row), images.outlier_score[row]];
  const lines = () => [[...IMAGE_COLUMNS, "outlier_score"], ...shown.map(line)];
  const why = "Images that the clusters explain least, the most unusual first. There are always some.";
  return finding("Outliers", shown.length, why, "outliers.csv", lines, moreThumbnails(shown, "Outliers"));
}

function qualityParts(quality) {
  const { duplicates, odd, n_images: seen } = quality;
  const there = odd.filter(({ kind, images: rows }) => rows.length && kind in ODD_KINDS);
  const none = odd.filter(({ images: rows }) => !rows.length).map(({ kind }) => ODD_KINDS[kind][0].toLowerCase());
  if (!duplicates.length) none.unshift("near duplicates");
  const all = seen === run.n_images ? `All ${count(seen)} images` : `${count(seen)} of ${count(run.n_images)} images`;
  const rule = " An image is listed if it is odd by a fixed limit and unusual among the others.";
  const clean = none.length ? ` Nothing was found under: ${none.join(", ")}.` : "";
  return [
    el("p.lead.small", all, " were looked at.", rule, clean),
    duplicates.length > 0 && duplicatesPanel(duplicates),
    ...there.map(oddPanel),
    outliersPanel(),
  ].filter(Boolean);
}

// A page from disk holds what was found; `siammm explore` looks when it is first asked.
if (contents.quality || (live && thumbs.sheets.length)) {
  sections.set("quality", {
    title: "Image quality",
    short: "Quality",
    icon: "M10 3a7 7 0 0 1 5.6 11.2l5.6 5.6-1.4 1.4-5.6-5.6A7 7 0 1 1 10 3zm-1 3v5h2V6zm0 6v2h2v-2z",
    build(root) {
      const body = el("div");
      root.append(head("Image quality"), body);
      if (contents.quality) return void body.append(...qualityParts(contents.quality));
      const status = note({ role: "status" }, "Looking at the images \u2026");
      body.append(status);
      ask("quality").then(
        (found) => body.replaceChildren(...qualityParts(found)),
        (error) => (status.textContent = error.message),
      );
      return undefined;
    },
  });
}
