// Controls: what is chosen, what it changes, and when to draw.

const state = {
  layer: 0, row: 0, slice: -1, cut: 0, cutAt: 0, t: 0, threshold: 0, trail: 16, writes: true, reads: true, image: true,
  beside: -1, window: { from: 0, to: 0 }, measure: null, hidden: new Set(), theme: null,
};
const GATE_STYLES = [
  { colour: "--input", dash: "none" },
  { colour: "--forget", dash: "6 4" },
  { colour: "--output", dash: "1.5 4" },
];
let thresholdChosen = false;
let trailChosen = false;
let playing = null;
let scheduled = false;

function start() {
  document.documentElement.dataset.ready = "true";
  const asked = askedView();
  state.theme = asked.theme ?? null;
  useTheme();
  const longest = Math.max(0, ...recording.layers.map((layer) => layer.chunks));
  if (longest === 0 || recording.rows === 0) return showEmpty();
  find("follow-choice").hidden = recording.live === null;

  const scene = new Scene(find("volume"));
  const other = new Scene(find("volume-beside"));
  const seek = (t) => go(t);
  const strip = new Strip(find("strip"), find("arcs"), seek, zoomTime);
  const overview = new Overview(find("overview"), {
    brush: (a, b) => setWindow(Math.min(a, b), Math.max(a, b)),
    seek: (line, t) => {
      if (line !== state.layer) chooseOther(line);
      go(t);
    },
  });
  const gates = new Chart(find("gate-chart"), [], number2, seek);
  const use = new Chart(find("use-chart"), [{ name: "use", short: "use", colour: "--use", dash: "none" }], percent, seek);

  const layer = () => layerAt(state.layer);
  const narrow = () => matchMedia("(max-width: 760px)").matches;

  function fillChoices() {
    find("layer").replaceChildren(...recording.layers.map((each, index) => new Option(each.name || `layer ${index}`, index)));
    find("row").replaceChildren(...Array.from({ length: recording.rows }, (_, row) => new Option(row, row)));
    find("beside").replaceChildren(new Option("nothing", -1), ...recording.layers.map((each, index) => new Option(each.name || `layer ${index}`, index)));
    find("beside-choice").hidden = recording.layers.length < 2;
    find("cut").replaceChildren(...CUTS.map((name, index) => new Option(name, index)));
    for (const picture of pictures) picture.decode().then(redraw);
    find("layer").disabled = recording.layers.length < 2;
    find("row").disabled = recording.rows < 2;
  }

  function tellNotices() {
    find("notice").hidden = recording.notices.length === 0;
    find("notice").textContent = recording.notices.join(" ");
  }

  function chooseLayer() {
    const chosen = layer();
    state.t = Math.min(state.t, Math.max(0, chosen.chunks - 1));
    find("slice-choice").hidden = chosen.axes < 4;
    find("slice").replaceChildren(new Option("largest", -1), ...chosen.slices.map((at, index) => new Option(`w = ${number(at)}`, index)));
    state.slice = -1;
    find("cut-choice").hidden = chosen.axes < 3;
    find("image-choice").hidden = !chosen.overImage;
    const narrowest = chosen.unit === "token" ? "Write, nearest voxels" : "Write, nearest voxel";
    find("write-caption").textContent = chosen.spread === null ? narrowest : "Write, radius σ";
    find("norm-name").textContent = chosen.normName;
    find("gate-caption").textContent = chosen.unit === "token" ? "Rate and keep" : "Gates, mean over voxels";
    gates.step = use.step = chosen.unit;
    gates.series = chosen.gateNames.map((name, index) => ({ name, short: name[0], ...GATE_STYLES[index] }));
    find("time").max = Math.max(0, chosen.chunks - 1);
    find("time").disabled = find("play").disabled = chosen.chunks < 2;
    find("trail").max = Math.max(0, chosen.chunks - 1);
    find("trail").disabled = chosen.chunks < 2;
    // Rings already mark the writes that count: a path through earlier reads would cross them.
    if (!trailChosen) state.trail = chosen.sources ? 0 : chosen.tokenReads ? 2 : 16;
    find("trail").value = state.trail;
    find("scale-top").textContent = number(chosen.top);
    find("scale-middle").textContent = number(chosen.top / 2);
    // Where it opens, a tenth of the voxels is shown, or the largest.
    if (!thresholdChosen) state.threshold = Math.min(usualThreshold(chosen), quantile(levelsAt(chosen, state.t, state.row, -1), 0.9) || chosen.peaks[state.t * recording.rows + state.row] || 255);
    if (scene.axes !== chosen.axes) scene.resetView(chosen.axes);
    find("threshold").value = state.threshold;
    if (state.window.to >= chosen.chunks || state.chunks !== chosen.chunks) state.window = { from: 0, to: Math.max(0, chosen.chunks - 1) };
    state.chunks = chosen.chunks;
    // Before anything is drawn: they leave less room for the volume.
    find("arcs").toggleAttribute("hidden", !chosen.sources);
    const names = measureNames(chosen);
    find("measure").replaceChildren(...names.map((name) => new Option(name === "share" ? "share of this read" : name, name)));
    if (!names.includes(state.measure)) state.measure = names[0];
    find("measure").value = state.measure;
    const own = chosen.unit === "token" && chosen.headCount > 1; // a grid of one head, in its colour
    find("legend").style.setProperty("--write", own ? headColour(chosen.head) : "");
    find("points").style.setProperty("--write", own ? headColour(chosen.head) : "");
    fillHeads(state.layer, state.hidden, () => (drawOverview(), redraw()));
    setCut(state.cut, state.cutAt);
  }

  function setCut(cut, at) {
    const chosen = layer();
    const last = chosen.sizes[cutAxis(cut || 1)] - 1;
    state.cut = cut;
    state.cutAt = Math.max(0, Math.min(last, at));
    find("cut").value = cut;
    find("cut-at").max = last;
    find("cut-at").value = state.cutAt;
    find("cut-place").hidden = chosen.axes < 3 || !cutMoves(cut);
    const name = CUTS[cut].split(" ").at(-1);
    find("cut-value").textContent = `${name} = ${number(chosen.points[cutAxis(cut || 1)][state.cutAt])}`;
    redraw();
  }

  function chooseOther(index) {
    play(false);
    state.layer = index;
    find("layer").value = index;
    restart();
  }

  function drawOverview() {
    // The shares in one read are few points: the overview shows use instead.
    const measure = state.measure === "share" ? "use" : state.measure;
    overview.draw({ layer: state.layer, measure, row: state.row, t: state.t, hidden: state.hidden, dark: isDark(), values: measureValues });
    find("strip-hover").dataset.hint = `above: ${measure} in each layer, drag to zoom · below: every ${layer().unit}, press one`;
  }

  function setWindow(from, to) {
    const last = Math.max(0, layer().chunks - 1);
    const least = Math.min(last, 4);
    from = Math.max(0, Math.min(from, last - least));
    to = Math.max(from + least, Math.min(to, last));
    state.window = { from, to };
    if (state.t < from || state.t > to) state.t = Math.max(from, Math.min(to, state.t));
    drawCharts();
    redraw();
  }

  // Less or more time around a step, which stays where it is.
  function zoomTime(factor, around = state.t) {
    const { from, to } = state.window;
    const last = Math.max(0, layer().chunks - 1);
    const length = Math.max(Math.min(4, last), Math.min(last, (to - from) * factor));
    const share = to > from ? (around - from) / (to - from) : 0.5;
    const start = Math.max(0, Math.min(last - length, around - share * length));
    setWindow(Math.round(start), Math.round(start + length));
  }

  function summarise() {
    const { chunks, grid, channels, slices } = layer();
    const slice = state.slice < 0 ? "its largest value" : `its slice at ${number(slices[state.slice])}`;
    find("summary").textContent = [
      count(recording.layerCount, "layer"), count(recording.rows, "row"), count(chunks, layer().unit),
      `grid ${grid.join(" × ")}`, count(channels, "channel"),
      ...(grid.length === 4 ? [`the first axis, w, is drawn as ${slice}`] : []),
    ].join(" · ");
  }

  function drawCharts() {
    const chosen = layer();
    const over = (read) => Array.from({ length: chosen.chunks }, (_, t) => read(t * recording.rows + state.row));
    gates.show(chosen.gateNames.map((_, gate) => over((at) => chosen.gates[at * chosen.gateCount + gate])), state.window, 1);
    use.show([over((at) => chosen.use[at])], state.window, null);
  }

  function drawColours() {
    const canvas = find("colours");
    const pen = canvas.getContext("2d");
    for (let level = 0; level < 256; level++) {
      pen.clearRect(level, 0, 1, 1);
      pen.fillStyle = level < state.threshold ? scene.colour.line : scene.colourOf(level, state.threshold)[2];
      pen.fillRect(level, 0, 1, 1);
    }
  }

  function draw() {
    scheduled = false;
    const chosen = layer();
    if (chosen.chunks === 0) return;
    summarise();
    const sources = chosen.sources ? sourcesOf(state.layer, state.row, state.t, state.hidden) : null;
    const shown = scene.draw({ ...state, layer: chosen, picture: pictureUnder(chosen), sources: state.writes ? sources : null });
    tellNothing(chosen, shown);
    drawBeside();
    const wide = state.writes ? scene.wideWrites(chosen, state.t, state.row) : "";
    find("wide").hidden = !wide;
    find("wide").textContent = wide;
    find("shown").textContent = `${shown} of ${chosen.voxels} shown`;
    find("threshold-value").textContent = number((state.threshold / 255) * chosen.top);
    find("threshold").setAttribute("aria-valuetext", find("threshold-value").textContent);
    find("trail-value").textContent = count(Math.min(state.trail, Number(find("trail").max)), chosen.unit);
    find("time").value = state.t;
    find("time").setAttribute("aria-valuetext", `${chosen.unit} ${chosen.chunk[state.t]}`);
    find("position").textContent = `${chosen.chunk[state.t]} / ${chosen.chunk[chosen.chunks - 1]}`;
    find("volume").setAttribute("aria-label", `The memory after ${chosen.unit} ${chosen.chunk[state.t]}: ${shown} of ${chosen.voxels} voxels above the threshold`);
    drawColours();
    showPanel(chosen, state.layer, state.t, state.row);
    gates.point(state.t, narrow());
    use.point(state.t, narrow());
    drawStrip(chosen, sources);
    overview.point(state.layer, state.t, state.window);
  }

  function pictureUnder(chosen) {
    const picture = chosen.overImage && state.image ? pictureOf(state.row) : null;
    return picture?.complete ? picture : null;
  }

  // Why a stage is empty, where it is.
  function tellNothing(chosen, shown) {
    const peak = chosen.peaks[state.t * recording.rows + state.row];
    find("nothing").hidden = shown > 0;
    if (!isPresent(chosen, state.t, state.row)) find("nothing").textContent = `this row has no such ${chosen.unit}`;
    else if (peak === 0) find("nothing").textContent = "the memory is empty here";
    else if (peak < state.threshold) find("nothing").textContent = `all voxels are below the threshold; the largest is ${number((peak / 255) * chosen.top)}`;
    else find("nothing").textContent = "nothing is left on this side of the cut";
  }

  // A second layer, of this recording or of the one beside it, at the same token and from the same side.
  function drawBeside() {
    if (state.beside < 0) return;
    const second = layerAt(state.beside);
    const t = stepOfToken(second, state.row, layer().span[(state.t * recording.rows + state.row) * 2]);
    if (other.axes !== second.axes) other.resetView(second.axes);
    if (second.axes === scene.axes) Object.assign(other, { yaw: scene.yaw, pitch: scene.pitch, zoom: scene.zoom });
    find("volume-name").textContent = stepName(layer(), state.t);
    find("beside-name").textContent = stepName(second, t);
    // On the scale of the first, so that one legend serves both.
    const gain = layer().top > 0 ? second.top / layer().top : 1;
    const sources = state.writes && second.sources ? sourcesOf(state.beside, state.row, t, state.hidden) : null;
    other.draw({ ...state, layer: second, t, gain, sources, slice: -1, picture: pictureUnder(second), cut: second.sizes.join() === layer().sizes.join() ? state.cut : 0 });
  }

  function setBeside(index) {
    state.beside = index;
    find("beside").value = index;
    for (const id of ["volume-beside", "beside-name", "volume-name"]) find(id).hidden = index < 0;
    find("stage").classList.toggle("two", index >= 0);
    redraw();
  }

  function drawStrip(chosen, sources) {
    const { row, t, measure, hidden } = state;
    const life = isPresent(chosen, t, row) && hasWritten(chosen, t, row) ? lifeOf(chosen, row, t) : null;
    const values = measureValues(state.layer, measure, row, t, hidden);
    strip.draw({ layer: chosen, row, t, window: state.window, values, measure, sources, life, dark: isDark() });
    showSources(chosen, row, t, sources, life, go);
  }

  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(draw);
  }

  // A step that somebody chose is not left for a newer one, unless it is the newest.
  function go(t, chosen = true) {
    if (chosen) find("follow").checked = t >= layer().chunks - 1;
    state.t = Math.max(0, Math.min(layer().chunks - 1, t));
    const { from, to } = state.window;
    if (state.t < from || state.t > to) {
      const start = Math.max(0, Math.min(layer().chunks - 1 - (to - from), state.t - Math.round((to - from) / 2)));
      setWindow(start, start + to - from);
    }
    redraw();
  }

  // A number is a position; anything else is looked for in the texts, from the next step on.
  function goTo(text) {
    const chosen = layer();
    if (/^\s*\d+\s*$/.test(text)) return go(stepOf(chosen.chunk, Number(text))), true;
    const wanted = text.trim().toLowerCase();
    for (let step = 1; wanted && step <= chosen.chunks; step++) {
      const t = (state.t + step) % chosen.chunks;
      if (stepText(chosen, t, state.row).toLowerCase().includes(wanted)) return go(t), true;
    }
    return false;
  }

  function restyle() {
    useTheme();
    scene.restyle();
    other.restyle();
    drawOverview();
    redraw();
  }

  function play(on) {
    if (on === (playing !== null) || (on && layer().chunks < 2)) return;
    if (!on) {
      cancelAnimationFrame(playing);
      playing = null;
    } else {
      if (state.t === layer().chunks - 1) go(0);
      let last = performance.now();
      const tick = (now) => {
        const steps = Math.floor(((now - last) / 1000) * Number(find("speed").value));
        if (steps > 0) {
          last = now;
          go(state.t + steps);
          if (state.t === layer().chunks - 1) return play(false);
        }
        playing = requestAnimationFrame(tick);
      };
      playing = requestAnimationFrame(tick);
    }
    const name = playing === null ? "Play" : "Pause";
    find("play").setAttribute("aria-label", name);
    find("play").setAttribute("aria-pressed", String(playing !== null));
    find("play").title = `${name} (space)`;
    find("play-shape").setAttribute("d", playing === null ? "M4 2.5v11l9.5-5.5z" : "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z");
  }

  function restart() {
    chooseLayer();
    drawCharts();
    drawOverview();
    redraw();
  }

  // A newer state of the recording: the same view, at the same step or the newest.
  function update(values) {
    const { chunk, chunks } = layer();
    const [number, whole] = [chunk[state.t], state.window.from === 0 && state.window.to >= chunks - 1];
    const same = values.rows === recording.rows && values.layers.length === recording.layers.length;
    replaceRecording(values);
    if (!same) fillChoices(); // not each time: one of them may be open
    [find("layer").value, find("row").value, find("beside").value] = [state.layer, state.row, state.beside];
    tellNotices();
    state.t = stepOf(layer().chunk, number);
    if (whole) state.window = { from: 0, to: layer().chunks - 1 };
    restart();
    if (find("follow").checked) go(layer().chunks - 1, false);
  }

  fillChoices();
  tellNotices();
  find("follow").checked = !("t" in asked);
  Object.assign(state, recording.live === null ? busiest() : { t: Infinity });
  openView(asked, scene, restart);
  find("layer").value = state.layer;
  find("row").value = state.row;
  const same = recording.beside === null ? -1 : Math.min(recording.beside + state.layer, recording.layers.length - 1);
  setBeside(asked.beside ?? same);
  drawCharts();
  listenToControls({ scene, layer, play, go, goTo, redraw, restart, restyle, drawCharts, drawOverview, setWindow, zoomTime, chooseOther, setBeside, setCut });
  listenToVolume(find("volume"), scene, layer, redraw);
  if (recording.live !== null) followLive(update);
  new ResizeObserver(() => (drawCharts(), drawOverview(), redraw())).observe(find("stage"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
}

function useTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = state.theme ?? system;
}

