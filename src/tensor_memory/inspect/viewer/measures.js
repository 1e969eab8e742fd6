// What a strip or the overview can be coloured by: one value per step of a layer and row.

// Colours of heads, the same as in the figures.
const headColour = (head) => `var(--head-${head % 6})`;
// Of a gated memory all heads write at once: what a chunk gave is told for them together.
const sourceColour = (layer, head) => (layer.unit === "token" && layer.headCount > 1 ? headColour(head) : "var(--write)");

// The heads of a layer: those of a place memory are views of their own, those of a gated memory
// write into one grid.
function headNumbers(index) {
  const { unit, writes, heads } = recording.layers[index];
  return unit === "token" ? headsOf(index).map(({ head }) => head) : [...Array(Math.max(writes, heads)).keys()];
}

// Views of the same layer as this one: the heads of a place memory.
const headsOf = (index) => recording.layers
  .map((layer, at) => ({ at, head: layer.head, group: layer.group }))
  .filter(({ group }) => group === recording.layers[index].group);

// A view of each layer: the one that is shown, and of the others the same head.
function linesBeside(index) {
  const { head } = recording.layers[index];
  const groups = recording.layers.map((_, at) => headsOf(at)).filter((views, at) => views[0].at === at);
  return groups.map((views) => (views.find(({ at }) => at === index) ?? views.find((view) => view.head === head) ?? views[0]).at);
}

const measureNames = (layer) => [...(layer.sources ? ["share"] : []), "use", ...layer.gateNames];

// (T) values of one row; "share" is what each step gave to the read at step t, over the heads shown.
function measureValues(index, measure, row, t, hidden) {
  if (measure === "share") return shareValues(index, row, t, hidden);
  const key = `${index} ${measure} ${row}`;
  if (!measured.has(key)) measured.set(key, rowValues(index, measure, row));
  return measured.get(key);
}

const measured = new Map();

function rowValues(index, measure, row) {
  const packed = recording.layers[index];
  const arrays = lightArrays(index);
  const gate = packed.gateNames.indexOf(measure);
  if (measure !== "use" && gate < 0) return new Float32Array(packed.chunks).fill(NaN);
  const out = new Float32Array(packed.chunks);
  for (let at = 0; at < out.length; at++) {
    const value = at * recording.rows + row;
    out[at] = gate < 0 ? arrays.use[value] : arrays.gates[value * packed.gateNames.length + gate];
  }
  return out;
}

const largest = new WeakMap();
function largestOf(values) {
  if (!largest.has(values)) largest.set(values, values.reduce((most, value) => (value > most ? value : most), 0));
  return largest.get(values);
}

// The arrays that the overview needs of every layer: small beside the grids.
const light = new Map();
function lightArrays(index) {
  if (!light.has(index)) {
    const { use, gates, chunk, flags, peaks, span } = recording.layers[index];
    const tokens = integers(span).reduce((most, token) => Math.max(most, token), 0);
    light.set(index, { use: floats(use), gates: floats(gates), chunk: integers(chunk), flags: bytes(flags), peaks: bytes(peaks), tokens });
  }
  return light.get(index);
}

function shareValues(index, row, t, hidden) {
  const chunk = lightArrays(index).chunk;
  const out = new Float32Array(chunk.length);
  const found = sourcesOf(index, row, t, hidden);
  for (const { position, part } of found?.writes ?? []) {
    const at = stepOf(chunk, position);
    if (chunk[at] === position) out[at] += part;
  }
  return out;
}

// The last step at or before a position, by halving.
function stepOf(chunk, position) {
  let [low, high] = [0, chunk.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (chunk[middle] <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The last step that begins at or before a token: chunks of one memory are not those of another.
function stepOfToken(layer, row, token) {
  let found = 0;
  for (let t = 0; t < layer.chunks; t++) {
    if (isPresent(layer, t, row) && layer.span[(t * recording.rows + row) * 2] <= token) found = t;
  }
  return found;
}

// Where a position lies between steps: a thinned page has not all of them.
function fractionOf(chunk, position) {
  const at = stepOf(chunk, position);
  const next = chunk[at + 1];
  return next === undefined ? at : at + Math.max(0, position - chunk[at]) / (next - chunk[at]);
}

// What the read of step t came from: of each head shown, weighted by its part of ‖r‖², so that
// writes, others, rest and what is not additive sum to 1. Null where it is not known.
function sourcesOf(index, row, t, hidden) {
  const own = recording.layers[index].unit === "token"; // a head has a grid and sources of its own
  const heads = headsOf(index).filter(({ head }) => !own || !hidden.has(head)).map(({ at, head }) => ({ head, layer: layerAt(at) }));
  const value = t * recording.rows + row;
  if (!heads.length || heads.some(({ layer }) => !layer.sources || !isPresent(layer, t, row))) return null;
  const sizes = heads.map(({ layer }) => layer.readout[value] ** 2);
  const total = sizes.reduce((a, b) => a + b, 0);
  const found = { writes: [], others: 0, rest: 0, joint: 0 };
  heads.forEach(({ head, layer: { sources } }, index) => {
    const weight = total > 0 ? sizes[index] / total : 0;
    for (let k = 0; k < sources.top; k++) {
      const at = value * sources.top + k;
      const position = sources.position[at];
      if (position < 0) continue;
      found.writes.push({ head, position, share: sources.share[at], part: weight * sources.part[at] });
    }
    found.others += weight * sources.others[value];
    found.rest += weight * sources.rest[value];
    found.joint += weight * sources.joint[value];
  });
  if (!(total > 0) || !Number.isFinite(found.others)) return null;
  found.writes.sort((a, b) => Math.abs(b.part) - Math.abs(a.part));
  return found;
}

// What became of the write of step t in one head.
function lifeOf(layer, row, t) {
  const value = t * recording.rows + row;
  const { sources } = layer;
  if (!sources || !Number.isFinite(sources.left[value])) return null;
  return { half: sources.half[value], left: sources.left[value], taker: sources.taker[value], taken: sources.taken[value] };
}

// A step's tokens in one line of text; empty where there are no texts.
function stepText(layer, t, row) {
  const at = (t * recording.rows + row) * 2;
  return tokenTexts(row, layer.span[at], layer.span[at + 1]).map(([, text]) => text).join("");
}

// The text of a token, or of a chunk where it is on the page, by its number.
function positionText(layer, row, position) {
  if (layer.unit === "token") return tokenTexts(row, position, position + 1).map(([, text]) => text).join("");
  const t = stepOf(layer.chunk, position);
  return layer.chunk[t] === position ? stepText(layer, t, row) : "";
}

// The largest and the smallest value of each of so many columns of steps from..to.
function envelope(values, from, to, columns) {
  const high = new Float32Array(columns).fill(-Infinity);
  const low = new Float32Array(columns).fill(Infinity);
  const steps = to - from + 1;
  for (let t = from; t <= to; t++) {
    const value = values[t];
    if (!Number.isFinite(value)) continue;
    const first = Math.floor(((t - from) * columns) / steps);
    const last = Math.max(first, Math.ceil(((t - from + 1) * columns) / steps) - 1);
    for (let column = first; column <= last; column++) {
      if (value > high[column]) high[column] = value;
      if (value < low[column]) low[column] = value;
    }
  }
  return { high, low };
}
