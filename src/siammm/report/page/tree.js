"use strict";
// The merge tree: joins of the found clusters up to one, and splits of them down to finer parts, cut at any number K.

/** What the flat tree does not say: parents, order of leaves, and which parts a cut makes. */
class TreeShape {
  constructor({ n_leaves: n, left, right, height, size }) {
    this.n = n;
    this.root = n + left.length - 1;
    this.left = (node) => left[node - n];
    this.right = (node) => right[node - n];
    this.isLeaf = (node) => node < n;
    this.height = (node) => (node < n ? 0 : height[node - n]);
    this.parent = new Int32Array(n + left.length).fill(-1);
    for (const children of [left, right]) children.forEach((child, i) => (this.parent[child] = n + i));
    const leaves = new Int32Array(n + left.length).fill(1); // below each node; a join comes after what it joins
    left.forEach((child, i) => (leaves[n + i] = leaves[child] + leaves[right[i]]));
    this.from = new Int32Array(n + left.length);
    for (let node = this.root; node >= n; node--) {
      const [a, b] = [this.left(node), this.right(node)];
      const [first, second] = size[a] >= size[b] ? [a, b] : [b, a]; // larger branches to the left
      this.from[first] = this.from[node];
      this.from[second] = this.from[node] + leaves[first];
    }
    this.to = this.from.map((at, node) => at + leaves[node]);
  }

  /** The parts that K makes: undoing the last K - 1 joins leaves the nodes below them. */
  cut(k) {
    const limit = this.root - (k - 1); // nodes above this one are undone
    const isPart = (node) => node === this.root || this.parent[node] > limit;
    return range(limit + 1).filter(isPart).sort((a, b) => this.from[a] - this.from[b]);
  }

  /** The two branches of a node, the larger one first. */
  children(node) {
    const [a, b] = [this.left(node), this.right(node)];
    return this.from[a] < this.from[b] ? [a, b] : [b, a];
  }

  within(node, top) {
    return this.from[node] >= this.from[top] && this.to[node] <= this.to[top];
  }
}

/** Lines of the tree, apart for each group, so that the branches of a group have its colour. */
class GroupPaths {
  constructor() {
    this.paths = new Map(); // group, or -1 for what joins several -> path
  }

  of(node) {
    const group = hasGroups ? tree.group[node] : -1;
    if (!this.paths.has(group)) this.paths.set(group, new Path2D());
    return this.paths.get(group);
  }

  each(stroke) {
    for (const [group, path] of this.paths) stroke(path, group < 0 ? null : colourOf(group));
  }
}

class Dendrogram {
  constructor(shape, { onOpen, onHover }) {
    Object.assign(this, { shape, onOpen, onHover });
    const label =
      "Merge tree. Up goes to the join above, down to the larger branch, left and right to the other branch; " +
      "Enter enlarges it.";
    const role = { role: "application", "aria-roledescription": "tree" };
    this.canvas = el("canvas.dendrogram", { tabindex: "0", ...role, "aria-label": label });
    Object.assign(this, { top: shape.root, k: 1, current: -1 });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    themeWatchers.add(() => this.draw());
    this.listen();
  }

