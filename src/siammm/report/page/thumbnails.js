"use strict";
// Thumbnails: cut from sheets that are decoded when first needed, drawn on canvases when they come near the screen.

const thumbs = contents.thumbnails;
const LONGER = Math.max(thumbs.width, thumbs.height);
// Small images are shown as the pixels they are.
const PIXELATED = LONGER <= 40 || (LONGER <= 64 && run.image_size <= 40);
const MAX_DECODED = 48e6; // pixels of sheets kept decoded, about 190 MB

const sheetBlobs = new Map(); // sheet -> address of its picture
const sheetImages = new Map(); // sheet -> promise of its decoded picture, least recently used first
const sheetReady = new Map(); // sheet -> decoded picture

async function sheetAddress(number) {
  const { url } = thumbs.sheets[number];
  if (url !== null) return url;
  if (!sheetBlobs.has(number)) {
    const find = () => document.getElementById(`sheet-${number}`);
    // Sheets come after the script, so that the page shows before they are read: this one may not be there yet.
    while (document.readyState === "loading" && !find()?.nextElementSibling) {
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    const element = find();
    if (!element) throw new Error(`sheet ${number} is missing`);
    const bytes = Uint8Array.from(atob(element.textContent.trim()), (character) => character.charCodeAt(0));
    sheetBlobs.set(number, URL.createObjectURL(new Blob([bytes], { type: thumbs.media_type })));
    element.textContent = "";
  }
  return sheetBlobs.get(number);
}

async function decodeSheet(number) {
  const image = Object.assign(new Image(), { src: await sheetAddress(number) });
  await image.decode();
  return createImageBitmap(image);
}

/** The decoded sheet of a number; asked again, the same one. */
function sheet(number) {
  let promise = sheetImages.get(number);
  if (promise) sheetImages.delete(number);
  else {
    promise = decodeSheet(number);
    promise.then((picture) => sheetReady.set(number, picture), () => {});
  }
  sheetImages.set(number, promise);
  const size = thumbs.width * thumbs.height * Math.max(1, thumbs.per_sheet);
  const most = Math.max(6, Math.floor(MAX_DECODED / size));
  for (const old of sheetImages.keys()) {
    if (sheetImages.size <= most) break;
    if (!sheetReady.has(old)) continue;
    sheetReady.get(old).close();
    sheetReady.delete(old);
    sheetImages.delete(old);
  }
  return promise;
}

function place(thumbnail) {
  const inSheet = thumbnail % thumbs.per_sheet;
  const x = (inSheet % thumbs.columns) * thumbs.width;
  return [Math.floor(thumbnail / thumbs.per_sheet), x, Math.floor(inSheet / thumbs.columns) * thumbs.height];
}

/** Draw thumbnails into boxes [x, y, width, height] of a canvas; those whose sheet is ready at once. */
function drawThumbnails(context, thumbnails, boxes) {
  const draw = (i, picture) => {
    const [, x, y] = place(thumbnails[i]);
    context.imageSmoothingEnabled = !PIXELATED;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, x, y, thumbs.width, thumbs.height, ...boxes[i]);
  };
  const waiting = [];
  thumbnails.forEach((thumbnail, i) => {
    if (!(thumbnail >= 0)) return;
    const [number] = place(thumbnail);
    const ready = sheetReady.get(number);
    if (ready) draw(i, ready);
    else waiting.push(sheet(number).then((picture) => draw(i, picture), () => {}));
  });
  return waiting.length ? Promise.all(waiting) : null;
}

// A page that is served makes sheets when they are asked for: a map may ask for those of so many images.
const MOST_ASKED_BY_MAP = 1024;
const askedByMap = new Set();

/** The thumbnail of a row as [picture, left, top, width, height], if its sheet is there; else null, and later `then`. */
function readyThumbnail(row, then) {
  const thumbnail = images.thumbnail[row];
  if (!(thumbnail >= 0)) return null;
  const [number, x, y] = place(thumbnail);
  const ready = sheetReady.get(number);
  if (ready) return [ready, x, y, thumbs.width, thumbs.height];
  // Asked once: sheets that do not all fit into memory would push each other out for ever.
  if (!askedByMap.has(number) && (!live || thumbnail < MOST_ASKED_BY_MAP)) {
    askedByMap.add(number);
    sheet(number).then(then, () => {});
  }
  return null;
}

// A canvas is painted once, when it is about to be seen.
const painters = new WeakMap();
const painterWatch = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      painterWatch.unobserve(target);
      painters.get(target)?.();
      painters.delete(target);
    }
  },
  { rootMargin: "300px" },
);

function paintWhenSeen(canvas, thumbnails, boxes) {
  if (thumbnails.every((number) => number < 0)) return canvas.classList.add("missing");
  painters.set(canvas, () => {
    const later = drawThumbnails(canvas.getContext("2d"), thumbnails, boxes);
    if (later === null) canvas.dataset.painted = "";
    else later.then(() => (canvas.dataset.painted = "late"));
  });
  painterWatch.observe(canvas);
}

/** One image of the page, at its own resolution; CSS sets how large it is. */
function thumbnailCanvas(row) {
  const number = row >= 0 ? images.thumbnail[row] : -1;
  const { width, height } = thumbs;
  const canvas = el(`canvas.thumbnail ${PIXELATED ? "pixelated" : ""}`, { width, height, "aria-hidden": "true" });
  paintWhenSeen(canvas, [number], [[0, 0, width, height]]);
  return canvas;
}

