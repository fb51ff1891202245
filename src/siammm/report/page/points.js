"use strict";
// A scatter plot of many points on a canvas that can be enlarged. Pixels are blended by hand into one image: twenty
// thousand dots take a few milliseconds, on any machine, with no graphics card.

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Give a canvas the resolution of the screen; the pixels per CSS pixel (2 at most), or 0 where it is not shown. */
function fitCanvas(canvas) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width || !height) return 0;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  return ratio;
}

/** Where an event happened, in CSS pixels from the corner of an element. */
function pixelOf(event, element) {
  const box = element.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

class PointPlot {
  /**
   * xs, ys: positions from 0 to 1, y upwards. colour(i): [r, g, b]; dim(i): whether to show it faintly. radius: pixels.
   * onHover(i or -1, box), onOpen(i), describe(i): words. padding: [left, right, top, bottom] pixels. zooms: whether it
   * can be enlarged. onSelect(points): what was chosen with the lasso, while `lasso` is on. picture(i): where a point has
   * an image, [picture, left, top, width, height] in it, or null; drawn where there is room while `pictures` is on.
   */
  constructor({ label, ...options }) {
    Object.assign(this, { dim: null, zooms: true, zoom: 1, centre: [0.5, 0.5], current: -1, ...options });
    Object.assign(this, { lasso: false, pictures: true, path: [], selected: new Set() });
    const role = { role: "application", "aria-roledescription": "map of points" };
    this.canvas = el("canvas.points", { tabindex: "0", ...role, "aria-label": label });
    this.index();
    this.listen();
    themeWatchers.add(() => this.draw());
    redrawn(this.canvas, () => this.draw());
  }

  /** Points by cells of a grid, so that the nearest is found without looking at all. */
  index() {
    this.cells = Math.max(1, Math.floor(Math.sqrt(this.xs.length / 2)));
    this.buckets = new Map();
    this.xs.forEach((x, i) => {
      const key = this.cellOf(x) * this.cells + this.cellOf(this.ys[i]);
      if (!this.buckets.has(key)) this.buckets.set(key, []);
      this.buckets.get(key).push(i);
    });
  }

  cellOf(value) {
    return clamp(Math.floor(value * this.cells), 0, this.cells - 1);
  }

  /** Pixels per unit, and where the middle is. */
  frame() {
    const [left, right, top, bottom] = this.padding;
    const [width, height] = [this.canvas.clientWidth - left - right, this.canvas.clientHeight - top - bottom];
    return { sx: width * this.zoom, sy: height * this.zoom, ox: left + width / 2, oy: top + height / 2 };
  }

  toPixel(i) {
    const { sx, sy, ox, oy } = this.frame();
    return [ox + (this.xs[i] - this.centre[0]) * sx, oy - (this.ys[i] - this.centre[1]) * sy];
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.render();
    });
  }

  render() {
    const ratio = fitCanvas(this.canvas);
    if (!ratio) return;
    const { width: w, height: h } = this.canvas;
    const context = this.canvas.getContext("2d");
    if (this.pixels?.width !== w || this.pixels.height !== h) this.pixels = context.createImageData(w, h);
    const data = this.pixels.data;
    data.fill(0);
    const radius = this.radius * ratio * Math.min(2.2, this.zoom ** 0.35);
    const reach = Math.ceil(radius + 0.5);
    const edge = (radius + 0.5) ** 2;
    const { sx, sy, ox, oy } = this.frame();
    const dim = this.selected.size ? (i) => !this.selected.has(i) : this.dim;
    for (const faint of dim ? [true, false] : [false]) {
      for (let i = 0; i < this.xs.length; i++) {
        if (dim && dim(i) !== faint) continue;
        const px = (ox + (this.xs[i] - this.centre[0]) * sx) * ratio;
        const py = (oy - (this.ys[i] - this.centre[1]) * sy) * ratio;
        if (px < -reach || py < -reach || px > w + reach || py > h + reach) continue;
        const [red, green, blue] = this.colour(i);
        const strength = faint ? 0.1 : 0.85;
        const [fromX, toX] = [Math.max(0, Math.floor(px - reach)), Math.min(w - 1, Math.ceil(px + reach))];
        const [fromY, toY] = [Math.max(0, Math.floor(py - reach)), Math.min(h - 1, Math.ceil(py + reach))];
        for (let y = fromY; y <= toY; y++) {
          for (let x = fromX; x <= toX; x++) {
            const away = (x - px) * (x - px) + (y - py) * (y - py);
            if (away >= edge) continue;
            const cover = radius + 0.5 - Math.sqrt(away);
            const alpha = strength * (cover > 1 ? 1 : cover);
            const at = 4 * (y * w + x);
            const under = (data[at + 3] / 255) * (1 - alpha);
            const total = alpha + under;
            data[at] = (red * alpha + data[at] * under) / total;
            data[at + 1] = (green * alpha + data[at + 1] * under) / total;
            data[at + 2] = (blue * alpha + data[at + 2] * under) / total;
            data[at + 3] = 255 * total;
          }
        }
      }
    }
    context.putImageData(this.pixels, 0, 0);
    if (this.picture && this.pictures) this.drawPictures(context, ratio, dim);
    if (this.path.length > 1) {
      context.lineWidth = 1.5 * ratio;
      context.strokeStyle = cssColour("--accent");
      context.beginPath();
      for (const [x, y] of this.path) context.lineTo(x * ratio, y * ratio);
      context.closePath();
      context.stroke();
    }
    if (this.current >= 0) {
      const [x, y] = this.toPixel(this.current);
      context.lineWidth = 2 * ratio;
      context.strokeStyle = cssColour("--ink");
      context.beginPath();
      context.arc(x * ratio, y * ratio, radius + 4 * ratio, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  /** Small images on some of the points, so far apart that the others stay visible; more where the map is enlarged. */
  drawPictures(context, ratio, dim) {
    const side = clamp(this.canvas.clientWidth / 22, 26, 44);
    const apart = side * (this.selected.size ? 1.15 : 1.6);
    const taken = new Map(); // cell -> places, in cells so large that only neighbours can be too near
    const cell = (value) => Math.floor(value / apart);
    const isFree = (x, y) => {
      for (let a = cell(x) - 1; a <= cell(x) + 1; a++) {
        for (let b = cell(y) - 1; b <= cell(y) + 1; b++) {
          const near = taken.get(`${a} ${b}`) ?? [];
          if (near.some(([px, py]) => Math.max(Math.abs(px - x), Math.abs(py - y)) < apart)) return false;
        }
      }
      return true;
    };
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const { sx, sy, ox, oy } = this.frame();
    for (let i = 0; i < this.xs.length; i++) {
      if (dim?.(i)) continue;
      const [x, y] = [ox + (this.xs[i] - this.centre[0]) * sx, oy - (this.ys[i] - this.centre[1]) * sy];
      if (x < side / 2 || y < side / 2 || x > width - side / 2 || y > height - side / 2 || !isFree(x, y)) continue;
      const found = this.picture(i);
      if (!found) continue;
      const key = `${cell(x)} ${cell(y)}`;
      taken.set(key, [...(taken.get(key) ?? []), [x, y]]);
      const [source, , , w, h] = found;
      const factor = (side * ratio) / Math.max(w, h);
      const box = [x * ratio - (w * factor) / 2, y * ratio - (h * factor) / 2, w * factor, h * factor];
      const border = 1.5 * ratio; // in the colour of its point
      context.fillStyle = `rgb(${this.colour(i).join(" ")})`;
      context.fillRect(box[0] - border, box[1] - border, box[2] + 2 * border, box[3] + 2 * border);
      context.imageSmoothingEnabled = !PIXELATED || factor < 1;
      context.imageSmoothingQuality = "high";
      context.drawImage(source, ...found.slice(1), ...box);
    }
  }

  fromPixel(x, y) {
    const { sx, sy, ox, oy } = this.frame();
    return [(x - ox) / sx + this.centre[0], this.centre[1] - (y - oy) / sy];
  }

  /** The point nearest to a pixel, if one is near. */
  nearest(x, y, most = 18) {
    const { sx, sy } = this.frame();
    const [ux, uy] = this.fromPixel(x, y);
    const [rx, ry] = [most / sx, most / sy];
    let [best, distance] = [-1, most];
    for (let a = this.cellOf(ux - rx); a <= this.cellOf(ux + rx); a++) {
      for (let b = this.cellOf(uy - ry); b <= this.cellOf(uy + ry); b++) {
        for (const i of this.buckets.get(a * this.cells + b) ?? []) {
          if (this.dim?.(i)) continue;
          const away = Math.hypot((this.xs[i] - ux) * sx, (this.ys[i] - uy) * sy);
          if (away < distance) [best, distance] = [i, away];
        }
      }
    }
    return best;
  }

  /** With the lasso on, a drag chooses what it goes around, and a click or Enter adds a point or takes it out. */
  setLasso(on) {
    Object.assign(this, { lasso: on, path: [] });
    this.canvas.classList.toggle("lasso", on);
    this.draw();
  }

  select(points) {
    this.selected = new Set(points);
    this.onSelect([...this.selected]);
    this.draw();
  }

  toggle(i) {
    const others = [...this.selected].filter((other) => other !== i);
    this.select(others.length < this.selected.size ? others : [...others, i]);
  }

  /** The points within the path that was drawn, but for those that are shown faintly. */
  enclosed() {
    const corners = this.path.map(([x, y]) => this.fromPixel(x, y));
    const inside = (x, y) => {
      let within = false;
      corners.forEach(([ax, ay], n) => {
        const [bx, by] = corners[(n + 1) % corners.length];
        if (ay > y !== by > y && x < ax + ((bx - ax) * (y - ay)) / (by - ay)) within = !within;
      });
      return within;
    };
    return range(this.xs.length).filter((i) => !this.dim?.(i) && inside(this.xs[i], this.ys[i]));
  }

  pick(i, spoken = false) {
    if (i === this.current) return;
    this.current = i;
    this.draw();
    if (i < 0) this.onHover(-1, null);
    else {
      const outer = this.canvas.getBoundingClientRect();
      const [x, y] = this.toPixel(i);
      this.onHover(i, new DOMRect(outer.left + x - 6, outer.top + y - 6, 12, 12));
      if (spoken) announce(this.describe(i));
    }
  }

  /** Change the scale around a pixel, by default the middle. */
  zoomAt(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const [ux, uy] = this.fromPixel(x, y);
    const zoom = clamp(this.zoom * factor, 1, 60);
    const k = this.zoom / zoom;
    this.centre = [ux - (ux - this.centre[0]) * k, uy - (uy - this.centre[1]) * k];
    this.zoom = zoom;
    this.settle();
  }

  settle() {
    const slack = 0.5 / this.zoom;
    this.centre = this.centre.map((value) => (this.zoom === 1 ? 0.5 : clamp(value, slack - 0.05, 1.05 - slack)));
    this.canvas.classList.toggle("zoomed", this.zoom > 1);
    this.current = -1;
    this.onHover(-1, null);
    this.draw();
  }

  reset() {
    this.zoom = 1;
    this.settle();
  }

  /** Arrow keys go to the nearest point in their direction. */
  step(dx, dy) {
    const { ox, oy } = this.frame();
    if (this.current < 0) return this.pick(this.nearest(ox, oy, 2000), true);
    const [x0, y0] = this.toPixel(this.current);
    let [best, least] = [-1, Infinity];
    for (let i = 0; i < this.xs.length; i++) {
      if (i === this.current || this.dim?.(i)) continue;
      const [x, y] = this.toPixel(i);
      const along = (x - x0) * dx + (y - y0) * dy;
      const aside = Math.abs((x - x0) * dy) + Math.abs((y - y0) * dx);
      if (along <= 3 || aside > 2 * along) continue;
      const cost = along + 2 * aside;
      if (cost < least) [best, least] = [i, cost];
    }
    if (best >= 0) this.pick(best, true);
  }

  listen() {
    const { canvas } = this;
    const at = (event) => pixelOf(event, canvas);
    const fingers = new Map();
    let [moved, spread] = [0, 0];
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, at(event));
      [moved, spread] = [0, 0];
      this.path = this.lasso && fingers.size === 1 ? [at(event)] : [];
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!fingers.has(event.pointerId)) return this.pick(this.nearest(x, y));
      const [px, py] = fingers.get(event.pointerId);
      fingers.set(event.pointerId, [x, y]);
      moved += Math.abs(x - px) + Math.abs(y - py);
      if (this.path.length && fingers.size === 1) {
        this.pick(-1);
        this.path.push([x, y]);
        return this.draw();
      }
      if (!this.zooms) return;
      if (fingers.size === 2) {
        const [[ax, ay], [bx, by]] = [...fingers.values()];
        const now = Math.hypot(ax - bx, ay - by);
        if (spread) this.zoomAt(now / spread, (ax + bx) / 2, (ay + by) / 2);
        spread = now;
      } else if (this.zoom > 1 && moved > 4) {
        const { sx, sy } = this.frame();
        this.centre = [this.centre[0] - (x - px) / sx, this.centre[1] + (y - py) / sy];
        this.settle();
      }
    });
    const lift = (event) => {
      if (!fingers.delete(event.pointerId)) return;
      const drawn = this.path.length > 2 && moved > 6 && event.type === "pointerup" ? this.enclosed() : null;
      this.path = [];
      if (drawn) return this.select(event.shiftKey ? [...this.selected, ...drawn] : drawn);
      this.draw();
      if (event.type !== "pointerup" || moved > 6) return;
      const i = this.nearest(...at(event), event.pointerType === "touch" ? 26 : 14);
      // A finger cannot hover: its first tap shows the point, the next one opens it.
      if (this.lasso) return i >= 0 && this.toggle(i);
      if (event.pointerType === "touch" && i !== this.touched) {
        this.touched = i;
        this.pick(i);
      } else if (i >= 0) this.onOpen(i);
    };
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, lift);
    canvas.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.pick(-1));
    canvas.addEventListener("blur", () => this.pick(-1));
    if (this.zooms) {
      // The page scrolls as usual over the map: only a wheel with Ctrl (as a pinch on a touchpad), or over a map that
      // is already enlarged, changes its scale.
      const turn = (event) => {
        if (!event.ctrlKey && !event.metaKey && this.zoom === 1) return;
        event.preventDefault();
        this.zoomAt(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), ...at(event));
      };
      canvas.addEventListener("wheel", turn, { passive: false });
      canvas.addEventListener("dblclick", (event) => this.zoomAt(2.5, ...at(event)));
    }
    canvas.addEventListener("keydown", (event) => {
      if (ARROWS[event.key]) this.step(...ARROWS[event.key]);
      else if (event.key === "Enter" && this.lasso && this.current >= 0) this.toggle(this.current);
      else if (event.key === "Enter" && this.current >= 0) this.onOpen(this.current);
      else if (event.key === "Escape" && this.current >= 0) this.pick(-1);
      else if (this.zooms && (event.key === "+" || event.key === "=")) this.zoomAt(1.5);
      else if (this.zooms && event.key === "-") this.zoomAt(1 / 1.5);
      else if (this.zooms && event.key === "0") this.reset();
      else return;
      event.preventDefault();
    });
  }
}