// The layer and the step at which the memory is used most and its grid holds something, in the
// first row that has one; where its use is not known, the grid that holds most.
function busiest() {
  let found = { layer: 0, row: 0, t: 0, score: [0, 0] };
  for (let row = 0; row < recording.rows && !found.score[1]; row++) {
    recording.layers.slice(0, recording.beside ?? undefined).forEach(({ chunks }, index) => {
      const { use, flags, peaks } = lightArrays(index);
      for (let t = 0; t < chunks; t++) {
        const at = t * recording.rows + row;
        if (!(flags[at] & 1) || !peaks[at]) continue;
        const score = [use[at] || 0, peaks[at]];
        if (score[0] > found.score[0] || (score[0] === found.score[0] && score[1] > found.score[1])) found = { layer: index, row, t, score };
      }
    });
  }
  return { layer: found.layer, row: found.row, t: found.t };
}

function listenToControls({ scene, layer, play, go, goTo, redraw, restart, restyle, drawCharts, drawOverview, setWindow, zoomTime, chooseOther, setBeside, setCut }) {
  const on = (id, event, act) => find(id).addEventListener(event, act);
  on("layer", "change", () => chooseOther(Number(find("layer").value)));
  on("row", "change", () => ((state.row = Number(find("row").value)), drawCharts(), drawOverview(), redraw()));
  on("beside", "change", () => setBeside(Number(find("beside").value)));
  on("measure", "change", () => ((state.measure = find("measure").value), drawOverview(), redraw()));
  on("follow", "change", () => find("follow").checked && go(layer().chunks - 1, false));
  on("time-in", "click", () => zoomTime(0.5));
  on("time-out", "click", () => zoomTime(2));
  on("time-all", "click", () => setWindow(0, layer().chunks - 1));
  on("goto", "keydown", (event) => {
    if (event.key !== "Enter") return;
    find("copied").textContent = goTo(find("goto").value) ? "" : "not found";
  });
  const changeTheme = () => ((state.theme = isDark() ? "light" : "dark"), restyle());
  on("theme", "click", changeTheme);
  on("copy-link", "click", () => copyLink(scene));
  const copyVolumes = () => copyPicture([find("volume"), find("volume-beside")].filter(({ hidden }) => !hidden));
  on("copy-picture", "click", copyVolumes);
  const letters = {
    "[": () => zoomTime(2),
    "]": () => zoomTime(0.5),
    a: () => setWindow(0, layer().chunks - 1),
    c: copyVolumes,
    d: changeTheme,
    g: () => find("goto").focus(),
    l: () => copyLink(scene),
  };
  on("slice", "change", () => ((state.slice = Number(find("slice").value)), redraw()));
  on("cut", "change", () => setCut(Number(find("cut").value), layer().sizes[cutAxis(Number(find("cut").value) || 1)] >> 1));
  on("cut-at", "input", () => setCut(state.cut, Number(find("cut-at").value)));
  on("show-image", "change", () => ((state.image = find("show-image").checked), redraw()));
  on("time", "input", () => go(Number(find("time").value)));
  on("threshold", "input", () => ((thresholdChosen = true), (state.threshold = Number(find("threshold").value)), redraw()));
  on("trail", "input", () => ((trailChosen = true), (state.trail = Number(find("trail").value)), redraw()));
  on("show-writes", "change", () => ((state.writes = find("show-writes").checked), redraw()));
  on("show-reads", "change", () => ((state.reads = find("show-reads").checked), redraw()));
  on("play", "click", () => play(playing === null));
  on("zoom-in", "click", () => (scene.magnify(1.25), redraw()));
  on("zoom-out", "click", () => (scene.magnify(0.8), redraw()));
  on("view-reset", "click", () => (scene.resetView(layer().axes), redraw()));

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const owner = event.target.closest?.("select, input, button");
    // A control keeps its own keys; the time slider's are the page's.
    const own = owner && owner.id !== "time";
    if (owner?.type === "search") return;
    const arrow = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === " ") {
      if (owner && (owner.tagName === "BUTTON" || owner.tagName === "SELECT" || owner.type === "checkbox")) return;
      play(playing === null);
    } else if (own && (owner.tagName === "SELECT" || (owner.type === "range" && (arrow || event.key.length > 1)))) {
      return;
    } else if (arrow && event.shiftKey) {
      scene.turn(arrow[0] * 0.12, arrow[1] * 0.12);
      redraw();
    } else if (arrow) {
      go(state.t + (arrow[0] || -arrow[1]));
    } else if (event.key === "Home" || event.key === "End") {
      go(event.key === "Home" ? 0 : Infinity);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      scene.magnify(event.key === "-" ? 0.8 : 1.25);
      redraw();
    } else if (event.key === "0") {
      scene.resetView(layer().axes);
      redraw();
    } else if (letters[event.key]) {
      letters[event.key]();
    } else {
      return;
    }
    event.preventDefault();
  });
}

