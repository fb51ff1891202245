"use strict";
// Grids: one that only builds the rows near the screen, so that thousands of cards cost what fifty do; and rows of
// thumbnails. In both, Tab enters and leaves and the arrow keys walk.

class VirtualGrid {
  /**
   * make(key, width): the content of one item, with one element that takes the focus marked data-focus. minWidth, gap:
   * pixels; rowHeight(width): pixels of a row for items of that width.
   */
  constructor({ label, minWidth, gap = 20, rowHeight, make, maxColumns = Infinity }) {
    Object.assign(this, { minWidth, wideGap: gap, rowHeight, make, maxColumns });
    this.keys = [];
    this.items = new Map(); // index -> element
    this.active = 0;
    this.inner = el("ul.virtual-items", { role: "list", "aria-label": label });
    this.element = el("div.virtual", this.inner);
    addEventListener("scroll", () => this.refresh(), { passive: true });
    addEventListener("resize", () => this.refresh(), { passive: true });
    new ResizeObserver(() => this.measure()).observe(this.element);
    this.inner.addEventListener("keydown", (event) => this.walk(event));
    this.inner.addEventListener("focusin", (event) => {
      const item = event.target.closest("li");
      if (item && event.target.matches("[data-focus]")) this.activate(Number(item.dataset.index));
    });
  }

  setKeys(keys) {
    this.keys = keys;
    this.active = clamp(this.active, 0, Math.max(0, keys.length - 1));
    this.rebuild();
  }

  rebuild() {
    this.width = 0;
    this.measure();
  }

  measure() {
    const width = this.element.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    // On a phone two narrow cards side by side show more than one wide one.
    const [least, gap] = width < 480 && this.minWidth < 300 ? [130, 14] : [this.minWidth, this.wideGap];
    this.gap = gap;
    this.columns = clamp(Math.floor((width + gap) / (least + gap)), 1, this.maxColumns);
    this.itemWidth = Math.floor((width - this.gap * (this.columns - 1)) / this.columns); // half a pixel would blur
    this.line = this.rowHeight(this.itemWidth) + this.gap;
    this.element.style.height = `${Math.max(0, Math.ceil(this.keys.length / this.columns) * this.line - this.gap)}px`;
    this.inner.replaceChildren();
    this.items.clear();
    this.refresh();
  }

  refresh() {
    if (!this.width || !this.element.clientWidth) return;
    const top = this.element.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor((-top - 600) / this.line)) * this.columns;
    const last = Math.min(this.keys.length, (Math.floor((innerHeight - top + 600) / this.line) + 1) * this.columns);
    for (const [index, item] of this.items) {
      if ((index < first || index >= last) && !item.contains(document.activeElement)) {
        item.remove();
        this.items.delete(index);
      }
    }
    for (let index = first; index < last; index++) if (!this.items.has(index)) this.build(index);
  }

  build(index) {
    const item = el("li", { "data-index": index, "aria-posinset": index + 1, "aria-setsize": this.keys.length });
    const [column, row] = [index % this.columns, Math.floor(index / this.columns)];
    const transform = `translate(${column * (this.itemWidth + this.gap)}px, ${row * this.line}px)`;
    Object.assign(item.style, { width: `${this.itemWidth}px`, height: `${this.line - this.gap}px`, transform });
    item.append(this.make(this.keys[index], this.itemWidth));
    this.items.set(index, item);
    this.setTab(index, index === this.active ? 0 : -1);
    // In the order of reading, for screen readers and Tab.
    const after = [...this.inner.children].find((other) => Number(other.dataset.index) > index);
    this.inner.insertBefore(item, after ?? null);
  }

  target(index) {
    return this.items.get(index)?.querySelector("[data-focus]");
  }

  setTab(index, tabIndex) {
    const target = this.target(index);
    if (target) target.tabIndex = tabIndex;
  }

  activate(index) {
    this.setTab(this.active, -1);
    this.active = index;
    this.setTab(index, 0);
  }

  focus(index) {
    const top = this.element.getBoundingClientRect().top + Math.floor(index / this.columns) * this.line;
    const [low, high] = [72, innerHeight - this.line - 90];
    if (top < low) scrollBy({ top: top - low, behavior: "instant" });
    else if (top > high) scrollBy({ top: top - Math.max(low, high), behavior: "instant" });
    this.refresh();
    this.activate(index);
    this.target(index)?.focus({ preventScroll: true });
  }

  walk(event) {
    if (!event.target.matches("[data-focus]") || event.altKey || event.ctrlKey || event.metaKey) return;
    const last = this.keys.length - 1;
    const page = this.columns * Math.max(1, Math.floor(innerHeight / this.line) - 1);
    const [across, down] = ARROWS[event.key] ?? [0, 0];
    const moves = { PageUp: -page, PageDown: page, Home: -this.active, End: last - this.active };
    if (!(event.key in moves) && !ARROWS[event.key]) return;
    const next = this.active + (moves[event.key] ?? across + down * this.columns);
    event.preventDefault();
    if (next >= 0 && next <= last) this.focus(next);
    else if (event.key.startsWith("Page")) this.focus(clamp(next, 0, last));
  }
}

/** One Tab stop for a group of buttons; arrow keys move within it, up and down by what is seen. */
function roving(group, selector = "button") {
  const all = () => [...group.querySelectorAll(selector)];
  const set = (target) => all().forEach((element) => (element.tabIndex = element === target ? 0 : -1));
  set(all()[0]);
  group.addEventListener("focusin", (event) => {
    const target = event.target.closest(selector);
    if (target) set(target);
  });
  group.addEventListener("keydown", (event) => {
    const elements = all();
    const from = elements.indexOf(event.target);
    if (from < 0) return;
    const beside = { Home: 0, End: elements.length - 1, ArrowLeft: from - 1, ArrowRight: from + 1 };
    let to = beside[event.key] ?? -1;
    if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const down = event.key === "ArrowDown";
      const here = elements[from].getBoundingClientRect();
      let least = Infinity;
      elements.forEach((element, i) => {
        const box = element.getBoundingClientRect();
        const away = down ? box.top - here.top : here.top - box.top;
        const cost = away * 10 + Math.abs(box.left - here.left);
        if (away > 4 && cost < least) [to, least] = [i, cost];
      });
    } else if (!(event.key in beside)) return;
    event.preventDefault();
    event.stopPropagation();
    if (to >= 0 && to < elements.length) elements[to].focus();
  });
  group.resetRoving = () => set(all()[0]);
  return group;
}

/** Rows of thumbnails, the first now and others when they are asked for. */
function moreThumbnails(rows, label, step = 60) {
  const holder = el("div.more-thumbnails");
  let n = Math.min(step, rows.length);
  const fill = () => {
    const grow = () => fill((n = Math.min(rows.length, n + 4 * step)));
    const more = button(`Show more of ${count(rows.length)}`, grow, { class: "tool" });
    const open = (row) => viewer.open(rows.map(pageImage), rows.indexOf(row));
    holder.replaceChildren(thumbnailRow(rows.slice(0, n), label, open, "large"), ...(n < rows.length ? [more] : []));
  };
  fill();
  return holder;
}

/** Thumbnails that show their facts, and do what `open` says when chosen: by default, show the image large. */
function thumbnailRow(rows, label, open, className = "") {
  const items = rows.map((row) => {
    const attributes = { class: "thumb", "data-image": row, "aria-label": imageWords(row) };
    return button(thumbnailCanvas(row), () => (open ?? viewRow(rows))(row), attributes);
  });
  return roving(el(`div.thumbnails ${className}`, { role: "group", "aria-label": label }, ...items));
}
