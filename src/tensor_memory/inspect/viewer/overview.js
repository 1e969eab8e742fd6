// Layers × time: one line per layer, the largest of each column; a drag chooses what is shown below.
// Of the heads of a place memory it is the one that is shown.

class Overview {
  constructor(root, { brush, seek }) {
    Object.assign(this, { root, canvas: root.querySelector("canvas"), brushed: root.querySelector(".window"), cursor: root.querySelector(".cursor") });
    let begun = null;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
      const line = this.lines[Math.max(0, Math.min(this.lines.length - 1, Math.floor(((event.clientY - box.top) / box.height) * this.lines.length)))];
      return { share, line, x: event.clientX };
    };
    const shown = ({ share }) => this.stepAt(this.shown, share); // a brush is of the layer shown
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      begun = at(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      this.tell(at(event));
      if (begun && Math.abs(event.clientX - begun.x) > 4) brush(shown(begun), shown(at(event)));
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (begun && Math.abs(event.clientX - begun.x) <= 4) seek(begun.line, this.stepAt(begun.line, begun.share));
      begun = null;
    });
    this.canvas.addEventListener("pointercancel", () => (begun = null));
    this.canvas.addEventListener("pointerleave", () => (find("strip-hover").textContent = ""));
    this.canvas.addEventListener("dblclick", () => brush(0, recording.layers[this.shown].chunks - 1));
  }

  // Steps of a layer that would fill the width: fewer where a step is a chunk of tokens.
  countOf(line) {
    return recording.layers[line].chunks * (this.tokens / Math.max(1, lightArrays(line).tokens));
  }

  stepAt(line, share) {
    return Math.min(recording.layers[line].chunks - 1, Math.floor(share * this.countOf(line)));
  }

  tell({ line, share }) {
    const layer = recording.layers[line];
    const step = this.stepAt(line, share);
    const value = this.rows[this.lines.indexOf(line)][step];
    find("strip-hover").textContent = `${layer.name || `layer ${line}`}, ${layer.unit} ${lightArrays(line).chunk[step]} · ${this.measure} ${this.measure === "use" ? percent(value) : number(value)}`;
  }

  // Colours every line again; what only moves is in `point`.
  draw({ layer, measure, row, t, hidden, dark, values }) {
    this.shown = layer;
    this.lines = linesBeside(layer);
    this.tokens = Math.max(1, ...this.lines.map((index) => lightArrays(index).tokens));
    const lines = this.lines.length;
    const each = Math.max(3, Math.min(12, Math.floor(96 / lines)));
    this.canvas.style.height = `${each * lines}px`;
    const width = Math.max(1, Math.min(2048, this.canvas.clientWidth));
    this.canvas.width = width;
    this.canvas.height = lines;
    const pen = this.canvas.getContext("2d");
    const image = pen.createImageData(width, lines);
    const rows = this.lines.map((index) => values(index, measure, row, t, hidden));
    Object.assign(this, { rows, measure });
    let top = measure === "use" ? 0 : 1;
    if (!top) top = Math.max(...rows.map(largestOf));
    rows.forEach((line, index) => {
      const { high, low } = envelope(line, 0, line.length - 1, Math.max(1, Math.round((width * line.length) / this.countOf(this.lines[index]))));
      high.forEach((value, column) => {
        if (!Number.isFinite(value) || column >= width) return;
        const size = Math.max(Math.abs(value), Math.abs(low[column])) / (top || 1);
        const colour = volumeColour(Math.min(1, size), dark);
        image.data.set([...colour.map(Math.round), 255], (index * width + column) * 4);
      });
    });
    pen.putImageData(image, 0, 0);
  }

  point(index, t, { from, to }) {
    const share = (at) => (at / this.countOf(index)) * 100;
    const lines = this.lines.length;
    Object.assign(this.brushed.style, { left: `${share(from)}%`, width: `${share(to + 1 - from)}%` });
    this.brushed.hidden = from === 0 && to >= recording.layers[index].chunks - 1;
    Object.assign(this.cursor.style, { left: `${share(t + 0.5)}%`, top: `${(this.lines.indexOf(index) / lines) * 100}%`, height: `${100 / lines}%` });
  }
}
