"use strict";
// What only `siammm explore` can do: show all images of a cluster, search by picture and by file name, name groups.

/** An answer of the server, or an error whose message is a sentence to show. */
async function ask(path, options = {}) {
  const fail = (sentence) => () => Promise.reject(new Error(sentence));
  const answer = await fetch(path, { ...options, credentials: "same-origin" }).catch(
    fail("The server does not answer: is siammm explore still running?"),
  );
  const body = await answer.json().catch(fail(`The server answered ${answer.status} without JSON.`));
  if (!answer.ok || body.error) throw new Error(visible(body.error ?? `The server answered ${answer.status}.`));
  return body;
}

/** Send something to the server, which wants to see the token of the page with it. */
function send(path, type, body) {
  const token = document.querySelector('meta[name="token"]')?.content ?? "";
  return ask(path, { method: "POST", body, headers: { "content-type": type, "x-siammm-token": token } });
}

/** A box to type the name of a group in; `after` is called when it has changed. */
function nameForm(group, after) {
  const { name: given } = groups[group];
  const box = el("input", { type: "text", maxlength: 100, autocomplete: "off", dir: "auto", value: given });
  const status = note({ role: "status" });
  const save = async (event) => {
    event.preventDefault();
    try {
      const body = JSON.stringify({ name: box.value });
      const { name } = await send(`group/${Number(group)}/name`, "application/json", body);
      groups[group].name = box.value = name;
      status.textContent = name ? "Kept in the run folder." : "It has no name now.";
      themeChanged();
      after();
    } catch (error) {
      status.textContent = error.message;
    }
  };
  const keep = el("button.tool", { type: "submit" }, "Save");
  return el("form.naming", { on: { submit: save } }, field("Name", box, "grow"), keep, status);
}

/** An image that the page may not hold, by its position in the data set; `view` shows it large. */
function remoteThumb(item, view) {
  const label = hasLabels && item.label >= 0 ? `, ${labelName(item.label)}` : "";
  const spoken = visible(`${item.id}${label}, cluster ${item.cluster}, similarity ${figure(item.similarity)}`);
  const { width, height } = thumbs;
  const on = { error: () => picture.classList.add("missing") };
  const source = { src: `thumbnail/${Number(item.position)}`, alt: "", loading: "lazy", decoding: "async" };
  const picture = el(`img.thumbnail ${PIXELATED ? "pixelated" : ""}`, { ...source, width, height, on });
  return button(picture, () => view(item), { class: "thumb", "aria-label": spoken, title: spoken });
}

/** Images from the server; more can be added. */
function remoteGrid(items, label) {
  const shown = [];
  const view = (item) => viewer.open(shown.map(serverImage), shown.indexOf(item));
  const grid = el("div.thumbnails.large", { role: "group", "aria-label": label });
  grid.add = (more) => {
    shown.push(...more);
    grid.append(...more.map((item) => remoteThumb(item, view)));
  };
  grid.clear = () => {
    shown.length = 0;
    grid.replaceChildren();
  };
  grid.add(items);
  return roving(grid);
}

function likelyCluster([index, share]) {
  const text = span("likely-text", cardLine(index, span("number", percent(share, 1))), meter(share));
  const attributes = { "aria-label": `${clusterTitle(index)}: share ${figure(share)}` };
  return el("li", clusterLink("likely", index, attributes, stripMosaic(clusters[index].central, 176), text));
}

/** What the run says of a picture that was searched for. */
function searchResult(found, name, url) {
  const own = el("img.query", { src: url, alt: "The picture that was searched for" });
  const pixelated = () => own.classList.toggle("pixelated", Math.max(own.naturalWidth, own.naturalHeight) <= 40);
  own.addEventListener("load", pixelated);
  const [index, share] = found.clusters[0] ?? [DASH, NaN];
  const facts = [fact("Cluster", index), fact("Share of its cluster", percent(share, 1))];
  if (hasGroups && found.group in groups) facts.unshift(fact("Group", groupLink(found.group)));
  facts.push(fact("Outlier score", figure(found.outlier_score)));
  const likely = [el("h2", "Likely clusters"), el("ul.likelies", ...found.clusters.slice(0, 5).map(likelyCluster))];
  const alike = [el("h2", "Most similar images"), remoteGrid(found.neighbours, "Most similar images")];
  return [
    el("div.query-side", own, named(name, "suspect-name"), el("dl.facts", ...facts)),
    el("div.query-main", ...likely, ...alike),
  ];
}

if (live) {
  sections.set("search", {
    title: "Search",
    icon: "M10 3a7 7 0 0 1 5.6 11.2l5.6 5.6-1.4 1.4-5.6-5.6A7 7 0 1 1 10 3zm0 2a5 5 0 1 0 0 10 5 5 0 0 0 0-10z",
    build(root) {
      const file = el("input.unseen", { type: "file", accept: "image/*", id: "picture" });
      const title = span("drop-title", "Drop a picture here, or choose one");
      const zone = el("label.drop", { for: "picture" }, title, span("note", "It stays on this machine."));
      const [status, total] = [note({ role: "status" }), note({ role: "status" })];
      const [result, names] = [el("div.search-result"), el("div.found")];
      const clear = () => [status, total, result, names].forEach((element) => element.replaceChildren());
      let [url, looks, turn] = [null, 0, 0]; // of several questions only the answer to the last is shown
      const search = async (name, question, address) => {
        const mine = ++looks;
        clear();
        status.textContent = "Searching \u2026";
        try {
          const found = await question();
          if (mine !== looks) return;
          status.textContent = "";
          result.append(...searchResult(found, name || found.id, address()));
          announce(`Most likely cluster ${found.clusters[0]?.[0]}`);
        } catch (error) {
          if (mine === looks) status.textContent = error.message;
        }
      };
      const look = (picture) =>
        search(picture.name ?? "", () => send("search", "application/octet-stream", picture), () => {
          if (url) URL.revokeObjectURL(url);
          return (url = URL.createObjectURL(picture));
        });
      const similar = (position) =>
        search("", () => ask(`similar/${position}`), () => `image/${position}`);
      file.addEventListener("change", () => file.files[0] && look(file.files[0]));
      Object.assign(this, { look, zone });
      const query = searchBox("Part of a file name", 150, async () => {
        const mine = ++turn;
        const text = query.value.trim();
        if (!text) return [total, names].forEach((element) => element.replaceChildren());
        try {
          const found = await ask(`find?query=${encodeURIComponent(text)}&limit=60`);
          if (mine !== turn) return;
          clear();
          const some = `${count(found.images.length)} of ${count(found.total)}`;
          total.textContent = found.total > found.images.length ? some : plural(found.total, "image");
          names.replaceChildren(remoteGrid(found.images, "Images found"));
        } catch (error) {
          if (mine === turn) total.textContent = error.message;
        }
      });
      const byPicture = el("section", el("h2", "By picture"), file, zone, status);
      const controls = el("div.controls", field("File name", query, "grow"));
      const byName = el("section", el("h2", "By name"), controls, total);
      root.append(head("Search"), el("div.search-top", byPicture, byName), result, names);
      let asked = null;
      return (params) => {
        const image = params.get("image");
        if (image === asked) return;
        asked = image;
        if (/^\d+$/.test(image ?? "")) similar(Number(image));
      };
    },
  });
  // A picture may be dropped anywhere, even before the section was shown: else the browser would leave the page.
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
