// The volume: voxels as cubes, writes as spheres, reads as a path, in perspective on a plain canvas.
//
// Boxes of a lattice overlap correctly when each axis is walked from far to near, so nothing is
// sorted.

const WIDE = 1; // half the grid: a write of a larger σ covers all of it, and a sphere would hide all

class Scene extends View {
  // Draws one moment and returns how many voxels are above the threshold.
  draw({ layer, t, row, slice, threshold, trail, writes, reads, cut, cutAt, hidden, picture, sources, gain = 1 }) {
    this.resize();
    const pen = this.pen;
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    this.upwards = layer.overImage ? -1 : 1;
    // Heads of a place memory have grids of their own; those of a gated memory share one.
    this.hidden = layer.unit === "token" ? new Set() : hidden;
    this.measure(layer);
    this.aim();
    this.marks = [];
    this.flat = cut > 6 && layer.axes > 2 ? { axis: 2 - cutAxis(cut), at: layer.points[cutAxis(cut)][0] } : null;
    if (picture) this.drawPicture(picture);
    this.drawBox(layer, "back");
    if (writes) this.shadeWrites(layer, t, row);
    this.pen.globalAlpha = picture ? 0.72 : 1;
    const levels = cutLevels(layer, levelsAt(layer, t, row, slice), cut, cutAt);
    const shown = this.drawVoxels(layer, gain === 1 ? levels : levels.map((level) => Math.min(255, level * gain)), threshold);
    this.pen.globalAlpha = 1;
    if (cutMoves(cut) && layer.axes > 2) this.drawPlane(layer, cutAxis(cut), cutAt);
    this.drawBox(layer, "front");
    const from = Math.max(0, t - trail);
    if (sources) this.drawSources(layer, row, sources);
    const ends = reads ? this.drawReads(layer, from, t, row) : [];
    if (writes) this.drawWrites(layer, from, t, row);
    for (const [x, y, colour] of ends) this.diamond(x, y, colour); // on a write at the same place
    this.drawLabels(layer);
    return shown;
  }

  // Half the side of a cell along x, y, z, and half the whole box.
  measure(layer) {
    const cell = [2, 1, 0].map((axis) => (layer.sizes[axis] > 1 ? layer.points[axis][1] - layer.points[axis][0] : 0));
    const thin = Math.min(...cell.filter((side) => side > 0));
    const across = layer.axes === 1 ? Math.max(thin, 0.16) : thin; // a line of many points can still be seen
    this.cell = cell.map((side) => (side || across) / 2);
    this.extent = cell.map((side, axis) => (side ? 1 : 0) + this.cell[axis]);
  }

