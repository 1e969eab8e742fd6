// "This read came from": the writes of a read as a list whose lines go there, and the life of a write.

const LISTED = 10; // writes that get a line

function showSources(layer, row, t, sources, life, go) {
  const line = (name, part, className) => {
    const item = element("li", "", className);
    item.append(element("span", name), element("output", signedPercent(part)));
    return item;
  };
  find("sources-note").hidden = layer.unit === "token" || !layer.sources;
  const list = find("source-list");
  const focused = [...list.querySelectorAll("button")].indexOf(document.activeElement);
  if (!sources) {
    const why = layer.sources ? "Not known: nothing was read." : "Not on this page: the recording has no history of the writes, or a too long one.";
    list.replaceChildren(element("li", isPresent(layer, t, row) ? why : `This row has no such ${layer.unit}.`));
  } else {
    const listed = sources.writes.filter(({ part }) => Math.abs(part) >= 0.0005).slice(0, LISTED);
    list.replaceChildren(...listed.map((write) => {
      const item = document.createElement("li");
      const button = element("button", "");
      button.type = "button";
      button.title = sourceName(layer, row, write);
      const swatch = element("i", "");
      swatch.style.background = sourceColour(layer, write.head);
      const text = visible(positionText(layer, row, write.position)).trim();
      const name = `${write.position === layer.chunk[t] ? "itself" : `${layer.unit} ${write.position}`}${layer.headCount > 1 ? `, head ${write.head}` : ""}`;
      button.append(swatch, element("b", text || ""), element("span", name), element("output", signedPercent(write.part)));
      button.addEventListener("click", () => go(stepOf(layer.chunk, write.position)));
      item.append(button);
      return item;
    }), ...restLines(layer, sources, listed, line));
  }
  list.querySelectorAll("button")[focused]?.focus({ preventScroll: true }); // its line was made anew
  find("life").textContent = life ? lifeText(layer, row, life) : "";
}

// The lines that complete a list to the whole read.
function restLines(layer, sources, listed, line) {
  const sum = (writes) => writes.reduce((total, { part }) => total + part, 0);
  return [
    line("all other writes", sources.others + sum(sources.writes) - sum(listed), "others"),
    line("a state from before the recording", sources.rest, "rest"),
    ...(layer.unit === "token" ? [] : [line("not additive: of several writes together", sources.joint, "joint")]),
    line("together", sum(sources.writes) + sources.others + sources.rest + sources.joint, "sum"),
  ];
}

function lifeText(layer, row, { half, left, taker, taken }) {
  const named = (position) => writeName(layer, row, position);
  const fades = half >= 0 ? `half of it was gone at ${named(half)}` : "more than half of it stayed";
  const by = taker >= 0 ? `; ${named(taker)} took most, ${signedPercent(taken)}` : Number.isFinite(taken) ? "; no write took any of it" : "";
  return `What it wrote: ${fades}, ${signedPercent(left)} was left at the end${by}.`.replaceAll(" %", "\u00a0%");
}

// One switch per head, in the colour of its marks and arcs.
function fillHeads(index, hidden, changed) {
  const heads = headNumbers(index);
  find("heads").hidden = heads.length < 2;
  find("heads").replaceChildren(...(heads.length < 2 ? [] : heads.map((head) => {
    const label = element("label", "", "head");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = !hidden.has(head);
    box.id = `head-${head}`;
    box.addEventListener("change", () => (box.checked ? hidden.delete(head) : hidden.add(head), changed()));
    const swatch = element("i", "");
    swatch.style.background = headColour(head);
    label.append(box, swatch, `Head ${head}`);
    return label;
  })));
}
