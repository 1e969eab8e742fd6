// A link that opens the same view again, and the volume as a picture.

const NUMBERS = ["layer", "beside", "row", "t", "from", "to", "slice", "cut", "cutAt", "threshold", "trail", "yaw", "pitch", "zoom"];

// What the address asks for; only what makes sense here is taken.
function askedView() {
  const given = new URLSearchParams(location.hash.slice(1));
  const asked = {};
  for (const name of NUMBERS) {
    const value = given.has(name) ? Number(given.get(name)) : NaN;
    if (Number.isFinite(value)) asked[name] = value;
  }
  if (["light", "dark"].includes(given.get("theme"))) asked.theme = given.get("theme");
  if (given.has("measure")) asked.measure = given.get("measure");
  asked.hidden = (given.get("hidden") ?? "").split(",").filter((head) => /^\d+$/.test(head)).map(Number);
  if (!recording.layers[asked.beside]) delete asked.beside;
  return asked;
}

function openView(asked, scene, restart) {
  const whole = (value, count) => Math.max(0, Math.min(count - 1, Math.round(value)));
  if ("layer" in asked) state.layer = whole(asked.layer, recording.layers.length);
  else if ("t" in asked) state.layer = 0;
  if ("row" in asked) state.row = whole(asked.row, recording.rows);
  const { chunks } = recording.layers[state.layer];
  if ("t" in asked) state.t = whole(asked.t, chunks);
  if ("threshold" in asked) [state.threshold, thresholdChosen] = [whole(asked.threshold, 256), true];
  if ("trail" in asked) [state.trail, trailChosen] = [whole(asked.trail, chunks), true];
  state.measure = asked.measure ?? null;
  state.hidden = new Set(asked.hidden);
  if (CUTS[asked.cut]) [state.cut, state.cutAt] = [asked.cut, Math.round(asked.cutAt ?? 0)];
  restart();
  if ("from" in asked && "to" in asked && asked.from < asked.to) {
    state.window = { from: whole(asked.from, chunks), to: whole(asked.to, chunks) };
  }
  if ("slice" in asked && asked.slice < layerAt(state.layer).slices.length) {
    state.slice = Math.max(-1, Math.round(asked.slice));
    find("slice").value = state.slice;
  }
  if ("yaw" in asked) scene.yaw = asked.yaw;
  if ("pitch" in asked) scene.turn(0, asked.pitch - scene.pitch);
  if ("zoom" in asked) scene.magnify(asked.zoom / scene.zoom);
}

function viewAddress(scene) {
  const { layer, beside, row, t, slice, cut, cutAt, threshold, trail, measure, theme, window: { from, to } } = state;
  const values = { layer, beside, row, t, from, to, slice, cut, cutAt, threshold, trail, measure, yaw: scene.yaw.toFixed(3), pitch: scene.pitch.toFixed(3), zoom: scene.zoom.toFixed(3) };
  if (theme) values.theme = theme;
  if (state.hidden.size) values.hidden = [...state.hidden].join(",");
  return `#${new URLSearchParams(values)}`;
}

const tell = (text) => (find("copied").textContent = text);

async function copyLink(scene) {
  if (location.protocol === "about:") return tell("a page inside a notebook has no address");
  history.replaceState(null, "", viewAddress(scene));
  const copied = await put(() => navigator.clipboard.writeText(location.href));
  tell(copied ? "link copied" : "the link is in the address bar");
}

// Onto the clipboard where the browser allows it, else as a file.
async function copyPicture(volumes) {
  const copy = document.createElement("canvas");
  copy.width = volumes.reduce((total, { width }) => total + width, 0);
  copy.height = volumes[0].height;
  const pen = copy.getContext("2d");
  pen.fillStyle = getComputedStyle(document.documentElement).backgroundColor;
  pen.fillRect(0, 0, copy.width, copy.height);
  volumes.forEach((volume, index) => pen.drawImage(volume, index * volumes[0].width, 0));
  const blob = await new Promise((done) => copy.toBlob(done));
  if (await put(() => navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]))) return tell("picture copied");
  const link = document.createElement("a");
  link.href = copy.toDataURL();
  link.download = "memory.png";
  link.click();
  tell("picture saved");
}

// Whether the clipboard took it: a browser may have none, refuse, or never answer.
async function put(act) {
  try {
    const late = new Promise((done) => setTimeout(() => done("late"), 1000));
    return (await Promise.race([act(), late])) !== "late";
  } catch {
    return false;
  }
}
