// All tokens as a strip under the arcs: a press goes there, colours say what was chosen.

const ARC = 64; // height of the arcs, in pixels
const LEVELS = 255; // colours of a strip

class Strip {
  constructor(canvas, arcs, seek, zoom) {
    Object.assign(this, { canvas, arcs, pen: canvas.getContext("2d") });
    const at = (event) => this.stepAt(event.clientX - canvas.getBoundingClientRect().left);
    const press = (event) => {
      this.under = at(event);
      if (event.type === "pointermove" && event.buttons !== 1) return this.tell(this.under);
      seek(this.under);
    };
    canvas.addEventListener("pointerdown", press);
    canvas.addEventListener("pointermove", press);
    canvas.addEventListener("pointerleave", () => {
      this.under = null;
      find("strip-hover").textContent = "";
    });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      zoom(Math.exp(event.deltaY * 0.002), at(event));
    }, { passive: false });
  }

  stepAt(x) {
    const { from, to } = this.window;
    const share = (x - this.left) / Math.max(this.right - this.left, 1);
    return Math.round(Math.max(from, Math.min(to, from + share * (to - from))));
  }

  x(t) {
    const { from, to } = this.window;
    if (to === from) return (this.left + this.right) / 2;
    return this.left + ((t - from) / (to - from)) * (this.right - this.left);
  }

  tell(t) {
    const { layer, row, values, measure } = this;
    const text = visible(stepText(layer, t, row)).trim();
    const value = measure === "share" ? signedPercent(values[t]) : measure === "use" ? percent(values[t]) : number(values[t]);
    find("strip-hover").textContent = `${layer.unit} ${layer.chunk[t]}${text ? ` “${text}”` : ""} · ${measure} ${value}`;
  }

  draw({ layer, row, t, window: shown, values, measure, sources, life, dark }) {
    Object.assign(this, { layer, row, values, measure, window: shown, sums: layer.unit === "token" && layer.headCount > 1 });
    const style = getComputedStyle(document.documentElement);
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    this.left = parseFloat(style.getPropertyValue("--gutter"));
    this.right = Math.max(this.left + 10, width - parseFloat(style.getPropertyValue("--keys")));
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawCells(t, height, style, dark);
    this.drawArcs(t, sources, life);
    if (this.under != null) this.tell(this.under); // a press changes the shares
    this.canvas.setAttribute("aria-label", `${layer.unit} ${layer.chunk[t]} of the strip, coloured by ${measure}`);
  }

  drawCells(t, height, style, dark) {
    const { pen, window: { from, to }, layer, values } = this;
    const cell = (this.right - this.left) / Math.max(to - from, 1);
    const [start, whole] = to > from ? [this.left - cell / 2, this.right - this.left + cell] : [this.left, cell];
    const columns = Math.max(1, Math.min(Math.round(whole), 4096));
    const { high, low } = envelope(values, from, to, columns);
    let top = this.measure === "share" || layer.gateNames.includes(this.measure) ? 1 : 0;
    if (!top) top = largestOf(values);
    const each = whole / columns;
    const colours = this.colours(style, dark);
    for (let column = 0; column < columns; column++) {
      const value = Math.abs(low[column]) > Math.abs(high[column]) ? low[column] : high[column];
      if (!Number.isFinite(value)) continue;
      const size = top > 0 ? Math.min(1, Math.abs(value) / top) : 0;
      pen.fillStyle = colours[value < 0 ? 1 : 0][Math.round(size * LEVELS)];
      pen.fillRect(start + column * each, 0, each + 0.5, height);
    }
    const ink = style.getPropertyValue("--ink").trim();
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    const box = Math.max(cell, 3);
    if (cell >= 11 && recording.texts !== null) this.drawTexts(cell, height, ink, style);
    if (t >= from && t <= to) pen.strokeRect(this.x(t) - box / 2, 0.75, box, height - 1.5);
  }

  // Two tables: of values above 0 and below. Shares tint the ground in the colour of writes, those
  // against the read in another; neither is a head's where shares are sums over heads. They are
  // made once per theme: a strip has thousands of columns.
  colours(style, dark) {
    const key = `${this.measure === "share"} ${dark} ${this.sums}`;
    if (this.tableKey === key) return this.tables;
    const [ground, ...tints] = ["--ground", ...(this.sums ? ["--muted", "--use"] : ["--write", "--input"])].map((name) => style.getPropertyValue(name).trim());
    const mixed = (tint, size) => (size === 0 ? ground : `color-mix(in srgb, ${tint} ${(18 + 70 * Math.sqrt(size)).toFixed(0)}%, ${ground})`);
    this.tables = tints.map((tint) => Array.from({ length: LEVELS + 1 }, (_, level) => {
      const size = level / LEVELS;
      return this.measure === "share" ? mixed(tint, size) : css(volumeColour(size, dark));
    }));
    this.tableKey = key;
    return this.tables;
  }

  drawTexts(cell, height, ink, style) {
    const { pen, window: { from, to }, layer, row } = this;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    const halo = style.getPropertyValue("--halo").trim();
    for (let t = from; t <= to; t++) {
      const text = visible(stepText(layer, t, row)).trim().slice(0, 40);
      pen.save();
      pen.beginPath();
      pen.rect(this.x(t) - cell / 2 + 1, 0, cell - 2, height);
      pen.clip();
      const wide = pen.measureText(text).width > cell - 4;
      const upright = wide && cell < 30;
      pen.textAlign = wide ? "left" : "center";
      pen.translate(upright || !wide ? this.x(t) : Math.max(0, this.x(t) - cell / 2) + 3, upright ? height - 2 : height / 2);
      if (upright) pen.rotate(-Math.PI / 2);
      if (this.measure !== "share" || this.sums) {
        pen.strokeStyle = halo;
        pen.lineWidth = 3;
        pen.strokeText(text, 0, 0);
      }
      pen.fillStyle = ink;
      pen.fillText(text, 0, 0);
      pen.restore();
    }
  }

  drawArcs(t, sources, life) {
    const { layer, arcs, window: { from, to } } = this;
    arcs.replaceChildren();
    const end = this.x(t);
    const clamp = (x) => Math.max(this.left - 6, Math.min(this.right + 6, x));
    // The weakest first: the strongest lies on top.
    for (const write of [...(sources?.writes ?? [])].reverse()) {
      const size = Math.abs(write.part);
      if (size < 0.0005) continue;
      const at = fractionOf(layer.chunk, write.position);
      const begin = clamp(this.x(at));
      const reach = Math.abs(end - begin);
      const high = ARC - 6 - Math.min(ARC - 14, 10 + reach * 0.35);
      const d = reach < 2
        ? `M${(begin - 3).toFixed(1)} ${ARC}C${(begin - 9).toFixed(1)} ${ARC - 22} ${(begin + 9).toFixed(1)} ${ARC - 22} ${(begin + 3).toFixed(1)} ${ARC}`
        : `M${begin.toFixed(1)} ${ARC}C${begin.toFixed(1)} ${high.toFixed(1)} ${end.toFixed(1)} ${high.toFixed(1)} ${end.toFixed(1)} ${ARC}`;
      const path = svg("path", {
        class: `arc${write.part < 0 ? " against" : ""}${at < from || at > to ? " outside" : ""}`,
        d,
        style: `stroke: ${sourceColour(layer, write.head)}`,
        "stroke-width": (1 + 9 * Math.min(size, 1)).toFixed(2),
        "data-position": write.position, "data-head": write.head, "data-part": write.part, "data-share": write.share,
      });
      path.append(svg("title", {}, sourceName(layer, this.row, write)));
      path.addEventListener("pointerenter", () => (find("strip-hover").textContent = sourceName(layer, this.row, write)));
      arcs.append(path);
    }
    if (life) {
      const stop = clamp(this.x(life.half >= 0 ? fractionOf(layer.chunk, life.half) : layer.chunks - 1));
      arcs.append(svg("line", { class: `life${life.half >= 0 ? " ends" : ""}`, x1: clamp(end), x2: stop, y1: ARC - 2, y2: ARC - 2 }));
    }
  }
}

// A write that fed a read, in words: its text, token, head and part.
function sourceName(layer, row, { position, head, part, share }) {
  const text = visible(positionText(layer, row, position)).trim();
  const heads = layer.headCount > 1 ? ` · head ${head}` : "";
  return `${text ? `“${text}” ` : ""}${layer.unit} ${position}${heads} · ${signedPercent(part)} of the read${layer.unit === "token" ? ` · share ${number(share)}` : ""}`;
}

// Parts of a read: one decimal for all, so that a list can be added up.
const signedPercent = (value) => `${(Math.abs(value) < 5e-4 ? 0 : value * 100).toFixed(1).replace("-", "−")} %`;

// A token or chunk by its number, with its text where there is one.
function writeName(layer, row, position) {
  const text = visible(positionText(layer, row, position)).trim();
  return `${layer.unit} ${position}${text ? ` “${text}”` : ""}`;
}