  show(top, k, parts) {
    Object.assign(this, { top, k, parts, current: -1 });
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.pending);
    this.pending = requestAnimationFrame(() => this.render());
  }

  layout() {
    const { shape, top, canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const under = this.thumbSize(width);
    const first = shape.from[top];
    const n = Math.max(1, shape.to[top] - first);
    const [left, right, above, below] = [14, 14, 18, under ? under + 22 : 12];
    const wide = width - left - right;
    const most = Math.max(shape.height(top), 1e-9);
    // Heights by their square root: the many low joins would else lie on each other.
    const y = (node) => above + (1 - Math.sqrt(Math.max(0, shape.height(node)) / most)) * (height - above - below);
    const x = (node) => left + ((shape.from[node] + shape.to[node]) / 2 - first) * (wide / n);
    return { x, y, width, height, below, under, first, n, left, wide };
  }

  /** How large the examples under the parts can be, if at all. */
  thumbSize(width) {
    const { shape, top, parts } = this;
    const inside = parts.filter((node) => shape.within(node, top));
    const wide = width - 28;
    if (!inside.length || wide / inside.length < 22) return 0;
    const n = shape.to[top] - shape.from[top];
    const middles = inside.map((node) => ((shape.from[node] + shape.to[node]) / 2) * (wide / n)).sort((a, b) => a - b);
    const least = Math.min(...middles.map((at, i) => (i ? at - middles[i - 1] : Infinity)));
    return clamp(Math.floor(least) - 3, 22, 44);
  }

  render() {
    const { canvas, shape, top, k } = this;
    const ratio = fitCanvas(canvas);
    if (!ratio) return;
    const context = canvas.getContext("2d");
    context.reset();
    context.scale(ratio, ratio);
    const view = (this.view = this.layout());
    const { x, y, width, height } = view;
    const limit = shape.root - (k - 1);
    // The cut lies between the last join that is undone and the first that is not.
    const crossed = top > limit;
    const [upper, lower] = [crossed ? y(limit + 1) : 0, limit >= shape.n ? y(limit) : height - view.below];
    const level = crossed ? clamp((upper + Math.max(upper, lower)) / 2, 10, height - view.below) : 0;
    const [ink, faint, accent] = [cssColour("--ink-2"), cssColour("--line-strong"), cssColour("--accent")];
    this.drawn = [];
    const stack = [top];
    const paths = { above: new GroupPaths(), below: new GroupPaths(), split: new GroupPaths() };
    const found = shape.root - (tree.n_clusters - 1);
    while (stack.length) {
      const node = stack.pop();
      this.drawn.push(node);
      if (shape.isLeaf(node)) continue;
      if ((shape.to[node] - shape.from[node]) * (view.wide / view.n) < 2) {
        // Too narrow to be seen: a line stands for all of it.
        const narrow = (node > limit ? paths.above : paths.below).of(node);
        narrow.moveTo(x(node), y(node));
        narrow.lineTo(x(node), node > limit ? Math.max(level, y(node)) : height - view.below);
        continue;
      }
      const path = (node > limit ? paths.above : node > found ? paths.below : paths.split).of(node);
      const [a, b] = [shape.left(node), shape.right(node)];
      const line = y(node);
      // Lines are strong down to the cut.
      const cuts = (child) => node > limit && child <= limit;
      const ends = [a, b].map((child) => (cuts(child) ? Math.max(line, Math.min(level, y(child))) : y(child)));
      path.moveTo(x(a), ends[0]);
      path.lineTo(x(a), line);
      path.lineTo(x(b), line);
      path.lineTo(x(b), ends[1]);
      [a, b].forEach((child, i) => {
        if (ends[i] === y(child)) return;
        paths.below.of(child).moveTo(x(child), ends[i]);
        paths.below.of(child).lineTo(x(child), y(child));
      });
      stack.push(a, b);
    }
    const stroke = (path, colour, lineWidth, dash = []) => {
      Object.assign(context, { strokeStyle: colour, lineWidth });
      context.setLineDash(dash);
      context.stroke(path);
    };
    paths.below.each((path, colour) => stroke(path, colour ?? faint, 1));
    paths.split.each((path, colour) => stroke(path, colour ?? faint, 1, [2, 2]));
    paths.above.each((path, colour) => stroke(path, colour ?? ink, 1.6));
    const inside = this.parts.filter((node) => shape.within(node, top));
    if (crossed) {
      stroke(new Path2D(`M${view.left - 8} ${level}H${width - view.left + 8}`), accent, 1.5, [5, 4]);
      const dots = new Path2D();
      const radius = inside.length > 150 ? 2 : 3.5;
      for (const node of inside.length < 600 ? inside : []) {
        dots.moveTo(x(node) + radius, level);
        dots.arc(x(node), level, radius, 0, 2 * Math.PI);
      }
      context.fillStyle = accent;
      context.fill(dots);
    }
    if (this.current >= 0) {
      const ring = new Path2D();
      ring.arc(x(this.current), y(this.current), 6, 0, 2 * Math.PI);
      stroke(ring, accent, 2.5);
    }
    if (view.under) {
      let free = -Infinity;
      const kept = inside.filter((node) => {
        if (x(node) - free < view.under + 2) return false;
        free = x(node);
        return true;
      });
      const tall = (view.under * thumbs.height) / thumbs.width;
      const boxes = kept.map((node) => [x(node) - view.under / 2, height - view.under - 6, view.under, tall]);
      const token = (this.token = {});
      const numbers = kept.map((node) => images.thumbnail[tree.examples[node]?.[0]] ?? -1);
      drawThumbnails(context, numbers, boxes)?.then(() => this.token === token && this.draw());
    }
  }

  /** The node whose horizontal line is nearest to a pixel. */
  nearest(px, py) {
    const { x, y } = this.view;
    let [best, least] = [-1, 16];
    for (const node of this.drawn) {
      if (this.shape.isLeaf(node)) continue;
      const [a, b] = [x(this.shape.left(node)), x(this.shape.right(node))];
      const aside = Math.max(0, Math.min(a, b) - px, px - Math.max(a, b));
      const away = Math.hypot(aside, y(node) - py);
      if (away < least) [best, least] = [node, away];
    }
    return best;
  }

  pick(node, spoken = false) {
    if (node === this.current) return;
    this.current = node;
    this.onHover(node);
    if (spoken && node >= 0) announce(nodeWords(node));
    this.draw();
  }

  listen() {
    const { canvas, shape } = this;
    const under = (event) => (this.view ? this.nearest(...pixelOf(event, canvas)) : -1);
    canvas.addEventListener("pointermove", (event) => this.pick(under(event)));
    canvas.addEventListener("pointerleave", () => this.pick(-1));
    canvas.addEventListener("click", (event) => under(event) >= 0 && this.onOpen(under(event)));
    canvas.addEventListener("blur", () => this.pick(-1));
    canvas.addEventListener("keydown", (event) => {
      const node = this.current < 0 ? this.top : this.current;
      const parent = node === this.top ? -1 : shape.parent[node];
      if (event.key === "ArrowUp") this.pick(parent < 0 ? node : parent, true);
      else if (event.key === "ArrowDown") this.pick(shape.isLeaf(node) ? node : shape.children(node)[0], true);
      else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        this.pick(parent < 0 ? node : shape.children(parent).find((child) => child !== node), true);
      } else if (event.key === "Enter") {
        if (!shape.isLeaf(node)) this.onOpen(node);
      } else if (event.key === "Backspace" && this.top !== shape.root) this.onOpen(shape.parent[this.top]);
      else return;
      event.preventDefault();
    });
  }
}

