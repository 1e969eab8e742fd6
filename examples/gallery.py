r"""Record a small trained memory at work, for the pictures in docs/inspect.md.

    python examples/gallery.py                       # trains for about a minute, then records
    tensor-memory inspect docs/recordings/streaming.safetensors \
        --figures docs/images/inspect --chunks 0:12 --theme both

The model is that of examples/streaming.py: values are written at points of space, then asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from streaming import MEMORY, Model, record_stream, train


def main(argv: list[str] | None = None) -> int:
    """Train, record, save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--episodes", type=int, default=10, help="episodes recorded (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/recordings/streaming.safetensors")
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # on tensors this small more threads cost more than they give
    torch.manual_seed(options.seed)
    model = Model(MEMORY)
    train(model, options.steps, options.seed + 1, "with memory")
    recording = record_stream(model, options.episodes, options.seed + 2)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    recording.save(options.output)
    print(f"{recording}, written to {options.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