// Drag or one finger turns, wheel or two fingers zoom, resting on a voxel tells its value.
function listenToVolume(canvas, scene, layer, redraw) {
  const held = new Map();
  const apart = () => {
    const [a, b] = [...held.values()];
    return Math.hypot(a.x - b.x, a.y - b.y);
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, { x: event.clientX, y: event.clientY });
    canvas.classList.add("turning");
    find("hover").hidden = true;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return tellUnder(event, scene, layer());
    const [dx, dy] = [event.clientX - before.x, event.clientY - before.y];
    const gap = held.size === 2 ? apart() : 0;
    Object.assign(before, { x: event.clientX, y: event.clientY });
    if (gap > 0) scene.magnify(apart() / gap);
    else scene.turn(-dx * 0.008, dy * 0.008);
    redraw();
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, (event) => {
      held.delete(event.pointerId);
      if (held.size === 0) canvas.classList.remove("turning");
    });
  }
  canvas.addEventListener("pointerleave", () => (find("hover").hidden = true));
  canvas.addEventListener("dblclick", () => (scene.resetView(layer().axes), redraw()));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    scene.magnify(Math.exp(-event.deltaY * 0.0015));
    redraw();
  }, { passive: false });
}

// What lies under the pointer: a write by its name, and the voxel.
function tellUnder(event, scene, layer) {
  const [x, y] = [event.offsetX, event.offsetY];
  const told = [scene.writeAt(x, y)?.name()];
  const hit = scene.voxelAt(x, y);
  if (hit) told.push(`voxel [${hit.index.slice(3 - Math.min(layer.axes, 3)).join(", ")}] · ${layer.normName} ${number((hit.level / 255) * layer.top)}`);
  find("hover").textContent = told.filter(Boolean).join(" · ");
  find("hover").hidden = !find("hover").textContent;
}

