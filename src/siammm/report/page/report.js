"use strict";
// Puts the page together: the rail, the theme, and which section is shown.

const shownSections = new Map(); // id -> element; a section is built when first shown
const scrolled = new Map();
let present = null; // the id of the section that is shown

function show() {
  const { section, params } = where();
  if (present !== section) {
    if (present) {
      scrolled.set(present, scrollY);
      shownSections.get(present).hidden = true;
    }
    const moved = present !== null;
    present = section;
    if (!shownSections.has(section)) {
      const element = el(`div.section.section-${section}`, { id: `section-${section}` });
      shownSections.set(section, element);
      document.getElementById("main").append(element);
      sections.get(section).update = sections.get(section).build(element);
    }
    shownSections.get(section).hidden = false;
    document.querySelector("#nav a[aria-current]")?.removeAttribute("aria-current");
    document.querySelector(`#nav a[data-section="${section}"]`).setAttribute("aria-current", "page");
    scrollTo({ top: scrolled.get(section) ?? 0, behavior: "instant" });
    if (moved && !params.has("cluster")) announce(sections.get(section).title);
  }
  sections.get(section).update?.(params);
  const index = params.has("cluster") ? Number(params.get("cluster")) : -1;
  if (Number.isInteger(index) && index >= 0 && index < clusters.length) detail.show(index);
  else {
    detail.hide();
    document.title = `${sections.get(section).title} \u2013 ${visible(contents.title)}`;
  }
}

function makeRail() {
  document.getElementById("run-name").textContent = visible(run.name);
  const items = [...sections].map(([id, { title, short, icon: path }]) => {
    const text = span("nav-text", span("long", title), el("span.short", { "aria-hidden": "true" }, short ?? title));
    return el("li", el("a", { href: address(id), "data-section": id, "aria-label": title }, icon(path), text));
  });
  document.getElementById("nav").append(el("ul", ...items));
}

const SUN = "M12 7a5 5 0 1 1 0 10 5 5 0 0 1 0-10zM11 1h2v4h-2zM11 19h2v4h-2zM1 11h4v2H1zM19 11h4v2h-4z";
const MOON = "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z";

function makeTheme() {
  const control = document.getElementById("theme");
  const name = () => {
    const text = isDark() ? "Light" : "Dark";
    control.replaceChildren(icon(isDark() ? SUN : MOON), span("nav-text", text));
    control.setAttribute("aria-label", `Switch to the ${text.toLowerCase()} theme`);
  };
  const saved = stored((storage) => storage.getItem("siammm-theme"));
  if (saved) setTheme(saved);
  themeWatchers.add(name);
  control.addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
  name();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-cluster]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  openCluster(Number(link.dataset.cluster));
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is taken by the sections
  document.getElementById("main").focus();
});
addEventListener("popstate", show);
addEventListener("hashchange", show);
history.scrollRestoration = "manual";

makeTheme();
makeRail();
watchTips();
show();
performance.mark("siammm-shown");
