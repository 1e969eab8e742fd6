"""Walk over a photo with a small window of attention: what is remembered of it, with a memory?

    python examples/remembered_world.py     # or: make demo; about two minutes on a CPU core

An agent walks over a picture of 48 × 48 pixels and sees 6 × 6 of them at a time. Before each step
it is asked what is at some place of the picture. Attention reaches 15 glimpses back; what was seen
before that has to be remembered. Both models see the same walks and start from the same values. One
of them has a `PlaceMemory` too, which is told the poses.

Both are trained here, on crops of seven photos, mirrored and with their colours exchanged. The
table and the pictures are made with an eighth photo, a cat, that neither has seen. At the end: a
table; a picture and an animation of what each model answers when it is asked everywhere; a page
that shows the memory at work.

Needs: pip install 'tensor-memory[inspect]' scikit-image (for its photos)

Letters: B batch, T glimpses, N = 2T tokens, Q questions, P numbers in a patch, d width.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryResidual, PlaceConfig, PlaceMemory, memory_disabled, record

TRAIN_PHOTOS = (
    "astronaut.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png",
    "retina.jpg", "rocket.jpg",
)  # fmt: skip
TEST_PHOTO = "chelsea.png"
SIDE, PATCH = 48, 6  # pixels
PIXELS = 3 * PATCH**2
SCALES = (1.0, 1.5, 2.0, 3.0)  # short side of a photo that crops are taken from, in SIDE
TRAIN_CROPS, TEST_CROPS = 4096, 128

GLIMPSES, STEP, TURN = 64, 0.2, 0.6  # of a walk; half widths; radians
NEAR = 0.12  # half widths within which a glimpse has seen a place
RECENT, FAR = 8, 16  # glimpses ago
SHOWN, EVERY = 200, 4  # glimpses of the walk that is shown, and between two frames of it
AFTER = (12, 60, 200)  # glimpses after which the picture shows what is answered
BETWEEN = 2  # pixels between the places of "everywhere"

DIM, LAYERS, HEADS, WINDOW, OCTAVES = 64, 2, 2, 16, 5
# Interpolation costs a third of the Gaussian here. 16 voxels along an axis are 2.8 pixels apart.
MEMORY = PlaceConfig.map(axes=2, grid=(16, 16), channels=64, heads=1, kernel="linear")
BATCH, RATE = 8, 6e-3
ZOOM, GAP, TITLE = 4, 8, 20  # of pictures, in screen pixels


class Walks(NamedTuple):
    """Where questions are asked and what is seen; question t comes before glimpse t."""

    asked: Tensor  # (B, T, 2) in [-1, 1]
    poses: Tensor  # (B, T, 2)
    seen: Tensor  # (B, T, P) in [-1, 1]
    answers: Tensor  # (B, T, P)


def open_photo(name: str) -> Any:
    """A photo of scikit-image, without importing it: its files are all that is needed."""
    from PIL import Image

    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise SystemExit(
            "photos: expected scikit-image to be installed, got nothing; pip install scikit-image"
        )
    return Image.open(Path(package.origin).parent / "data" / name).convert("RGB")


def resized(photo: Any, short: int) -> Tensor:
    """(3, h, w) bytes of a photo, its short side `short` pixels."""
    from PIL.Image import Resampling

    ratio = short / min(photo.size)
    size = (max(short, round(photo.width * ratio)), max(short, round(photo.height * ratio)))
    small = photo.resize(size, Resampling.BOX)
    data = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return data.view(size[1], size[0], 3).permute(2, 0, 1)


def crops(photos: Sequence[Any], count: int, generator: torch.Generator, *, vary: bool) -> Tensor:
    """(count, 3, SIDE, SIDE) in [-1, 1], in turn of all photos; `vary` mirrors and recolours."""
    sizes = [[resized(photo, round(scale * SIDE)) for scale in SCALES] for photo in photos]
    found = []
    for number in range(count):
        u = torch.rand(5, generator=generator).tolist()
        image = sizes[number % len(photos)][int(u[0] * len(SCALES))]
        top, left = (int(u[n] * (image.shape[n] - SIDE + 1)) for n in (1, 2))
        crop = image[:, top : top + SIDE, left : left + SIDE]
        if vary:
            crop = crop.flip([axis + 1 for axis in (0, 1) if u[3 + axis] < 0.5])
            crop = crop[torch.randperm(3, generator=generator)]
        found.append(crop)
    return torch.stack(found).float() / 127.5 - 1


def middle(photo: Any) -> Tensor:
    """(1, 3, SIDE, SIDE) in [-1, 1]: the square in the middle of a photo."""
    image = resized(photo, SIDE)
    top, left = ((size - SIDE) // 2 for size in image.shape[1:])
    return image[None, :, top : top + SIDE, left : left + SIDE].float() / 127.5 - 1


def glimpses(images: Tensor, at: Tensor) -> Tensor:
    """Patches (B, T, P) of images (B, 3, SIDE, SIDE) around places (B, T, 2), interpolated.

    At -1 and 1 the patch touches the border.
    """
    line = torch.arange(PATCH) - (PATCH - 1) / 2
    y, x = torch.meshgrid(line, line, indexing="ij")
    offsets = torch.stack([x, y], dim=-1).view(-1, 2)
    points = at[:, :, None] * (1 - PATCH / SIDE) + offsets * (2 / SIDE)
    return F.grid_sample(images, points, align_corners=False).permute(0, 2, 3, 1).flatten(2)


def draw_walks(images: Tensor, length: int, generator: torch.Generator) -> Walks:
    """A walk with momentum over each image, reflected at its borders; questions anywhere."""
    B = len(images)
    turns = TURN * torch.randn(B, length, generator=generator)
    heading = 2 * math.pi * torch.rand(B, 1, generator=generator) + turns.cumsum(1)
    moves = STEP * torch.stack([heading.cos(), heading.sin()], dim=-1)
    start = 2 * torch.rand(B, 1, 2, generator=generator) - 1
    poses = 1 - ((start + moves.cumsum(1) + 1) % 4 - 2).abs()
    asked = 2 * torch.rand(B, length, 2, generator=generator) - 1
    return Walks(asked, poses, glimpses(images, poses), glimpses(images, asked))


class Block(nn.Module):
    """Attention under a mask, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)
        )

    def forward(self, x: Tensor, sees: Tensor) -> Tensor:
        """x (B, N, d), sees (N, N) true where a token sees another -> (B, N, d)."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Questions, poses and glimpses -> an answer to each question."""

    frequencies: Tensor

    def __init__(self, memory: PlaceConfig | None) -> None:
        super().__init__()
        self.register_buffer("frequencies", math.pi / 2 * 2.0 ** torch.arange(OCTAVES))
        self.pose, self.patch = nn.Linear(2 + 4 * OCTAVES, DIM), nn.Linear(PIXELS, DIM)
        self.kind = nn.Parameter(0.02 * torch.randn(2, DIM))  # question, glimpse
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, PIXELS))
        # Made last, so that one seed gives both models the same host.
        self.memory = None if memory is None else MemoryResidual(PlaceMemory(DIM, memory))

    def forward(self, walks: Walks) -> Tensor:
        """Answers (B, T, P), each from the glimpses before its question."""
        x, where = self.tokens(walks)
        if self.memory is not None:
            x, _ = self.memory(x, where=where)
        return self.answers(x, self.window(x.shape[1]))[:, ::2]

    @torch.no_grad()
    def ask(self, walk: Walks, at: Tensor) -> Tensor:
        """Answers (Q, P) to questions at (Q, 2) after one walk, each asked alone.

        Every question reads what the memory holds after the walk and sees the last tokens of the
        walk; no question sees another or what another has changed.
        """
        x, where = self.tokens(walk)
        questions = self.pose(self.waves(at)) + self.kind[0]
        if self.memory is not None:
            x, state = self.memory(x, where=where)
            copies = state.select([0] * len(at))
            questions, _ = self.memory(questions[:, None], copies, where=at[:, None])
            questions = questions[:, 0]
        N, Q = x.shape[1], len(at)
        sees = torch.eye(N + Q, dtype=torch.bool)
        sees[:N, :N] = self.window(N)
        sees[N:, max(0, N + 1 - WINDOW) : N] = True
        return self.answers(torch.cat([x, questions[None]], dim=1), sees)[0, N:]

    def tokens(self, walks: Walks) -> tuple[Tensor, Tensor]:
        """Tokens (B, N, d), question and glimpse in turn, and their places (B, N, 2)."""
        asked = self.pose(self.waves(walks.asked)) + self.kind[0]
        seen = self.pose(self.waves(walks.poses)) + self.kind[1] + self.patch(walks.seen)
        places = torch.stack([walks.asked, walks.poses], dim=2).flatten(1, 2)
        return torch.stack([asked, seen], dim=2).flatten(1, 2), places

    def waves(self, at: Tensor) -> Tensor:
        """Places (…, 2) -> themselves, sines and cosines (…, 2 + 4 · octaves)."""
        angles = (at[..., None] * self.frequencies).flatten(-2)
        return torch.cat([at, angles.sin(), angles.cos()], dim=-1)

    def window(self, length: int) -> Tensor:
        """(N, N) true where a token sees another: itself and those just before it."""
        return torch.ones(length, length, dtype=torch.bool).tril().triu(1 - WINDOW)

    def answers(self, x: Tensor, sees: Tensor) -> Tensor:
        """Patches (B, N, P) of tokens (B, N, d)."""
        for block in self.blocks:
            x = block(x, sees)
        return self.head(x)


