"use strict";
// What the reader takes away: tables as CSV files.

/** A field of a CSV file. Text that a spreadsheet would take for a formula gets an apostrophe in front. */
function csvField(value) {
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) || /^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** The text of a CSV file of these lines of values. */
function csvText(lines) {
  const text = lines.map((line) => line.map(csvField).join(",")).join("\r\n") + "\r\n";
  // Excel needs a byte order mark to read UTF-8; plain ASCII needs none, and other readers are better off without.
  return /^[\x00-\x7f]*$/.test(text) ? text : `\ufeff${text}`;
}

function download(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** A text that a reader has typed as the name of a file. */
function fileName(text) {
  const plain = text.normalize().replace(/[^\p{L}\p{N}._-]+/gu, "-");
  return plain.replace(/^[-.]+|[-.]+$/g, "").slice(0, 80);
}

/** What a table says of an image whatever it is about: columns, and their values. */
const IMAGE_COLUMNS = ["image", ...(hasGroups ? ["group", "group_name"] : []), "cluster"];

function imageCells(row) {
  const group = images.group[row];
  return [images.id[row], ...(hasGroups ? [group, groups[group]?.name ?? ""] : []), images.cluster[row]];
}