const treeParents = new Map(); // node -> the join that it is part of; made when first asked for

/** Whether a node holds all clusters of its group. */
function isWholeGroup(node) {
  if (!treeParents.size) {
    for (const children of [tree.left, tree.right]) {
      children.forEach((child, i) => treeParents.set(child, tree.n_leaves + i));
    }
  }
  return !treeParents.has(node) || tree.group[treeParents.get(node)] !== tree.group[node];
}

/** What a node is: part of a cluster, a cluster, some clusters of a group, all of them, or several joined. */
function nodeKind(node) {
  const [at, group] = [tree.cluster[node], tree.group[node]];
  if (at >= 0) return tree.size[node] === clusters[at]?.size ? "cluster" : "split";
  if (!hasGroups || group < 0) return "joined";
  return isWholeGroup(node) ? "group" : "within";
}

function nodeWords(node) {
  const at = tree.cluster[node];
  const group = hasGroups && tree.group[node] >= 0 ? groupName(tree.group[node]) : "";
  const names = {
    cluster: `${clusterName(at)}${group && `, ${group}`}`,
    split: `Part of cluster ${at}${group && `, ${group}`}`,
    group: `Clusters of ${group}`,
    within: `Several clusters of ${group}`,
    joined: hasGroups ? "Several groups" : "Several clusters",
  };
  const label = majorityWords({ label: tree.label[node], purity: tree.purity[node] });
  return visible(`${names[nodeKind(node)]}, ${plural(tree.size[node], "image")}${label}`);
}

/** What the parts of a cut are. */
function cutWords(k) {
  if (k > tree.n_clusters) {
    return (
      `More than the ${count(tree.n_clusters)} clusters that were found. The extra splits (dashed) were made for ` +
      "this report, from the final embeddings."
    );
  }
  if (k === tree.n_clusters) return "These are the clusters that were found.";
  if (hasGroups && k === tree.n_groups) {
    return (
      "These are the clusters of each group, joined; its branches have its colour. A cluster is in the branch of the " +
      "group that most of its images are in."
    );
  }
  const within = k < tree.n_groups ? "Groups" : "Clusters within their groups";
  return `${hasGroups ? within : "Clusters that were found"}, joined by Ward's method, the most similar first.`;
}

