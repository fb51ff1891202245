"use strict";
// The groups: one card for each, and the view of one, with its images and its clusters. The images of a group are its own:
// a cluster stands with the group that most of its images are in, and may have some in others.

/** What stands on a group, in one line. */
function groupFacts({ size, clusters: own }) {
  return `${plural(size, "image")} \u00b7 ${percent(size / run.n_images)} \u00b7 ${plural(own.length, "cluster")}`;
}

const groupAddress = (group) => address("groups", { group });
const groupLink = (group) => el("a", { href: groupAddress(group) }, named(groupName(group)));

function groupCard(group, width) {
  const { name, central, label, purity, label_counts: counts } = groups[group];
  const own = name ? named(name, "card-label") : majority(label, "card-label");
  const share = !name && hasLabels && purity !== null && span("card-purity", percent(purity));
  const facts = groupFacts(groups[group]);
  const mixed = groups[group].is_catch_all;
  const words = [facts.replaceAll(" \u00b7", ","), mixed && "a catch-all"].filter(Boolean).join(", ");
  const spoken = visible(`${groupName(group)}${majorityWords(groups[group])}, ${words}`);
  return el(
    "a.card",
    { href: groupAddress(group), "data-focus": true, "data-group": group, "aria-label": spoken },
    wallMosaic(central, width),
    span("card-line", dot(group), span(own.textContent ? "card-number" : "card-label", `Group ${group}`), own, share),
    span("card-facts", facts, mixed && catchAllBadge()),
    hasLabels && counts.length > 0 && labelBar(groups[group]),
  );
}

/** The rows of a group's images: those that stand for it first, then the others, the least certain last, or the
 * most unusual ones where that is not known. */
function groupRows(group) {
  const { central } = groups[group];
  const first = new Set(central);
  const others = range(images.id.length).filter((row) => images.group[row] === group && !first.has(row));
  const sure = images.group_probability;
  const score = (row) => (sure.length ? -sure[row] : images.outlier_score[row]);
  return [...central, ...others.sort((a, b) => score(a) - score(b) || a - b)];
}

/** The view of one group: its images, and its clusters. One view shows each group in turn. */
class GroupView {
  constructor() {
    this.group = -1;
    this.title = el("h1", { tabindex: "-1" });
    this.facts = el("p.result");
    this.here = el("span", { "aria-current": "true" });
    this.mixed = el("div");
    this.naming = el("div");
    this.labels = el("div");
    this.images = el("section.strip");
    this.clusters = el("p.note");
    const mark = el("span.crumb-mark", { "aria-hidden": "true" }, "\u203a");
    const back = el("a", { href: address("groups") }, "All groups");
    const crumbs = el("nav.crumbs", { "aria-label": "Groups" }, back, mark, this.here);
    const size = { minWidth: 216, gap: 26, rowHeight: cardHeight };
    this.grid = new VirtualGrid({ label: "Clusters of the group", ...size, make: clusterCard });
    const top = el("header.head.group-head", this.title, this.facts);
    const inside = el("section.group-clusters", el("h2", "Clusters"), this.clusters, this.grid.element);
    this.element = el("div", { hidden: true }, crumbs, top, this.mixed, this.naming, this.images, inside, this.labels);
  }

  write() {
    this.title.replaceChildren(dot(this.group), named(groupName(this.group)));
    this.here.replaceChildren(named(groupName(this.group)));
  }

  show(group) {
    this.group = group;
    const { clusters: own, label_counts: counts, size, n_in_clusters: inside } = groups[group];
    this.write();
    const rows = groupRows(group);
    const some = rows.length < size && `${count(rows.length)} of its ${count(size)} images are on this page.`;
    const more = live && rows.length < size && morePages(`group/${group}`);
    const sure = images.group_probability.length > 0 && rows.length > groups[group].central.length;
    const last = sure && "The images that are least certain to belong here come last.";
    const words = [last, some].filter(Boolean).join(" ");
    const parts = [el("h2", "Images"), words && note(words), moreThumbnails(rows, "Images of the group"), more];
    this.images.replaceChildren(...parts.filter(Boolean));
    const elsewhere = inside < size && ` ${plural(size - inside, "image")} of the group ${size - inside === 1 ? "is" : "are"} in clusters of others.`;
    this.clusters.textContent = `Those with most of their images in this group.${elsewhere || ""}`;
    this.facts.textContent = groupFacts(groups[group]);
    this.mixed.replaceChildren(...(groups[group].is_catch_all ? [catchAllWords(groups[group], "group")] : []));
    if (live) this.naming.replaceChildren(nameForm(group, () => this.write()));
    const table = hasLabels && counts.length > 0 && panel("Labels", null, labelTable(groups[group]));
    this.labels.replaceChildren(...(table ? [table] : []));
    this.grid.active = 0;
    this.grid.setKeys(own);
  }
}

if (hasGroups) {
  sections.set("groups", {
    title: "Groups",
    icon: "M3 5h8v6H3zM13 5h8v6h-8zM3 13h5v6H3zM10 13h5v6h-5zM17 13h4v6h-4z",
    build(root) {
      const title = `${plural(groups.length, "group")} in ${plural(run.n_images, "image")}`;
      const held = `There are ${plural(clusters.length, "cluster")}, which are finer.`;
      const how = " Open a group to see its images and its clusters.";
      const rowHeight = (width) => wallHeight(width) + (hasLabels ? 70 : 58);
      const grid = new VirtualGrid({ label: "Groups", minWidth: 300, gap: 28, rowHeight, make: groupCard });
      const all = el("div", el("header.hero", el("h1", title), el("p.lead", held, how)), grid.element);
      const one = new GroupView();
      root.append(all, one.element);
      const order = range(groups.length).sort((a, b) => groups[b].size - groups[a].size || a - b);
      grid.setKeys(order);
      themeWatchers.add(() => [grid, one.grid].forEach((each) => each.rebuild()));
      let [shown, top] = [-1, 0]; // the group that is open, and how far the others were scrolled
      return (params) => {
        const asked = Number(params.get("group") ?? -1);
        const group = Number.isInteger(asked) && asked >= 0 && asked < groups.length ? asked : -1;
        sections.get("groups").shown = group < 0 ? null : groups[group].clusters;
        if (group === shown) return;
        const before = shown;
        if (before < 0) top = scrollY;
        shown = group;
        all.hidden = group >= 0;
        one.element.hidden = group < 0;
        // Whoever opens a group is at its title, whoever comes back at its card.
        if (group >= 0) {
          one.show(group);
          scrollTo({ top: 0, behavior: "instant" });
          one.title.focus({ preventScroll: true });
        } else {
          scrollTo({ top, behavior: "instant" });
          grid.focus(order.indexOf(before));
        }
      };
    },
  });
}
