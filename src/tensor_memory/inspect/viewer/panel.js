// The chunk shown, in words and numbers. All text goes in as text, never as markup.

const find = (id) => document.getElementById(id);

const NEAR = 24; // tokens before the chunk, for the reader, at most,
const ROOM = 80; // and about as many characters
const POINTS = 4; // writes, and reads, that get a line of the table
const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\r/g, "␍").replace(/\t/g, "⇥");

function showPanel(layer, layerIndex, t, row) {
  const chunk = layer.chunk[t];
  const at = (t * recording.rows + row) * 2;
  const [start, stop] = [layer.span[at], layer.span[at + 1]];
  const present = isPresent(layer, t, row);
  const place = layer.unit === "token";
  find("chunk-name").replaceChildren(`${place ? "Token" : "Chunk"} ${chunk} `, small(layer.chunks > 1 ? `of 0 to ${layer.chunk[layer.chunks - 1]}` : "the only one"));
  find("chunk-status").textContent = !present
    ? `This row has no such ${layer.unit}.`
    : place ? (hasWritten(layer, t, row) ? "written, then read" : "read; nothing written, its rate is 0") : `${stop - start === 1 ? `Token ${start}` : `Tokens ${start} to ${stop - 1}`} · ` +
      (isWritten(layer, t, row) ? "read, then written" : "read, never written: unfinished or dropped");
  showText(present, row, start, stop);
  showFrame(present, row, start);
  const value = t * recording.rows + row;
  const writes = Array.from({ length: layer.writes }, (_, head) => {
    const point = pointAt(layer, layer.writeAt, layer.writes, t, row, head);
    const at = value * layer.writes + head;
    return [point, number(layer.spread?.[at] ?? null), number(layer.content[at])];
  });
  const reads = Array.from({ length: layer.reads }, (_, index) => [pointAt(layer, layer.readAt, layer.reads, t, row, index), "", ""]);
  showPoints(layer, [["write", writes], ["read", reads]]);
  const levels = levelsAt(layer, t, row, -1);
  const rows = [
    [layer.reads > 1 ? "Readout ‖r‖, mean" : "Readout ‖r‖", number(layer.readout[value])],
    [`Largest ${layer.normName} in the grid`, number(present ? (Math.max(...levels) / 255) * layer.top : NaN)],
    [place ? "Rate β, keep α" : "Gates i, f, o", layer.gateNames.map((_, gate) => number(layer.gates[value * layer.gateCount + gate])).join(" · ")],
    ["Use ‖σ(γ)m‖ / ‖x‖", percent(layer.use[value])],
    ["Layer gate σ(γ)", layer.gate === null ? "none" : number(layer.gate)],
  ];
  find("values").replaceChildren(...rows.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
}

function element(kind, text, className) {
  const node = document.createElement(kind);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

const small = (text) => element("small", text);

function percent(value) {
  if (!Number.isFinite(value)) return "–";
  const hundredfold = value * 100;
  return `${Number.isInteger(hundredfold) || hundredfold >= 10 ? hundredfold.toFixed(0) : number(hundredfold)} %`;
}

function showText(present, row, start, stop) {
  const box = find("text");
  let room = ROOM;
  const known = present ? tokenTexts(row, Math.max(0, start - NEAR), stop) : [];
  const texts = known.reverse().filter(([at, text]) => at >= start || (room -= text.length) > 0).reverse();
  box.hidden = recording.texts === null;
  box.replaceChildren(...texts.map(([at, text]) => {
    return element("span", visible(text), at < start ? "near" : "here");
  }));
  const first = box.querySelector(".here");
  box.scrollTop = first && box.scrollHeight > box.clientHeight ? first.offsetTop - box.offsetTop - 34 : 0;
  if (!texts.some(([at]) => at >= start)) box.append(element("em", "no text for these tokens", "near"));
}

function showFrame(present, row, start) {
  const figure = find("frame");
  figure.hidden = recording.frames === null;
  if (figure.hidden) return;
  const at = Math.floor(start / recording.tokensPerFrame);
  const data = present ? recording.frames[row]?.[at] : undefined;
  const image = find("frame-image");
  image.hidden = data === undefined;
  if (data !== undefined) {
    image.src = `data:image/png;base64,${data}`;
    image.alt = `Frame ${at}, where this chunk begins`;
  }
  find("frame-caption").textContent = data === undefined ? "no frame for this chunk" : `Frame ${at}`;
}

// Writes and reads in one table: where, how widely, how strongly.
function showPoints(layer, kinds) {
  const names = ["x", "y", "z", "w"].slice(0, layer.axes);
  const table = find("points");
  const head = document.createElement("tr");
  head.append(...["", ...names, "σ", "content"].map((name) => element("th", name)));
  table.tHead.replaceChildren(head);
  const lines = kinds.flatMap(([kind, points]) => {
    const kept = points.slice(0, POINTS).map(([point, ...rest], index) => {
      const line = document.createElement("tr");
      const coordinates = names.map((_, axis) => (point ? point[axis].toFixed(2).replace("-", "−") : "–"));
      const name = points.length > 1 ? `${kind} ${index}` : kind;
      const heads = kind === "write" ? layer.writes : layer.heads;
      if (heads > 1) line.style.setProperty(`--${kind}`, headColour(index % heads));
      line.append(element("td", name, kind), ...[...coordinates, ...rest].map((text) => element("td", text)));
      return line;
    });
    if (points.length > POINTS) {
      const line = document.createElement("tr");
      const cell = element("td", `and ${points.length - POINTS} more ${kind}s`);
      cell.colSpan = names.length + 3;
      line.append(cell);
      kept.push(line);
    }
    return kept;
  });
  table.tBodies[0].replaceChildren(...lines);
}