if (tree?.left.length) {
  sections.set("tree", {
    title: "Merge tree",
    short: "Tree",
    icon: "M11 3h2v5h5v5h3v8h-2v-6h-4v6h-2v-8h3v-3H8v3h3v8H9v-6H5v6H3v-8h3V8h5z",
    build(root) {
      const shape = new TreeShape(tree);
      const most = tree.n_leaves;
      const slider = el("input", { type: "range", min: 1, max: most, step: 1, "aria-label": "Number of parts, K" });
      const number = el("input", { type: "number", min: 1, max: most, step: 1, inputmode: "numeric" });
      const position = (text, k) => [k, button(`${text}: ${count(k)}`, () => cutAt(k), { class: "chip" })];
      const found = position(hasGroups ? "Clusters" : "Found", tree.n_clusters);
      const positions = hasGroups ? [position("Groups", tree.n_groups), found] : [found];
      const lead = el("p.lead.small", { role: "status" });
      const hint = note();
      const crumbs = el("nav.crumbs", { "aria-label": "Branch" });
      const under = el("p.note.tree-hover", "\u00a0");
      let state = {};
      // The address follows when the slider rests: a history entry for each pixel would make the browser slow.
      const remember = debounced(() => where().section === "tree" && adjust({ k: state.k }, { replace: true }), 150);
      const cutAt = (k) => {
        draw({ ...state, k: clamp(Math.round(k) || 1, 1, most) });
        remember();
      };
      slider.addEventListener("input", () => cutAt(Number(slider.value)));
      number.addEventListener("change", () => cutAt(Number(number.value)));
      number.addEventListener("input", () => number.value && number.checkValidity() && cutAt(Number(number.value)));
      const branch = (node) => address("tree", { k: state.k, node: node === shape.root ? null : node });
      const onHover = (node) => (under.textContent = node < 0 ? "\u00a0" : nodeWords(node));
      const dendrogram = new Dendrogram(shape, { onOpen: (node) => go(branch(node)), onHover });
      const card = (node, width) => {
        const kind = nodeKind(node);
        const at = tree.cluster[node];
        const names = { cluster: `cluster ${at}`, split: `part of ${at}`, within: "part of group", joined: "joined" };
        const badge = kind === "group" ? named(groupName(tree.group[node])) : names[kind];
        const size = plural(tree.size[node], "image");
        const purity = hasLabels && tree.purity[node] !== null && span("card-purity", percent(tree.purity[node]));
        const parts = [
          { "data-focus": true, "aria-label": nodeWords(node) },
          stripMosaic(tree.examples[node] ?? [], width),
          span("card-line", majority(tree.label[node], "card-label"), purity),
          span("card-facts", hasGroups && dot(tree.group[node]), size, span(`badge ${kind}`, badge)),
        ];
        // A cluster, or what cannot be split further, opens as a cluster; anything else enlarges its branch.
        if (kind === "cluster" || shape.isLeaf(node)) return clusterLink(`card ${kind}`, at, ...parts);
        parts[0].href = branch(node);
        return el(`a.card ${kind}`, ...parts);
      };
      const rowHeight = (width) => stripHeight(width) + 56;
      const grid = new VirtualGrid({ label: "Parts at this cut", minWidth: 216, gap: 24, rowHeight, make: card });
      themeWatchers.add(() => grid.rebuild());
      const step = (text, by, label) => button(text, () => cutAt(state.k + by), { class: "tool", "aria-label": label });
      const [fewer, more] = [step("\u2212", -1, "One part fewer"), step("+", 1, "One part more")];
      const chips = positions.map(([, chip]) => chip);
      const controls = el("div.controls.cut", fewer, slider, more, field("K", number, "narrow"), ...chips);
      const holder = el("div.tree-holder", dendrogram.canvas);
      root.append(head("Merge tree"), lead, controls, hint, crumbs, holder, under, grid.element);
      const draw = (next) => {
        state = next;
        const { k, node } = state;
        slider.value = k;
        slider.setAttribute("aria-valuetext", plural(k, "part"));
        if (document.activeElement !== number || Number(number.value) !== k) number.value = k;
        slider.style.setProperty("--level", `${(100 * (k - 1)) / Math.max(1, most - 1)}%`);
        const parts = shape.cut(k);
        const inside = parts.filter((part) => shape.within(part, node));
        const shown = inside.length ? inside : [node];
        const all = node === shape.root;
        lead.textContent = `${plural(k, "part")}${all ? "" : `, ${count(shown.length)} of them in this branch`}.`;
        hint.textContent = cutWords(k);
        for (const [at, chip] of positions) chip.setAttribute("aria-pressed", String(k === at));
        dendrogram.show(node, k, parts);
        grid.setKeys(shown);
        const path = [];
        for (let at = node; at >= 0; at = shape.parent[at]) path.unshift(at);
        crumbs.hidden = all;
        const steps = path.length > 4 ? [path[0], -1, ...path.slice(-3)] : path;
        const crumb = (at, i) => {
          const text = at === shape.root ? "All images" : at < 0 ? "\u2026" : plural(tree.size[at], "image");
          const mark = i > 0 && el("span.crumb-mark", { "aria-hidden": "true" }, "\u203a");
          if (at >= 0 && at !== node) return [mark, el("a", { href: branch(at) }, text)];
          return [mark, el("span", { "aria-current": at === node && "true" }, text)];
        };
        crumbs.replaceChildren(...steps.flatMap(crumb).filter(Boolean));
      };
      return (params) => {
        const node = Number(params.get("node") ?? shape.root);
        const k = Number(params.get("k") ?? state.k ?? tree.n_groups);
        const known = Number.isInteger(node) && node >= 0 && node <= shape.root;
        const next = { k: clamp(Math.round(k) || tree.n_groups, 1, most), node: known ? node : shape.root };
        if (next.k !== state.k || next.node !== state.node) draw(next);
      };
    },
  });
}
