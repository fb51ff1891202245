"use strict";
// Suspect labels: look at each, choose those that are wrong, take the choice away as CSV.

/** A field of a CSV file. Text that a spreadsheet would take for a formula gets an apostrophe in front. */
function csvField(value) {
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) || /^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function suspectsCsv(list) {
  const witnesses = [...new Set(contents.suspects.flatMap((suspect) => suspect.evidence.map(([name]) => name)))];
  const lines = [["rank", "image", "given_label", "proposed_label", "score", "cluster", ...witnesses]];
  for (const suspect of list) {
    const evidence = new Map(suspect.evidence);
    const { image } = suspect;
    const said = witnesses.map((name) => evidence.get(name) ?? "");
    lines.push([
      suspect.rank,
      images.id[image],
      labelName(suspect.given),
      labelName(suspect.proposed),
      suspect.score,
      images.cluster[image],
      ...said,
    ]);
  }
  const text = lines.map((line) => line.map(csvField).join(",")).join("\r\n") + "\r\n";
  // Excel needs a byte order mark to read UTF-8; plain ASCII needs none, and other readers are better off without.
  return /^[\x00-\x7f]*$/.test(text) ? text : `\ufeff${text}`;
}

function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

sections.set("suspects", {
  title: "Suspect labels",
  short: "Suspects",
  icon: "M12 3l10 18H2zM11 10v5h2v-5zM11 16.5v2h2v-2z",
  build(root) {
    const list = contents.suspects;
    const head = el("header", { class: "head" }, el("h1", {}, "Suspect labels"));
    root.append(head);
    if (!list || !list.length) {
      const advice = contents.notes.find((note) => note.includes("siammm audit"));
      const text = list
        ? ["The audit found no label that looks wrong."]
        : hasLabels
          ? advice
            ? withCode(advice)
            : [
              "The labels were not audited yet. Run ",
              el("code", {}, "siammm audit RUN"),
              ", then make the report again.",
            ]
          : [
            "These images have no labels. With labels, ",
            el("code", {}, "siammm audit RUN"),
            " finds those that look wrong.",
          ];
      root.append(el("p", { class: "empty" }, ...text));
      return;
    }
    const chosen = new Set(); // indexes in list
    let shown = [];
    const total = el("p", { class: "result", role: "status" });
    head.append(total);
    const tally = new Map();
    for (const { given } of list) tally.set(given, (tally.get(given) ?? 0) + 1);
    const classes = [...tally].sort((a, b) => b[1] - a[1]).map(([label, n]) => [label, `${labelName(label)} (${n})`]);
    const filter = picker(
      [["", `All labels (${list.length})`], ...classes],
      "",
      (label) => adjust({ label }, { replace: true }),
    );
    const every = el("input", { type: "checkbox" });
    const save = button(
      "",
      () => download(
        suspectsCsv(chosen.size ? list.filter((_, i) => chosen.has(i)) : shown.map((i) => list[i])),
        "suspect-labels.csv",
      ),
      { class: "primary" },
    );
    const witnesses = Math.max(...list.map((suspect) => suspect.evidence.length));

    const refresh = () => {
      const here = shown.filter((i) => chosen.has(i)).length;
      every.checked = here > 0 && here === shown.length;
      every.indeterminate = here > 0 && here < shown.length;
      const what = chosen.size ? `${count(chosen.size)} selected` : `all ${count(shown.length)} shown`;
      save.textContent = `Download ${what} (CSV)`;
      const part = shown.length < list.length ? ` of ${count(list.length)}` : "";
      total.textContent = `${count(shown.length)}${part}${chosen.size ? ` \u00b7 ${what}` : ""}`;
    };

    const card = (i) => {
      const suspect = list[i];
      const box = el("input", { type: "checkbox", "data-focus": true, checked: chosen.has(i) });
      box.setAttribute(
        "aria-label",
        visible(`${images.id[suspect.image]}: ${labelName(suspect.given)}, more likely ${labelName(suspect.proposed)}`),
      );
      const item = el("label", { class: "suspect", "data-image-holder": true });
      item.classList.toggle("chosen", chosen.has(i));
      box.addEventListener("change", () => {
        chosen[box.checked ? "add" : "delete"](i);
        item.classList.toggle("chosen", box.checked);
        refresh();
      });
      const evidence = el(
        "span",
        { class: "evidence" },
        ...suspect.evidence.map(([name, value]) => span(
          "witness",
          span("witness-name", words(name)),
          meter(value),
          span("number", figure(value, 2)),
        )),
      );
      item.append(
        box,
        el("span", { class: "suspect-image", "data-image": suspect.image }, thumbnailCanvas(suspect.image)),
        el(
          "span",
          { class: "suspect-text" },
          span(
            "change",
            named(labelName(suspect.given), "given"),
            el("span", { class: "arrow", "aria-hidden": "true" }, "\u2192"),
            named(labelName(suspect.proposed), "proposed"),
          ),
          named(images.id[suspect.image], "suspect-name"),
          evidence,
        ),
        el("span", { class: "score", title: "How likely the label is wrong" }, percent(suspect.score)),
      );
      return item;
    };
    const grid = new VirtualGrid({
      label: "Suspect labels",
      minWidth: 340,
      maxColumns: 3,
      gap: 16,
      rowHeight: () => Math.max(112, 76 + 20 * witnesses),
      make: card,
    });
    every.addEventListener("change", () => {
      for (const i of shown) chosen[every.checked ? "add" : "delete"](i);
      grid.rebuild();
      refresh();
    });
    root.append(
      el(
        "p",
        { class: "note" },
        "Most suspect first. The bars say how probable each witness finds the given label: " +
          "the shorter, the more it disagrees.",
      ),
      el(
        "div",
        { class: "controls" },
        field("Given label", filter, "grow"),
        el("label", { class: "check" }, every, el("span", {}, "Select all shown")),
        save,
      ),
      grid.element,
    );
    let last = null;
    this.update = (params) => {
      const label = params.get("label") ?? "";
      if (label === last) return;
      last = label;
      filter.value = label;
      shown = range(list.length).filter((i) => label === "" || list[i].given === Number(label));
      grid.setKeys(shown);
      refresh();
    };
  },
  update() {},
});
