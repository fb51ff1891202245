"use strict";
// What only `siammm explore` can do: all images of a cluster, a picture's own cluster and neighbours, names of files.

/** An answer of the server, or an error whose message is a sentence to show. */
async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, credentials: "same-origin" });
  } catch {
    throw new Error("The server does not answer: is siammm explore still running?");
  }
  let body = null;
  try {
    body = await answer.json();
  } catch {
    throw new Error(`The server answered ${answer.status}, and not what was asked.`);
  }
  if (!answer.ok || body.error) throw new Error(visible(body.error ?? `The server answered ${answer.status}.`));
  return body;
}

/** An image that the page may not know, by its place in the data set. */
function remoteThumb(item) {
  const label = hasLabels && item.label >= 0 ? `, ${labelName(item.label)}` : "";
  const spoken = visible(`${item.id}${label}, cluster ${item.cluster}, similarity ${figure(item.similarity)}`);
  const picture = el(
    "img",
    {
      class: `thumbnail${PIXELATED ? " pixelated" : ""}`,
      src: `thumbnail/${Number(item.position)}`,
      alt: "",
      loading: "lazy",
      decoding: "async",
      width: thumbs.width,
      height: thumbs.height,
    },
  );
  picture.addEventListener("error", () => picture.classList.add("missing"));
  return el(
    "button",
    {
      type: "button",
      class: "thumb",
      "aria-label": spoken,
      title: spoken,
      on: { click: () => openCluster(item.cluster) },
    },
    picture,
  );
}

function remoteGrid(items, label) {
  const group = el("div", { class: "thumbnails large", role: "group", "aria-label": label }, ...items.map(remoteThumb));
  return items.length ? roving(group) : group;
}

function likelyCluster([index, probability]) {
  const cluster = clusters[index];
  const title = majority(cluster.label, "card-label");
  return el(
    "li",
    {},
    el(
      "a",
      {
        class: "likely",
        href: clusterAddress(index),
        "data-cluster": index,
        "aria-label": `${clusterTitle(index)}: probability ${figure(probability)}`,
      },
      stripMosaic(cluster.central, 4, 176),
      span(
        "likely-text",
        span("card-line", span("card-number", `#${index}`), title, span("number", percent(probability, 1))),
        meter(probability),
      ),
    ),
  );
}

function addSearch() {
  sections.set("search", {
    title: "Search",
    icon: "M10 3a7 7 0 0 1 5.6 11.2l5.6 5.6-1.4 1.4-5.6-5.6A7 7 0 1 1 10 3zm0 2a5 5 0 1 0 0 10 5 5 0 0 0 0-10z",
    build(root) {
      const file = el("input", { type: "file", accept: "image/*", class: "unseen", id: "picture" });
      const zone = el(
        "label",
        { class: "drop", for: "picture" },
        span("drop-title", "Drop a picture here, or choose one"),
        span("note", "It goes to siammm on this machine and nowhere else."),
      );
      const status = el("p", { class: "note", role: "status" });
      const result = el("div", { class: "search-result" });
      let address = null;
      let looks = 0;
      const look = async (picture) => {
        const mine = ++looks; // only the last picture's answer is shown
        status.textContent = "Looking \u2026";
        result.replaceChildren();
        names.replaceChildren();
        total.textContent = "";
        try {
          const token = document.querySelector('meta[name="token"]')?.content ?? "";
          const headers = { "content-type": "application/octet-stream", "x-siammm-token": token };
          const found = await ask("search", { method: "POST", body: picture, headers });
          if (mine !== looks) return;
          if (address) URL.revokeObjectURL(address);
          address = URL.createObjectURL(picture);
          status.textContent = "";
          const own = el("img", { class: "query", src: address, alt: "The picture that was searched for" });
          own.addEventListener(
            "load",
            () => own.classList.toggle("pixelated", Math.max(own.naturalWidth, own.naturalHeight) <= 40),
          );
          const facts = el(
            "dl",
            { class: "facts" },
            fact("Cluster", found.clusters.length ? String(found.clusters[0][0]) : DASH),
            fact("Probability", found.clusters.length ? percent(found.clusters[0][1], 1) : DASH),
            fact("Outlier score", figure(found.outlier_score)),
          );
          result.append(
            el("div", { class: "query-side" }, own, named(picture.name ?? "", "suspect-name"), facts),
            el(
              "div",
              { class: "query-main" },
              el("h2", {}, "Likely clusters"),
              el("ul", { class: "likelies" }, ...found.clusters.slice(0, 5).map(likelyCluster)),
              el("h2", {}, "Most similar images"),
              remoteGrid(found.neighbours, "Most similar images"),
            ),
          );
          announce(`Most likely cluster ${found.clusters[0]?.[0]}`);
        } catch (error) {
          if (mine === looks) status.textContent = error.message;
        }
      };
      file.addEventListener("change", () => file.files[0] && look(file.files[0]));
      this.look = look;
      this.zone = zone;
      const query = el(
        "input",
        { type: "search", placeholder: "Part of a file name", autocomplete: "off", spellcheck: "false" },
      );
      const total = el("p", { class: "note", role: "status" });
      const names = el("div", { class: "found" });
      let [timer, turn] = [0, 0];
      const find = async () => {
        const mine = ++turn;
        const text = query.value.trim();
        if (!text) {
          total.textContent = "";
          names.replaceChildren();
          return;
        }
        try {
          const found = await ask(`find?query=${encodeURIComponent(text)}&limit=60`);
          if (mine !== turn) return;
          result.replaceChildren();
          status.textContent = "";
          const some = `${count(found.images.length)} of ${count(found.total)}`;
          total.textContent = found.total > found.images.length ? some : plural(found.total, "image");
          names.replaceChildren(remoteGrid(found.images, "Images found"));
        } catch (error) {
          if (mine === turn) total.textContent = error.message;
        }
      };
      query.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(find, 150);
      });
      root.append(
        el("header", { class: "head" }, el("h1", {}, "Search")),
        el(
          "div",
          { class: "search-top" },
          el("section", {}, el("h2", {}, "By picture"), file, zone, status),
          el(
            "section",
            {},
            el("h2", {}, "By name"),
            el("div", { class: "controls" }, field("File name", query, "grow")),
            total,
          ),
        ),
        result,
        names,
      );
    },
    update() {},
  });
}

/** A picture may be dropped anywhere, even before the section was shown: else the browser would leave the page. */
function watchDrops() {
  const search = sections.get("search");
  addEventListener("dragover", (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    search.zone?.classList.add("over");
  });
  addEventListener("dragleave", (event) => event.relatedTarget === null && search.zone?.classList.remove("over"));
  addEventListener("drop", (event) => {
    const picture = event.dataTransfer?.files?.[0];
    if (!picture) return;
    event.preventDefault();
    search.zone?.classList.remove("over");
    if (where().section !== "search" || where().params.has("cluster")) go("#/search");
    search.look(picture);
  });
}

if (live) {
  addSearch();
  watchDrops();
}
