// Curves over time in SVG, with a cursor at the chunk shown; a press anywhere goes there.

function svg(kind, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

class Chart {
  // series: [{ name, colour (a CSS variable), dash }]; unit turns a value into a label.
  constructor(root, series, unit, seek) {
    Object.assign(this, { root, series, unit, step: "chunk" });
    const press = (event) => {
      if (!this.values?.length || (event.type === "pointermove" && event.buttons !== 1)) return;
      const at = (event.clientX - root.getBoundingClientRect().left - this.left) / (this.right - this.left);
      const { from, to } = this.window;
      seek(Math.round(from + Math.max(0, Math.min(1, at)) * (to - from)));
    };
    root.addEventListener("pointerdown", press);
    root.addEventListener("pointermove", press);
  }

  x(t) {
    const { from, to } = this.window;
    return to > from ? this.left + ((t - from) / (to - from)) * (this.right - this.left) : (this.left + this.right) / 2;
  }

  y(value) {
    return this.bottom - (value / this.top) * (this.bottom - 6);
  }

  // values: one array per series, NaN where nothing was recorded; window: the steps shown; top: the
  // largest value, or null.
  show(values, window, top) {
    const style = getComputedStyle(document.documentElement);
    Object.assign(this, { values, window });
    let [largest, any] = [0, false];
    for (const series of values) for (const value of series) {
      if (!Number.isFinite(value)) continue;
      any = true;
      if (value > largest) largest = value;
    }
    this.top = top ?? niceTop(largest);
    this.left = parseFloat(style.getPropertyValue("--gutter"));
    this.right = Math.max(this.left + 10, this.root.clientWidth - parseFloat(style.getPropertyValue("--keys")));
    this.bottom = this.root.clientHeight - 6;
    this.root.replaceChildren();
    for (const value of [0, this.top]) {
      const y = this.y(value);
      this.root.append(svg("line", { class: "grid", x1: this.left, x2: this.right, y1: y, y2: y }));
      this.root.append(svg("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, this.unit(value)));
    }
    this.series.forEach(({ colour, dash }, index) => {
      const d = this.path(values[index]);
      this.root.append(svg("path", { class: "curve", d, style: `stroke: var(${colour})`, "stroke-dasharray": dash }));
    });
    if (!any) {
      const middle = (this.left + this.right) / 2;
      this.root.append(svg("text", { x: middle, y: this.bottom / 2 + 6, "text-anchor": "middle" }, "nothing recorded"));
    }
    this.line = svg("line", { class: "cursor", y1: 2, y2: this.bottom });
    this.dots = this.series.map(({ colour }) => svg("circle", { class: "dot", r: 4, style: `fill: var(${colour})` }));
    this.keys = this.series.map(({ colour }) => svg("text", { class: "key", x: this.right + 12, style: `fill: var(${colour})` }));
    this.root.append(this.line, ...this.dots, ...this.keys);
  }

  // A line through all steps shown; where a pixel has several, from their largest to their smallest.
  path(values) {
    const { from, to } = this.window;
    const columns = Math.round(this.right - this.left);
    let [open, d] = [false, ""];
    const point = (x, value) => {
      d += `${open ? "L" : "M"}${x.toFixed(1)} ${this.y(value).toFixed(1)}`;
      open = true;
    };
    if (to - from < 2 * columns) {
      for (let t = from; t <= to; t++) {
        if (Number.isFinite(values[t])) point(this.x(t), values[t]);
        else open = false;
      }
      return d;
    }
    const { high, low } = envelope(values, from, to, columns);
    high.forEach((value, column) => {
      if (!Number.isFinite(value)) return void (open = false);
      point(this.left + column + 0.5, value);
      if (low[column] < value) point(this.left + column + 0.5, low[column]);
    });
    return d;
  }

  // Moves the cursor, and the names of the curves beside their values, pushed apart where they meet.
  point(t, narrow) {
    const x = this.x(t);
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    const now = this.values.map((values) => values[t]);
    this.dots.forEach((dot, index) => {
      dot.setAttribute("display", Number.isFinite(now[index]) ? "inline" : "none");
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", Number.isFinite(now[index]) ? this.y(now[index]) : 0);
    });
    const height = 15;
    const places = now.map((value, index) => ({ index, y: Number.isFinite(value) ? this.y(value) + 4 : this.bottom }));
    places.sort((a, b) => a.y - b.y || a.index - b.index);
    places.forEach((place, i) => {
      place.y = Math.max(place.y, i ? places[i - 1].y + height : 8);
    });
    for (let i = places.length - 1, limit = this.bottom + 6; i >= 0; i--, limit -= height) {
      places[i].y = Math.min(places[i].y, limit);
    }
    for (const { index, y } of places) {
      this.keys[index].setAttribute("y", y);
      const { name, short } = this.series[index];
      this.keys[index].textContent = `${narrow ? short : name} ${this.unit(now[index])}`;
    }
    const values = now.map((value, index) => `${this.series[index].name} ${this.unit(value)}`);
    this.root.setAttribute("aria-label", `At this ${this.step}: ${values.join(", ")}`);
  }
}

// The next of 1, 2, 3, 5 × a power of ten: a scale whose ends can be read.
function niceTop(largest) {
  if (!(largest > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  return power * [1, 2, 3, 5, 10].find((step) => step * power >= largest * 0.999);
}