function showEmpty() {
  find("instrument").hidden = true;
  document.querySelector(".choices").hidden = true;
  find("empty").hidden = false;
  const layers = recording.layers.length;
  find("summary").textContent = `${count(layers, "layer")} · no chunk`;
  if (recording.live !== null) {
    const file = JSON.stringify(find("title").textContent);
    find("empty-name").textContent = "Waiting for the first step";
    find("empty-reason").textContent = "The file is not there yet. This page opens it as soon as a model writes it:";
    find("empty-code").textContent = `with tensor_memory.record(model, live=${file}):\n    model(tokens)`;
    return void followLive(() => location.reload());
  }
  find("empty-reason").textContent = layers === 0
    ? "The recording holds no memory layer. Record a model that has one, and run it inside the block:"
    : "The recording's layers never saw a token. Run the model inside the block:";
}

const stepName = (layer, t) => `${layer.name}, ${layer.unit} ${layer.chunk[t]}`;
const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const number2 = (value) => (Number.isFinite(value) ? (value === 0 || value === 1 ? String(value) : value.toFixed(2)) : "–");

// In a volume the weaker voxels hide the stronger ones; on a plane nothing is hidden. Where a state
// grows over the stream, half of the moments still show their strongest twentieth.
function usualThreshold(layer) {
  if (layer.axes < 3) return 0;
  const size = layer.voxels * layer.slices.length;
  const moments = [];
  layer.flags.forEach((flags, at) => {
    if (flags & 1) moments.push(quantile(layer.levels.subarray(at * size, (at + 1) * size), 0.95));
  });
  moments.sort((a, b) => a - b);
  return Math.min(quantile(layer.levels, 0.7), moments[(moments.length - 1) >> 1] ?? 0);
}

function quantile(levels, share) {
  const counts = new Uint32Array(256);
  for (const level of levels) counts[level]++;
  let below = 0;
  for (let level = 0; level < 256; level++) {
    below += counts[level];
    if (below >= share * levels.length) return level;
  }
  return 0;
}

start();
