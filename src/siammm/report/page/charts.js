"use strict";
// Charts of few points, as SVG: lines over epochs, and bars. Each says in words what it shows, follows the pointer, and
// can be walked with the arrow keys.

const PLOT = { left: 46, right: 14, top: 12, bottom: 26 };

/** Round values that divide a range into about n parts. */
function ticks(low, high, n = 4) {
  if (!(high > low)) return [low];
  const rough = (high - low) / n;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough) ?? 10 * power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades > 2.5 ? [1] : decades > 1.6 ? [1, 3] : [1, 2, 5];
  const first = Math.floor(Math.log10(low));
  const values = range(Math.ceil(decades) + 2).flatMap((i) => steps.map((k) => k * 10 ** (first + i)));
  const found = values.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return found.length > 1 ? found : [low, high];
}

function tickText(value) {
  if (Math.abs(value) >= 10000) return `${Number((value / 1000).toPrecision(5))}k`;
  return String(Number(value.toPrecision(3))).replace("-", "\u2212");
}

/** A scale from values to pixels, of one of two kinds. */
function scale(low, high, from, to, log = false) {
  const map = log ? Math.log : (value) => value;
  const width = map(high) - map(low) || 1;
  const convert = (value) => from + ((map(value) - map(low)) / width) * (to - from);
  convert.ticks = (n) => (log ? logTicks(low, high) : ticks(low, high, n));
  return convert;
}

/** Draws whenever its width changes, and not before it has one. */
function redrawn(element, draw) {
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.round(element.clientWidth);
    if (now && now !== width) draw((width = now));
  }).observe(element);
}

function axes(svg, x, y, width, height) {
  for (const value of y.ticks(4)) {
    const at = Math.round(y(value)) + 0.5;
    svg.append(
      el("line.gridline", { x1: PLOT.left, x2: width - PLOT.right, y1: at, y2: at }),
      el("text.tick", { x: PLOT.left - 8, y: at + 4, "text-anchor": "end" }, tickText(value)),
    );
  }
  // The x axis counts epochs or images, so that only whole numbers make sense.
  for (const value of x.ticks(Math.max(2, Math.floor(width / 110))).filter((one) => Math.abs(one % 1) < 1e-9)) {
    svg.append(el("text.tick", { x: x(value), y: height - 6, "text-anchor": "middle" }, tickText(value)));
  }
}

/** A chart with a title and a line of text that says what is under the pointer. */
function captioned(title, readout, ...children) {
  return el("figure.chart", el("figcaption", span("chart-title", title), readout), ...children);
}

/**
 * Lines over epochs. lines: [{name, points, step, style}]; marks: [[epoch, value, text]] are dots on the first line.
 * Numbers of clusters (step) that fall by much get a logarithmic scale.
 */
function lineChart({ title, lines, marks = [], height = 190, words = "" }) {
  const given = lines.flatMap((line) => line.points.map(([, value]) => value));
  const log = lines[0]?.step && Math.max(...given) > 12 * Math.max(1, Math.min(...given));
  const usable = ([, value]) => Number.isFinite(value) && (!log || value > 0);
  const usableLines = lines.map((line) => ({ ...line, points: line.points.filter(usable) }));
  const drawn = usableLines.filter((line) => line.points.length);
  const all = drawn.flatMap((line) => line.points);
  const readout = el("output.readout");
  const holder = el("div.plot");
  const keys = drawn.map((line) => span(`key ${line.style || ""}`, named(line.name)));
  const chart = captioned(title, readout, drawn.length > 1 && el("div.legend", ...keys), holder);
  if (!all.length) {
    holder.append(el("p.empty", "Nothing was recorded."));
    return chart;
  }
  const epochs = [...new Set(all.map(([epoch]) => epoch))].sort((a, b) => a - b);
  const values = all.map(([, value]) => value);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  if (!log && low > 0 && low < 0.35 * high) low = 0;
  else if (!log) low -= 0.05 * (high - low); // a line on the edge looks cut off
  const said = drawn.map((line) => {
    const ends = [line.points[0], line.points.at(-1)];
    return `${line.name}: ${ends.map(([epoch, value]) => `${figure(value)} at epoch ${figure(epoch)}`).join(", ")}`;
  });

  const rest = () => (readout.textContent = drawn.map((line) => figure(line.points.at(-1)[1])).join(" \u00b7 "));
  rest();

  redrawn(holder, (width) => {
    const x = scale(epochs[0], epochs.at(-1), PLOT.left, width - PLOT.right);
    const y = scale(low, high, height - PLOT.bottom, PLOT.top, log);
    const label = `${title}. ${said.join("; ")}. ${words}`;
    const svg = el("svg", { width, height, role: "img", tabindex: "0", "aria-label": label });
    axes(svg, x, y, width, height);
    const mark = (epoch, value) => svg.append(el("circle.mark", { cx: x(epoch), cy: y(value), r: 3 }));
    for (const line of drawn) {
      const path = line.points.map(([epoch, value], i) => {
        const [at, level] = [x(epoch).toFixed(1), y(value).toFixed(1)];
        return i === 0 ? `M${at} ${level}` : line.step ? `H${at}V${level}` : `L${at} ${level}`;
      });
      svg.append(el(`path.line ${line.style || ""}`, { d: path.join("") }));
      if (line.points.length === 1) mark(...line.points[0]);
    }
    for (const [epoch, value] of marks) if (!log || value > 0) mark(epoch, value);
    const cross = el("line.cross", { y1: PLOT.top, y2: height - PLOT.bottom, visibility: "hidden" });
    svg.append(cross);
    let index = epochs.length - 1;
    const point = (i) => {
      index = clamp(i, 0, epochs.length - 1);
      const epoch = epochs[index];
      for (const name of ["x1", "x2"]) cross.setAttribute(name, x(epoch));
      cross.setAttribute("visibility", "visible");
      const parts = drawn.map((line) => {
        const found = line.points.findLast(([at]) => at <= epoch) ?? line.points[0];
        return drawn.length > 1 ? `${line.name} ${figure(found[1])}` : figure(found[1]);
      });
      const here = marks.filter(([at]) => at === epoch).map(([, , text]) => text);
      readout.textContent = [`epoch ${figure(epoch)}`, ...parts, ...here].join(" \u00b7 ");
    };
    const leave = () => {
      cross.setAttribute("visibility", "hidden");
      rest();
    };
    svg.addEventListener("pointermove", (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      const away = epochs.map((epoch) => Math.abs(x(epoch) - at));
      point(away.indexOf(Math.min(...away)));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (!step) return;
      event.preventDefault();
      point(index + step);
      announce(readout.textContent);
    });
    holder.replaceChildren(svg);
  });
  return chart;
}

/** A bar of shares, its parts in the colours of their labels; the rest in grey. */
function shareBar(parts, total, className = "") {
  const part = ([colour, n]) => n > 0 && el("span", { style: { flex: `${n} 0 0`, background: colour } });
  const rest = total - sumOf(parts);
  const grey = rest > 0 && el("span.rest", { style: { flex: `${rest} 0 0` } });
  return el(`span.share-bar ${className}`, { "aria-hidden": "true" }, ...parts.map(part), grey);
}

/** A single value from 0 to 1. */
function meter(value) {
  const level = el("span", { style: { width: `${(100 * clamp(value || 0, 0, 1)).toFixed(1)}%` } });
  return el("span.meter", { "aria-hidden": "true" }, level);
}