/** Several images on one canvas. cells: [column, row, columns, rows] of each, on a grid of that many. */
function mosaic(rows, cells, columns, lines, width) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const gap = Math.round(2 * scale);
  const cell = Math.max(4, Math.floor((width * scale - gap * (columns - 1)) / columns));
  const tall = Math.max(4, Math.round((cell * thumbs.height) / thumbs.width));
  const [right, down] = [cell + gap, tall + gap];
  const size = { width: columns * right - gap, height: lines * down - gap };
  // As wide as its own pixels: a browser would blur what it stretches.
  const style = { width: `${size.width / scale}px` };
  const canvas = el("canvas.mosaic", { ...size, style, "aria-hidden": "true" });
  const boxes = cells.map(([x, y, w, h]) => [x * right, y * down, w * right - gap, h * down - gap]);
  paintWhenSeen(canvas, rows.slice(0, cells.length).map((row) => images.thumbnail[row]), boxes);
  return canvas;
}

/** The most central image large, eight more beside and below it. */
const SMALL_CELLS = [[2, 0], [3, 0], [2, 1], [3, 1], [0, 2], [1, 2], [2, 2], [3, 2]].map(([x, y]) => [x, y, 1, 1]);
const HERO_CELLS = [[0, 0, 2, 2], ...SMALL_CELLS];
const heroMosaic = (rows, width) => mosaic(rows, HERO_CELLS, 4, 3, width);
const stripMosaic = (rows, width) => mosaic(rows, range(4).map((i) => [i, 0, 1, 1]), 4, 1, width);
const stripHeight = (width) => ((width - 6) / 4) * (thumbs.height / thumbs.width);

/** Columns and lines for up to 24 images: so many that no thumbnail is enlarged, unless it is shown as pixels. */
function wallShape(width) {
  const columns = PIXELATED ? 5 : clamp(Math.ceil(width / thumbs.width), 4, 12);
  return [columns, columns > 8 ? 2 : 3];
}

function wallMosaic(rows, width) {
  const [columns, lines] = wallShape(width);
  const cells = range(lines * columns).map((i) => [i % columns, Math.floor(i / columns), 1, 1]);
  return mosaic(rows, cells, columns, lines, width);
}

function wallHeight(width) {
  const [columns, lines] = wallShape(width);
  return (lines * width * thumbs.height) / (columns * thumbs.width);
}

// -------------------------------------------------------------------------------------------------- what an image is

function imageFacts(row) {
  const [cluster, label] = [images.cluster[row], hasLabels && fact("Label", named(labelName(images.label[row])))];
  const group = hasGroups && cluster >= 0 && fact("Group", named(groupName(images.group[row])));
  const own = cluster >= 0 && fact("Cluster", hasGroups ? cluster : named(`${cluster} ${givenName(cluster)}`));
  const scores = [fact("Share of its cluster", figure(images.probability[row]))];
  const sure = images.group_probability.length > 0 && fact("Probability of its group", figure(images.group_probability[row]));
  if (group && sure) scores.unshift(sure);
  scores.push(fact("Outlier score", figure(images.outlier_score[row])));
  return el("dl", group, own, label, ...scores);
}

function imageWords(row) {
  const label = hasLabels ? `, ${labelName(images.label[row])}` : "";
  const group = images.group[row];
  const name = group < 0 ? "" : hasGroups ? `, ${groupName(group)}` : groups[group].name && `, ${groups[group].name}`;
  return visible(`${images.id[row]}${label}, cluster ${images.cluster[row]}${name}`);
}

/** What shows beside an image that the pointer or the focus is on. */
const tip = el("div.tip", { popover: "manual", "aria-hidden": "true" });

function showTip(row, box) {
  tip.replaceChildren(thumbnailCanvas(row), named(images.id[row], "tip-name"), imageFacts(row));
  if (!tip.isConnected) document.body.append(tip);
  if (tip.showPopover && !tip.matches(":popover-open")) tip.showPopover();
  const { width, height } = tip.getBoundingClientRect();
  const left = box.right + 12 + width < innerWidth ? box.right + 12 : box.left - 12 - width;
  tip.style.left = `${clamp(left, 8, Math.max(8, innerWidth - width - 8))}px`;
  const above = left < 8 ? box.top - height - 12 : box.top;
  const top = left < 8 && above < 8 ? box.bottom + 12 : above;
  tip.style.top = `${clamp(top, 8, Math.max(8, innerHeight - height - 8))}px`;
}

function hideTip() {
  if (tip.isConnected && tip.hidePopover && tip.matches(":popover-open")) tip.hidePopover();
}

function watchTips() {
  const imageOf = (event) => event.target.closest?.("[data-image]");
  const enter = (event) => {
    const element = imageOf(event);
    if (element) showTip(Number(element.dataset.image), element.getBoundingClientRect());
  };
  // A finger leaves as soon as it is lifted: what it showed stays until the next touch or scroll.
  const leave = (event) => event.pointerType !== "touch" && imageOf(event) && hideTip();
  const touch = (event) => event.pointerType === "touch" && !imageOf(event) && hideTip();
  document.addEventListener("pointerdown", touch);
  document.addEventListener("pointerover", enter);
  document.addEventListener("pointerout", leave);
  document.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && enter(event));
  document.addEventListener("focusout", leave);
  document.addEventListener("scroll", hideTip, { capture: true, passive: true });
}