  // A picture from -1 to 1 along both axes; without perspective that is a change of axes.
  drawPicture(picture) {
    const [[x0, y0], [x1, y1], [x2, y2]] = [[-1, -1], [1, -1], [-1, 1]].map(([x, y]) => this.project(x, y, 0));
    const [pen, { naturalWidth: w, naturalHeight: h }] = [this.pen, picture];
    pen.save();
    pen.transform((x1 - x0) / w, (y1 - y0) / w, (x2 - x0) / h, (y2 - y0) / h, x0, y0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(picture, 0, 0);
    pen.restore();
  }

  // The outline of the plane that cuts the volume, behind the last voxels that stay.
  drawPlane(layer, axis, at) {
    const world = 2 - axis;
    const [b, c] = [(world + 1) % 3, (world + 2) % 3];
    const corner = [0, 0, 0];
    corner[world] = layer.points[axis][at] + this.cell[world];
    this.stroke([[-1, -1], [1, -1], [1, 1], [-1, 1], [-1, -1]].map(([p, q]) => {
      corner[b] = p * this.extent[b];
      corner[c] = q * this.extent[c];
      return this.project(...corner);
    }), this.colour.ink, 1.4, 0.7);
  }

  writeColour(layer, head) {
    if (layer.writes > 1) return this.heads[head % 6];
    return layer.headCount > 1 ? this.heads[layer.head % 6] : this.colour.write;
  }

  readColour(layer, head) {
    return layer.heads > 1 ? this.heads[head % 6] : this.colour.read;
  }

  drawVoxels(layer, levels, threshold) {
    const [depth, height, width] = layer.sizes;
    const [xs, ys, zs] = [2, 1, 0].map((axis, world) => {
      const points = layer.points[axis];
      const order = points.map((_, index) => index);
      return order.sort((a, b) => Math.abs(points[b] - this.eye[world]) - Math.abs(points[a] - this.eye[world]));
    });
    this.hits = [];
    let shown = 0;
    for (const z of zs) for (const y of ys) for (const x of xs) {
      const level = levels[(z * height + y) * width + x];
      if (level === 0 || level < threshold) continue;
      shown++;
      const side = 0.2 + 0.58 * (level / 255);
      const colour = this.colourOf(level, threshold);
      this.drawCube([layer.points[2][x], layer.points[1][y], layer.points[0][z]], side, level, colour, [z, y, x]);
    }
    return shown;
  }

  // The colours span what is shown, from the threshold to the largest; the legend shows the same.
  colourOf(level, threshold) {
    return this.table[threshold < 255 ? Math.round(((level - threshold) / (255 - threshold)) * 255) : 255];
  }

  drawCube(centre, side, level, colour, index) {
    const half = this.cell.map((c) => c * side);
    const pen = this.pen;
    for (let axis = 0; axis < 3; axis++) {
      const away = this.eye[axis] - centre[axis];
      if (Math.abs(away) <= half[axis]) continue;
      const [b, c] = [(axis + 1) % 3, (axis + 2) % 3];
      const corner = [0, 0, 0];
      corner[axis] = centre[axis] + Math.sign(away) * half[axis];
      pen.beginPath();
      for (const [p, q] of [[-1, -1], [1, -1], [1, 1], [-1, 1]]) {
        corner[b] = centre[b] + p * half[b];
        corner[c] = centre[c] + q * half[c];
        const [px, py] = this.project(...corner);
        pen.lineTo(px, py);
      }
      pen.fillStyle = colour[axis];
      pen.fill();
    }
    const [x, y, scale] = this.project(...centre);
    this.hits.push({ x, y, reach: Math.max(...half) * scale, level, index });
  }

  // The nearest voxel drawn under a place on the canvas; null where there is none.
  voxelAt(x, y) {
    for (let i = (this.hits?.length ?? 0) - 1; i >= 0; i--) {
      const hit = this.hits[i];
      if (Math.abs(hit.x - x) <= hit.reach && Math.abs(hit.y - y) <= hit.reach) return hit;
    }
    return null;
  }

  // The write whose mark is under a place on the canvas: first the one that gave most to the read.
  writeAt(x, y) {
    const near = (this.marks ?? []).filter((mark) => Math.hypot(mark.x - x, mark.y - y) <= 10);
    return near.findLast(({ source }) => source) ?? near.at(-1);
  }

  // Edges of the box; an edge is behind when both faces it joins look away from the eye.
  drawBox(layer, part) {
    const pen = this.pen;
    pen.lineWidth = 1;
    pen.strokeStyle = this.colour.frame;
    for (let axis = 0; axis < 3; axis++) {
      const [b, c] = [(axis + 1) % 3, (axis + 2) % 3];
      for (const [p, q] of [[-1, -1], [1, -1], [1, 1], [-1, 1]]) {
        const behind = p * this.eye[b] < this.extent[b] && q * this.eye[c] < this.extent[c];
        if (behind !== (part === "back")) continue;
        const ends = [-1, 1].map((end) => {
          const corner = [0, 0, 0];
          corner[axis] = end * this.extent[axis];
          corner[b] = p * this.extent[b];
          corner[c] = q * this.extent[c];
          return this.project(...corner);
        });
        pen.globalAlpha = behind ? 0.85 : 0.4;
        pen.beginPath();
        pen.moveTo(ends[0][0], ends[0][1]);
        pen.lineTo(ends[1][0], ends[1][1]);
        pen.stroke();
      }
    }
    pen.globalAlpha = 1;
  }

  // Axis names with the coordinates of their ends, along edges that meet below; a label that would
  // fall on another is left out.
  drawLabels(layer) {
    const pen = this.pen;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = this.colour.muted;
    const taken = [];
    const label = (text, at) => {
      const [x, y] = this.project(...at);
      const half = pen.measureText(text).width / 2 + 3;
      const box = [Math.max(half, Math.min(this.width - half, x)), Math.max(9, Math.min(this.height - 9, y)), half];
      if (taken.some((t) => Math.abs(t[0] - box[0]) < t[2] + half && Math.abs(t[1] - box[1]) < 16)) return;
      taken.push(box);
      pen.fillText(text, box[0], box[1]);
    };
    const out = this.extent.map((e) => e + (layer.axes === 1 ? 0.06 : 0.17));
    const [ex, ey, ez] = this.extent;
    const front = Math.sign(this.eye[2]) || 1;
    const side = Math.sign(this.eye[0]) || 1;
    const names = ["x", "y", "z"];
    const lines = [
      [[-1, -out[1], front * ez], [1, -out[1], front * ez], [0, -out[1], front * ez]],
      [[-side * out[0], -1, front * ez], [-side * out[0], 1, front * ez], [-side * out[0], 0, front * ez]],
      [[side * out[0], -ey, -1], [side * out[0], -ey, 1], [side * out[0], -ey, 0]],
    ];
    const axes = Math.min(layer.axes, 3);
    for (let axis = 0; axis < axes; axis++) label(names[axis], lines[axis][2]);
    for (let axis = 0; axis < axes; axis++) {
      label("−1", lines[axis][0]);
      label("1", lines[axis][1]);
    }
  }

  // One path per read head, through all of a chunk's tokens when every token reads, older fainter.
  // Returns where it ends.
  drawReads(layer, from, t, row) {
    const ends = [];
    for (let head = 0; head < layer.heads; head++) {
      if (this.hidden.has(head)) continue;
      const colour = this.readColour(layer, head);
      let last = null;
      for (let at = from; at <= t; at++) {
        const age = t === from ? 1 : 0.18 + 0.82 * ((at - from) / (t - from));
        for (let index = head; index < layer.reads; index += layer.heads) {
          const point = pointAt(layer, layer.readAt, layer.reads, at, row, index);
          if (!point) continue;
          const place = this.place(point);
          if (last) {
            this.stroke([last, place], this.colour.halo, 4, age * 0.7);
            this.stroke([last, place], colour, 1.6, age);
          }
          if (at === t) ends.push([place[0], place[1], colour]);
          else this.dot(place[0], place[1], 1.8, colour, age);
          last = place;
        }
      }
    }
    return ends;
  }

  diamond(x, y, inner) {
    const pen = this.pen;
    const on = this.marks.some((mark) => mark.now && Math.hypot(mark.x - x, mark.y - y) < 6);
    for (const [radius, colour] of on ? [[5.5, this.colour.halo], [4, inner]] : [[8, this.colour.halo], [6, inner]]) {
      pen.beginPath();
      pen.moveTo(x, y - radius);
      for (const [dx, dy] of [[1, 0], [0, 1], [-1, 0]]) pen.lineTo(x + dx * radius, y + dy * radius);
      pen.closePath();
      pen.fillStyle = colour;
      pen.fill();
    }
  }

  // Earlier writes as points, the present ones as spheres of radius σ.
  drawWrites(layer, from, t, row) {
    for (let at = from; at <= t; at++) {
      for (let head = 0; head < layer.writes; head++) {
        const point = pointAt(layer, layer.writeAt, layer.writes, at, row, head);
        if (!point || this.hidden.has(head) || !hasWritten(layer, at, row)) continue;
        const [x, y] = this.place(point);
        this.marks.push({ x, y, now: at === t, name: () => `write of ${writeName(layer, row, layer.chunk[at])}` });
        const colour = this.writeColour(layer, head);
        if (at < t) {
          this.dot(x, y, 3.4, this.colour.halo, 0.5);
          this.dot(x, y, 2.5, colour, 0.25 + 0.65 * ((at - from) / (t - from)));
          continue;
        }
        const spread = this.spreadOf(layer, at, row, head);
        if (spread && spread <= WIDE) this.drawSphere(layer, point, spread, colour);
        this.dot(x, y, 8, this.colour.halo);
        this.dot(x, y, 6.5, colour);
      }
    }
  }

  // Rings around the writes that this read came from, as wide as their parts.
  drawSources(layer, row, { writes }) {
    const pen = this.pen;
    for (const write of [...writes].reverse()) {
      const { head, position, part } = write;
      const t = stepOf(layer.chunk, position);
      const size = Math.min(1, Math.abs(part));
      if (layer.chunk[t] !== position || (layer.unit === "token" && head !== layer.head) || size < 0.005) continue;
      for (let index = 0; index < layer.writes; index++) {
        const point = pointAt(layer, layer.writeAt, layer.writes, t, row, index);
        if (!point || this.hidden.has(index)) continue;
        const [x, y] = this.place(point);
        this.marks.push({ x, y, source: true, name: () => sourceName(layer, row, write) });
        for (const [width, colour] of [[3.5 + 6 * size, this.colour.halo], [1.2 + 6 * size, this.writeColour(layer, index)]]) {
          pen.setLineDash(part < 0 ? [4, 3] : []);
          pen.beginPath();
          pen.arc(x, y, 10, 0, 2 * Math.PI);
          [pen.strokeStyle, pen.lineWidth] = [colour, width];
          pen.stroke();
        }
      }
    }
    pen.setLineDash([]);
  }

  // The outline of a sphere; seen from so near it is a little wider than its great circles.
  outline(point, spread) {
    const centre = this.centre(point);
    const [x, y, scale] = this.project(...centre);
    const away = Math.hypot(...centre.map((c, axis) => c - this.eye[axis]));
    return [x, y, (spread * scale) / Math.sqrt(Math.max(1 - (spread / away) ** 2, 0.01))];
  }

  // The writes of a step that are wider than the grid, in words; empty where there are none.
  wideWrites(layer, t, row) {
    const spreads = Array.from({ length: layer.writes }, (_, head) => this.spreadOf(layer, t, row, head));
    const wide = spreads.filter((spread) => spread > WIDE);
    if (!wide.length) return "";
    const which = wide.length > 1 ? `${wide.length} writes` : "write";
    return `${which} wider than the grid: σ ${wide.slice(0, 4).map(number).join(", ")}`;
  }

  spreadOf(layer, t, row, head) {
    return layer.spread?.[(t * recording.rows + row) * layer.writes + head];
  }

  // The inside of a sphere lies behind the voxels, so that it tints none of them.
  shadeWrites(layer, t, row) {
    const pen = this.pen;
    for (let head = 0; head < layer.writes; head++) {
      const point = pointAt(layer, layer.writeAt, layer.writes, t, row, head);
      const spread = this.spreadOf(layer, t, row, head);
      if (!point || !spread || spread > WIDE || layer.axes < 3 || this.hidden.has(head)) continue;
      const colour = this.writeColour(layer, head);
      const [x, y, radius] = this.outline(point, spread);
      const shade = pen.createRadialGradient(x, y, 0, x, y, radius);
      shade.addColorStop(0, `color-mix(in srgb, ${colour} 4%, transparent)`);
      shade.addColorStop(1, `color-mix(in srgb, ${colour} 16%, transparent)`);
      pen.fillStyle = shade;
      pen.beginPath();
      pen.arc(x, y, radius, 0, 2 * Math.PI);
      pen.fill();
    }
  }

  drawSphere(layer, point, spread, colour) {
    const pen = this.pen;
    const centre = this.centre(point);
    if (layer.axes === 1) {
      const ends = [-1, 1].map((side) => this.project(centre[0] + side * spread, 0, 0));
      this.stroke(ends, colour, 2.5, 0.9);
      for (const end of ends) this.stroke([[end[0], end[1] - 7], [end[0], end[1] + 7]], colour, 2.5, 0.9);
      return;
    }
    const circles = layer.axes === 2 ? [[0, 1]] : [[0, 1], [1, 2], [2, 0]];
    if (layer.axes > 2) {
      const [x, y, radius] = this.outline(point, spread);
      pen.beginPath();
      pen.arc(x, y, radius, 0, 2 * Math.PI);
      pen.strokeStyle = colour;
      pen.lineWidth = 1.6;
      pen.stroke();
    }
    for (const [a, b] of circles) {
      const around = Array.from({ length: 65 }, (_, step) => {
        const corner = [...centre];
        corner[a] += spread * Math.cos((step * Math.PI) / 32);
        corner[b] += spread * Math.sin((step * Math.PI) / 32);
        return this.project(...corner);
      });
      this.stroke(around, colour, layer.axes === 2 ? 1.8 : 0.9, layer.axes === 2 ? 1 : 0.45);
    }
  }
}
