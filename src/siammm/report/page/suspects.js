"use strict";
// Suspect labels: look at each, choose those that are wrong, take the choice away as CSV.

function suspectsCsv(list) {
  const witnesses = [...new Set(contents.suspects.flatMap((suspect) => suspect.evidence.map(([name]) => name)))];
  const lines = [["rank", "image", "given_label", "proposed_label", "score", "cluster", "label_of_group", ...witnesses]];
  for (const { image, rank, score, given, proposed, group_label, evidence } of list) {
    const said = witnesses.map((name) => new Map(evidence).get(name) ?? "");
    const group = group_label < 0 ? "" : labelName(group_label);
    const cluster = images.cluster[image];
    lines.push([rank, images.id[image], labelName(given), labelName(proposed), score, cluster, group, ...said]);
  }
  return csvText(lines);
}

// Where there are no labels, there is nothing to say about them.
if (hasLabels) {
  sections.set("suspects", {
    title: "Suspect labels",
    short: "Suspects",
    icon: "M12 3l10 18H2zM11 10v5h2v-5zM11 16.5v2h2v-2z",
    build(root) {
      const list = contents.suspects;
      if (!list?.length) {
        const later = "The labels were not audited yet. Run `siammm audit RUN`, then make the report again.";
        const asked = contents.notes.find((one) => one.includes("siammm audit")) ?? later;
        const text = list ? "The audit found no label that looks wrong." : asked;
        root.append(head("Suspect labels"), el("p.empty", ...withCode(text)));
        return undefined;
      }
      const chosen = new Set(); // indexes in list
      let shown = [];
      const total = el("p.result", { role: "status" });
      const tally = new Map();
      for (const { given } of list) tally.set(given, (tally.get(given) ?? 0) + 1);
      const classes = [...tally].sort((a, b) => b[1] - a[1]).map(([label, n]) => [label, `${labelName(label)} (${n})`]);
      const options = [["", `All labels (${list.length})`], ...classes];
      const filter = picker(options, "", (label) => adjust({ label }, { replace: true }));
      const every = el("input", { type: "checkbox" });
      const wanted = () => (chosen.size ? list.filter((_, i) => chosen.has(i)) : shown.map((i) => list[i]));
      const save = button("", () => download(suspectsCsv(wanted()), "suspect-labels.csv"), { class: "primary" });
      const witnesses = Math.max(...list.map((suspect) => suspect.evidence.length));
      const disagree = list.some((suspect) => suspect.group_label >= 0);

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
        const { image, evidence, score, ...suspect } = list[i];
        const [given, proposed] = [labelName(suspect.given), labelName(suspect.proposed)];
        const label = visible(`${images.id[image]}: ${given}, more likely ${proposed}`);
        const attributes = { type: "checkbox", "data-focus": true, checked: chosen.has(i), "aria-label": label };
        const box = el("input", attributes);
        box.addEventListener("change", () => {
          chosen[box.checked ? "add" : "delete"](i);
          item.classList.toggle("chosen", box.checked);
          refresh();
        });
        const witness = ([name, value]) =>
          span("witness", span("witness-name", words(name)), meter(value), span("number", figure(value, 2)));
        const arrow = el("span.arrow", { "aria-hidden": "true" }, "\u2192");
        const name = named(images.id[image], "suspect-name");
        const change = span("change", named(given, "given"), arrow, named(proposed, "proposed"));
        const mostly = suspect.group_label < 0 ? "" : visible(`Its group is mostly ${labelName(suspect.group_label)}.`);
        const group = mostly ? [span("suspect-name", mostly)] : [];
        const item = el(
          `label.suspect ${chosen.has(i) ? "chosen" : ""}`,
          box,
          el("span.suspect-image", { "data-image": image }, thumbnailCanvas(image)),
          span("suspect-text", change, name, ...group, span("evidence", ...evidence.map(witness))),
          el("span.score", { title: "How likely the label is wrong" }, percent(score)),
        );
        return item;
      };
      const rowHeight = () => Math.max(112, 76 + 20 * witnesses + 22 * disagree);
      const size = { minWidth: 340, maxColumns: 3, gap: 16, rowHeight };
      const grid = new VirtualGrid({ label: "Suspect labels", ...size, make: card });
      every.addEventListener("change", () => {
        for (const i of shown) chosen[every.checked ? "add" : "delete"](i);
        grid.rebuild();
        refresh();
      });
      const lead = note(
        "Most suspect first. Each bar is the probability that one method of the audit gives the label: ",
        "the shorter the bar, the more it disagrees.",
      );
      const all = el("label.check", every, el("span", "Select all shown"));
      const controls = el("div.controls", field("Given label", filter, "grow"), all, save);
      root.append(head("Suspect labels", total), lead, controls, grid.element);
      let last = null;
      return (params) => {
        const label = params.get("label") ?? "";
        if (label === last) return;
        last = label;
        filter.value = label;
        shown = range(list.length).filter((i) => label === "" || list[i].given === Number(label));
        grid.setKeys(shown);
        refresh();
      };
    },
  });
}
