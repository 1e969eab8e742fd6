// How the memory is looked at: the colours, the eye and a pen that knows both.
//
// World axes are the memory's coordinates: x is coordinate 0 and the last grid axis, y is up, z
// comes towards the viewer. Over a picture y goes down, as it does in pictures.

// The colour map of the figures: even in lightness, the same to all eyes.
const CIVIDIS = ["00224e", "083370", "35456c", "4f576c", "666970", "7d7c78", "948e77", "aea371", "c8b866", "e5cf52", "fee838"]
  .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const DISTANCE = 6.5; // of the eye from the centre, in coordinate units
const FACES = [0.86, 1.08, 1.0]; // brightness of the faces across x, y and z

// Strong values stand out from the ground: bright on dark, dark on light.
function volumeColour(fraction, dark) {
  const at = (dark ? fraction : 1 - fraction) * (CIVIDIS.length - 1) * (dark ? 1 : 0.95);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return CIVIDIS[low].map((c, i) => c + (at - low) * (CIVIDIS[low + 1][i] - c));
}

const css = (colour, gain = 1) => `rgb(${colour.map((c) => Math.min(255, Math.round(c * gain))).join(" ")})`;

const isDark = () => document.documentElement.dataset.theme === "dark";

class View {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.upwards = 1;
    this.resetView(3);
    this.restyle();
  }

  restyle() {
    const style = getComputedStyle(document.documentElement);
    this.colour = Object.fromEntries(["ink", "muted", "line", "frame", "write", "read", "halo"]
      .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.heads = Array.from({ length: 6 }, (_, head) => style.getPropertyValue(`--head-${head}`).trim());
    const dark = isDark();
    this.table = Array.from({ length: 256 }, (_, level) => {
      const colour = volumeColour(level / 255, dark);
      return FACES.map((gain) => css(colour, gain));
    });
  }

  resetView(axes) {
    [this.yaw, this.pitch, this.zoom] = axes >= 3 ? [-0.62, 0.42, 1] : axes === 2 ? [0, 0, 1.55] : [0, 0, 1.9];
    this.axes = axes;
  }

  turn(yaw, pitch) {
    this.yaw += yaw;
    this.pitch = Math.max(-1.5, Math.min(1.5, this.pitch + pitch));
  }

  magnify(factor) {
    this.zoom = Math.max(0.4, Math.min(8, this.zoom * factor));
  }

  resize() {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (this.width !== width || this.height !== height || this.ratio !== ratio) {
      [this.width, this.height, this.ratio] = [width, height, ratio];
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
  }

  aim() {
    const [cy, sy, cp, sp] = [Math.cos(this.yaw), Math.sin(this.yaw), Math.cos(this.pitch), Math.sin(this.pitch)];
    this.turnBy = [[cy, 0, sy], [sp * sy, cp, -sp * cy], [-cp * sy, sp, cp * cy]];
    this.eye = this.turnBy[2].map((c) => c * DISTANCE);
    const side = this.axes === 1 ? this.width * 0.83 : Math.min(this.width, this.height);
    // Cells at the border of a coarse grid reach far beyond it.
    this.unit = side * 0.229 * this.zoom * Math.min(1, 1.25 / Math.max(...this.extent));
  }

  // World to screen: x, y, and pixels per coordinate unit there.
  project(x, y, z) {
    const [right, up, near] = this.turnBy.map((r) => r[0] * x + r[1] * y + r[2] * z);
    // What has one or two axes is drawn as the plane that it is, without perspective.
    const scale = this.axes < 3 ? this.unit : this.unit * (DISTANCE / Math.max(DISTANCE - near, 0.5));
    return [this.width / 2 + right * scale, this.height * 0.47 - this.upwards * up * scale, scale];
  }

  // A memory point of 1 to 4 coordinates in the world; a fourth is projected away, and so is the
  // axis along which the largest is shown.
  centre(point) {
    const centre = [0, 1, 2].map((axis) => point[axis] ?? 0);
    if (this.flat) centre[this.flat.axis] = this.flat.at;
    return centre;
  }

  place(point) {
    return this.project(...this.centre(point));
  }

  stroke(path, colour, width, alpha = 1) {
    const pen = this.pen;
    pen.globalAlpha = alpha;
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.lineJoin = pen.lineCap = "round";
    pen.beginPath();
    for (const [x, y] of path) pen.lineTo(x, y);
    pen.stroke();
    pen.globalAlpha = 1;
  }

  dot(x, y, radius, colour, alpha = 1) {
    const pen = this.pen;
    pen.globalAlpha = alpha;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fillStyle = colour;
    pen.fill();
    pen.globalAlpha = 1;
  }
}
