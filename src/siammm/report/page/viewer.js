"use strict";
// One image, as large as it can be shown. `siammm explore` has the image itself, a page from disk its thumbnail.

/** An image of the page's table as the viewer takes it. */
const pageImage = (row) => ({
  row,
  id: images.id[row],
  cluster: images.cluster[row],
  group: images.group[row],
  position: images.position[row],
});

/** An image that the server has named; the page may hold it or not. */
const serverImage = (image) => ({ row: rowAt(image.position), ...image });

const rowsByPosition = new Map(); // made when first asked for

function rowAt(position) {
  if (!rowsByPosition.size) images.position.forEach((at, row) => rowsByPosition.set(at, row));
  return rowsByPosition.get(position) ?? -1;
}

function largePicture({ row, id, position }) {
  if (!live || !(position >= 0)) {
    const canvas = thumbnailCanvas(row);
    const factor = Math.max(1, Math.floor(Math.min(innerWidth * 0.8, 560) / thumbs.width));
    canvas.style.width = `${thumbs.width * factor}px`;
    return canvas;
  }
  const on = {
    load: () => {
      // A small image is enlarged by whole pixels, as far as there is room.
      const most = Math.min((innerWidth * 0.8) / picture.naturalWidth, (innerHeight * 0.6) / picture.naturalHeight);
      const factor = Math.max(picture.naturalWidth, picture.naturalHeight) <= 256 ? Math.floor(most) : 1;
      if (factor > 1) picture.style.width = `${picture.naturalWidth * factor}px`;
      picture.classList.toggle("pixelated", factor > 3);
      viewer.size.textContent = `${count(picture.naturalWidth)} \u00d7 ${count(picture.naturalHeight)} pixels`;
    },
    error: () => {
      picture.classList.add("missing");
      viewer.size.textContent = "It is not there any more, or cannot be read.";
    },
  };
  const picture = el("img", { src: `image/${Number(position)}`, alt: visible(id), on });
  return picture;
}

const viewer = {
  dialog: el("dialog.viewer", { "aria-labelledby": "viewer-title" }),
  size: el("p.note", { role: "status" }),
  list: [],
  at: -1,
  opener: null,

  listen() {
    const { dialog } = this;
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("wheel", (event) => event.target === dialog && event.preventDefault(), { passive: false });
    dialog.addEventListener("close", () => this.opener?.isConnected && this.opener.focus({ preventScroll: true }));
    dialog.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
      this.step(by);
      event.preventDefault();
    });
    document.body.append(dialog);
  },

  /** Show one of a list of images, among which the arrow keys move. */
  open(list, at) {
    if (!this.dialog.isConnected) this.listen();
    if (!this.dialog.open) this.opener = document.activeElement;
    this.list = list;
    this.show(at);
  },

  step(by) {
    if (this.at + by >= 0 && this.at + by < this.list.length) this.show(this.at + by, by);
  },

  show(at, by = 0) {
    this.at = at;
    const image = this.list[at];
    hideTip();
    const small = "This page holds a thumbnail of it; `siammm explore` shows it at full size.";
    this.size.replaceChildren(...(live ? [] : withCode(small)));
    const leave = (then) => () => {
      this.dialog.close();
      then();
    };
    const tool = (text, action, label, disabled = false) =>
      button(text, action, { class: "tool", "aria-label": label, title: label, disabled });
    const title = el("h2", { id: "viewer-title", tabindex: "-1" }, named(image.id));
    const steps = [
      span("place", `${count(at + 1)} of ${count(this.list.length)}`),
      tool("\u2190", () => this.step(-1), "Previous image", at <= 0),
      tool("\u2192", () => this.step(1), "Next image", at >= this.list.length - 1),
      tool("\u00d7", () => this.dialog.close(), "Close"),
    ];
    const search = leave(() => go(address("search", { image: image.position })));
    const tools = [
      live && image.position >= 0 && button("Find similar", search, { class: "primary" }),
      hasGroups && image.group >= 0 && button("Open its group", leave(() => go(groupAddress(image.group))), { class: "tool" }),
      image.cluster >= 0 && button("Open its cluster", leave(() => openCluster(image.cluster)), { class: "tool" }),
    ];
    const facts = el("div.viewer-facts", image.row >= 0 && imageFacts(image.row), this.size);
    this.dialog.replaceChildren(
      el("div.viewer-bar", title, ...steps),
      el("div.viewer-picture", largePicture(image)),
      el("div.viewer-foot", facts, el("div.viewer-tools", ...tools)),
    );
    if (!this.dialog.open) this.dialog.showModal();
    const buttons = [...this.dialog.querySelectorAll(".viewer-bar button:not(:disabled)")];
    const wanted = by < 0 ? "Previous image" : by > 0 ? "Next image" : "";
    (buttons.find((item) => item.ariaLabel === wanted) ?? title).focus();
    announce(image.row >= 0 ? imageWords(image.row) : visible(image.id));
  },
};

/** What choosing one of these rows does, unless there is something better: show it large. */
const viewRow = (rows) => (row) => viewer.open(rows.map(pageImage), rows.indexOf(row));