def errors(found: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error of patches (…, P) -> (…), on the scale [0, 1]."""
    return ((found - truth) / 2).square().mean(-1)


def train(label: str, memory: PlaceConfig | None, images: Tensor, steps: int, seed: int) -> Model:
    """Minimise the mean squared error of the answers."""
    torch.manual_seed(seed)
    model = Model(memory)
    data = torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    recent: list[float] = []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(images), (BATCH,), generator=data)
        walks = draw_walks(images[chosen], GLIMPSES, data)
        loss = errors(model(walks), walks.answers).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        recent.append(loss.item())
        if step % 100 == 0 or step == steps:
            error = sum(recent) / len(recent)
            print(f"{label}: step {step} of {steps}, {decibels(error):.1f} dB", flush=True)
            recent.clear()
    return model.eval()


def decibels(error: float) -> float:
    """PSNR of a mean squared error."""
    return -10 * math.log10(max(error, 1e-10))


def ages(walks: Walks) -> Tensor:
    """(B, T) how many glimpses ago the place of each question was last seen; 0 where never."""
    number = torch.arange(walks.poses.shape[1])
    there = (torch.cdist(walks.asked, walks.poses) < NEAR) & (number < number[:, None])
    last = torch.where(there, number, -1).amax(-1)
    return torch.where(last < 0, 0, number - last)


@torch.no_grad()
def measure(model: Model, walks: Walks) -> dict[str, float]:
    """PSNR in dB, by how long ago what is asked for was seen."""
    error, age = errors(model(walks), walks.answers), ages(walks)
    kinds = {
        f"last seen more than {FAR} glimpses ago": age > FAR,
        f"seen within the last {RECENT} glimpses": (age > 0) & (age <= RECENT),
        "never seen": age == 0,
    }
    return {kind: decibels(error[chosen].mean().item()) for kind, chosen in kinds.items()}


def everywhere(model: Model, walk: Walks) -> Tensor:
    """(3, SIDE, SIDE) in [0, 1]: what a model answers at every place after a walk.

    Patches overlap; the middle of a patch counts more than its border.
    """
    places = torch.arange(0, SIDE - PATCH + 1, BETWEEN) * (2 / (SIDE - PATCH)) - 1
    y, x = torch.meshgrid(places, places, indexing="ij")
    patches = model.ask(walk, torch.stack([x, y], dim=-1).view(-1, 2))
    ramp = 1 - (torch.arange(PATCH) - (PATCH - 1) / 2).abs() / (PATCH / 2 + 0.5)
    weight = (ramp[:, None] * ramp).flatten()[:, None]  # (patch², 1)
    columns = patches.view(-1, PATCH**2, 3).permute(2, 1, 0)  # (3, patch², Q)

    def folded(values: Tensor) -> Tensor:
        return F.fold(values, (SIDE, SIDE), PATCH, stride=BETWEEN)

    image = folded(columns * weight) / folded(weight.expand(columns.shape))
    return (image[:, 0] / 2 + 0.5).clamp(0, 1)


def seen_so_far(image: Tensor, poses: Tensor) -> Tensor:
    """An image (3, SIDE, SIDE) in [0, 1], grey where none of the glimpses at (T, 2) was."""
    line = torch.arange(SIDE) - (SIDE - 1) / 2
    near = ((poses * (SIDE - PATCH) / 2)[:, :, None] - line).abs() <= PATCH / 2  # (T, 2, SIDE)
    return torch.where((near[:, 1, :, None] & near[:, 0, None]).any(0), image, 0.5)


def tile(image: Tensor, pose: Tensor | None = None) -> Any:
    """An image (3, SIDE, SIDE) in [0, 1] enlarged, with a frame around the glimpse at a pose."""
    from PIL import Image, ImageDraw

    data = (image * 255).round().byte().permute(1, 2, 0).contiguous()
    drawn = Image.frombytes("RGB", (SIDE, SIDE), data.numpy().tobytes())
    drawn = drawn.resize((ZOOM * SIDE, ZOOM * SIDE), Image.Resampling.NEAREST)
    if pose is not None:
        x, y = ((pose + 1) * (SIDE - PATCH) / 2 * ZOOM).tolist()
        box = (x, y, x + ZOOM * PATCH, y + ZOOM * PATCH)
        ImageDraw.Draw(drawn).rectangle(box, outline="#D55E00", width=2)
    return drawn


def sheet(rows: Sequence[tuple[Sequence[str], Sequence[Any]]]) -> Any:
    """Rows of tiles, a title above each tile, as one Pillow image."""
    from PIL import Image, ImageDraw, ImageFont

    step = ZOOM * SIDE + GAP
    size = (len(rows[0][0]) * step + GAP, len(rows) * (step + TITLE) + GAP)
    page = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(13)
    for row, (titles, tiles) in enumerate(rows):
        top = GAP + row * (step + TITLE)
        for column, (title, drawn) in enumerate(zip(titles, tiles, strict=True)):
            left = GAP + column * step
            draw.text((left, top), title, fill="#222222", font=font)
            page.paste(drawn, (left, top + TITLE))
    return page


def shorter(walk: Walks, length: int) -> Walks:
    """The first glimpses of a walk."""
    return Walks(*(part[:, :length] for part in walk))


def show(models: dict[str, Model], image: Tensor, walk: Walks, output: Path) -> tuple[Path, Path]:
    """Draw what models answer everywhere as the walk goes on: a picture and an animation."""
    from PIL.Image import Dither, Quantize

    whole, frames, rows = image[0] / 2 + 0.5, [], []
    for count in range(EVERY, walk.poses.shape[1] + 1, EVERY):
        so_far = shorter(walk, count)
        seen = tile(seen_so_far(whole, so_far.poses[0]), so_far.poses[0, -1])
        answered = [tile(everywhere(model, so_far)) for model in models.values()]
        frames.append(sheet([([f"seen: {count} glimpses", *models], [seen, *answered])]))
        if count in AFTER:
            titles = [f"seen: {count} glimpses", *models, "the photo"]
            rows.append((titles, [seen, *answered, tile(whole)]))
    picture, animation = output / "answers.png", output / "answers.gif"
    # Dots of mixed colours would flicker, and double the file. The eyes and the frame are few
    # pixels: a palette by area would lose their colours.
    method = {"method": Quantize.MAXCOVERAGE, "kmeans": 1, "dither": Dither.NONE}
    frames = [frame.quantize(256, **method) for frame in frames]
    _replace(picture, lambda at: sheet(rows or [(["the photo"], [tile(whole)])]).save(at, "PNG"))
    times = [120] * (len(frames) - 1) + [3000]
    _replace(
        animation,
        lambda at: frames[0].save(
            at, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0
        ),
    )
    return picture, animation


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name first, so that no half of it is ever there."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    write(unfinished)
    unfinished.replace(path)


@torch.no_grad()
def save_page(model: Model, image: Tensor, walk: Walks, path: Path) -> None:
    """What the memory does with every token of a walk, as a page."""
    texts = []
    for asked, pose in zip(walk.asked[0].tolist(), walk.poses[0].tolist(), strict=True):
        texts += [f"what is at ({asked[0]:+.2f}, {asked[1]:+.2f})? "]
        texts += [f"seen at ({pose[0]:+.2f}, {pose[1]:+.2f}); "]
    whole = image[0] / 2 + 0.5
    counts = range(1, walk.poses.shape[1] + 1)
    seen = torch.stack([seen_so_far(whole, walk.poses[0, :count]) for count in counts])
    frames = (seen * 255).round().byte().permute(0, 2, 3, 1)[None]
    with record(model, texts=[texts], frames=frames, tokens_per_frame=2) as recording:
        model(walk)
    # Places are the middles of glimpses: at -1 and 1 these are half a glimpse inside the photo.
    inner = slice(PATCH // 2, SIDE - PATCH // 2)
    photo = (whole[:, inner, inner] * 255).round().byte().permute(1, 2, 0)
    recording.save_page(path, title="A walk over a photo", image=photo)


def table(models: dict[str, Model], walks: Walks, seconds: dict[str, float]) -> str:
    """What came out, a column per model."""
    columns = []
    for label, model in models.items():
        found = {kind: f"{value:.2f} dB" for kind, value in measure(model, walks).items()}
        off, state = "-", 0
        if model.memory is not None:
            with memory_disabled(model):
                off = f"{next(iter(measure(model, walks).values())):.2f} dB"
            state = model.memory.memory.empty_state(torch.zeros(1, 0, DIM)).nbytes
        size = sum(parameter.numel() for parameter in model.parameters())
        found |= {"the first, memory switched off": off, "parameters": f"{size:,}"}
        found |= {"state carried past attention": f"{state:,} B"}
        columns.append(found | {"training": f"{seconds[label]:.0f} s"})
    lines = [("what is asked for was", *models)]
    lines += [(name, *(column[name] for column in columns)) for name in columns[0]]
    return "\n".join(f"{name:<36}{one:>16}{two:>16}" for name, one, two in lines)


def main(argv: list[str] | None = None) -> int:
    """Train both, show what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="of each model (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="folder of the pictures and the page (default runs/demo)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected 1 or more, got {options.steps}")
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # on tensors this small more threads cost more than they give

    photos, photo = [open_photo(name) for name in TRAIN_PHOTOS], open_photo(TEST_PHOTO)
    images = crops(photos, TRAIN_CROPS, torch.Generator().manual_seed(options.seed), vary=True)
    models, seconds = {}, {}
    for label, memory in {"window only": None, "with memory": MEMORY}.items():
        started = time.perf_counter()
        models[label] = train(label, memory, images, options.steps, options.seed)
        seconds[label] = time.perf_counter() - started

    test = torch.Generator().manual_seed(-1)
    walks = draw_walks(crops([photo], TEST_CROPS, test, vary=False), GLIMPSES, test)
    print(f"\n{table(models, walks, seconds)}\n")
    print("PSNR on crops of a photo that was not trained on; more is better.")
    image = middle(photo)
    walk = draw_walks(image, SHOWN, torch.Generator().manual_seed(-2))
    picture, animation = show(models, image, walk, options.output)
    page = options.output / "memory.html"
    save_page(models["with memory"], image, walk, page)
    print(f"asked everywhere:   {picture}")
    print(f"the same, moving:   {animation}")
    print(f"inside the memory:  {page} (open it in a browser)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
