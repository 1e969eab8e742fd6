// What the page carries, decoded: base64 to typed arrays, text and frames by position.

const recording = JSON.parse(document.getElementById("recording").textContent);

function bytes(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

const floats = (text) => new Float32Array(bytes(text).buffer);
const integers = (text) => new Int32Array(bytes(text).buffer);

function decodeSources({ top, ...arrays }) {
  const whole = ["position", "half", "taker"];
  const found = Object.entries(arrays).map(([name, text]) => [name, whole.includes(name) ? integers(text) : floats(text)]);
  return { top, ...Object.fromEntries(found) };
}

// One layer with its arrays decoded, and its grid as three axes (z, y, x) whatever it was: missing
// axes have one point at 0, and the first of four is kept apart, to be sliced.
function decodeLayer(packed) {
  const fourth = packed.shown.length === 4;
  const inner = fourth ? packed.points.slice(1) : packed.points;
  const points = [...Array(3 - inner.length).fill([0]), ...inner];
  return {
    ...packed,
    axes: packed.grid.length,
    points,
    sizes: points.map((axis) => axis.length),
    voxels: points.reduce((product, axis) => product * axis.length, 1),
    slices: fourth ? packed.points[0] : [0],
    levels: bytes(packed.levels),
    peaks: bytes(packed.peaks),
    readAt: floats(packed.readAt),
    writeAt: floats(packed.writeAt),
    spread: packed.spread === null ? null : floats(packed.spread),
    content: floats(packed.content),
    gates: floats(packed.gates),
    gateCount: packed.gateNames.length,
    use: floats(packed.use),
    readout: floats(packed.readout),
    span: integers(packed.span),
    flags: bytes(packed.flags),
    chunk: integers(packed.chunk),
    sources: packed.sources && decodeSources(packed.sources),
    headCount: recording.layers.filter(({ group }) => group === packed.group).length,
  };
}

// A newer state of the same recording takes its place.
function replaceRecording(values) {
  Object.assign(recording, values);
  for (const cache of [decoded, measured, light]) cache.clear();
}

const decoded = new Map();
function layerAt(index) {
  if (!decoded.has(index)) decoded.set(index, decodeLayer(recording.layers[index]));
  return decoded.get(index);
}

// ‖h‖ of the voxels drawn, one byte each: of one slice of a first axis of four, or, with a slice
// of -1, the largest over it.
function levelsAt(layer, t, row, slice) {
  const { voxels, slices } = layer;
  const start = (t * recording.rows + row) * voxels * slices.length;
  if (slices.length === 1 || slice >= 0) {
    const from = start + Math.max(slice, 0) * voxels;
    return layer.levels.subarray(from, from + voxels);
  }
  const out = new Uint8Array(voxels);
  for (let s = 0; s < slices.length; s++) {
    for (let v = 0; v < voxels; v++) {
      const level = layer.levels[start + s * voxels + v];
      if (level > out[v]) out[v] = level;
    }
  }
  return out;
}

// The picture under the grids of a row, once it is decoded; null where there is none.
const pictures = (recording.images ?? []).map((data) => {
  const picture = new Image();
  picture.src = `data:image/png;base64,${data}`;
  return picture;
});
const pictureOf = (row) => pictures[Math.min(row, pictures.length - 1)];

// What is cut away of a volume: nothing, what lies beyond a plane, all but a slice, or all but the
// largest along an axis, which is drawn on the first plane.
const CUTS = ["whole", ...["up to", "slice", "largest along"].flatMap((kind) => ["x", "y", "z"].map((axis) => `${kind} ${axis}`))];
const cutAxis = (cut) => 2 - ((cut - 1) % 3); // of (z, y, x)
const cutMoves = (cut) => cut > 0 && cut < 7; // whether it has a place

function cutLevels(layer, levels, cut, at) {
  if (!cut || layer.axes < 3) return levels;
  const axis = cutAxis(cut);
  const stride = layer.sizes.slice(axis + 1).reduce((product, size) => product * size, 1);
  const out = new Uint8Array(levels.length);
  levels.forEach((level, v) => {
    const index = Math.floor(v / stride) % layer.sizes[axis];
    const kept = cut < 4 ? index <= at : index === at;
    if (cut < 7) out[v] = kept ? level : 0;
    else out[v - index * stride] = Math.max(out[v - index * stride], level);
  });
  return out;
}

// Point number `index` of a chunk in an array of (T, B, count, axes); null where none was recorded.
function pointAt(layer, array, count, t, row, index) {
  const at = ((t * recording.rows + row) * count + index) * layer.axes;
  const point = array.subarray(at, at + layer.axes);
  return point.every(Number.isFinite) ? point : null;
}

const isPresent = (layer, t, row) => (layer.flags[t * recording.rows + row] & 1) !== 0;
// A token of a place memory whose rate is 0 has written nothing.
const hasWritten = (layer, t, row) => layer.unit !== "token" || layer.gates[(t * recording.rows + row) * layer.gateCount] >= 0.005;
const isWritten = (layer, t, row) => (layer.flags[t * recording.rows + row] & 2) !== 0;

function tokenTexts(row, start, stop) {
  const found = [];
  for (const [from, texts] of recording.texts?.[row] ?? []) {
    for (let at = Math.max(from, start); at < Math.min(from + texts.length, stop); at++) {
      found.push([at, texts[at - from]]);
    }
  }
  return found;
}

// Three significant digits, without an exponent where it can be read without.
function number(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001 || size >= 100000) return value.toExponential(1).replace("-", "−");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return value.toFixed(digits).replace("-", "−");
}
