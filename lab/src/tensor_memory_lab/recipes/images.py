"""Masked reconstruction of birds, and of any folder of images.

    tensor-memory-lab run cub --task.data-dir cub200-2011-120px.zip --model.method spatial
    tensor-memory-lab sweep cub --over seed=0,1,2 \\
        --over model.method=base,local,registers,spatial,wide

`cub` takes images with a short side of 120 pixels; `cub-published` has the paper's sizes and wants
the original images.
"""

from __future__ import annotations

from tensor_memory_lab.models.image import ImageModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig

Run = RunConfig[MaskedImagesConfig, ImageModelConfig]

CUB_TRAIN = 5395
"""Images to train on: the official 5,994 less a tenth held out for validation."""


@recipe("cub", expected="about a minute on one H200; hours on a CPU")
def cub() -> Run:
    """Masked reconstruction on CUB-200-2011 at 120 px: crops of 112, patches of 8, 100 epochs."""
    return _trained("cub", MaskedImagesConfig(), lr=1e-3, epochs=100)


@recipe("cub-published")
def cub_published() -> Run:
    """Masked reconstruction on CUB-200-2011 as published: crops of 224, patches of 16."""
    task = MaskedImagesConfig(data_dir="CUB_200_2011", side=256, crop=224, patch=16)
    return _trained("cub-published", task, lr=1.5e-4, epochs=200)


@recipe("images")
def images() -> Run:
    """Masked reconstruction on any folder of images, split by the hash of their names."""
    task = MaskedImagesConfig(data_dir="images", layout="folder")
    return _trained("images", task, lr=1e-3, epochs=100)


def _trained(name: str, task: MaskedImagesConfig, *, lr: float, epochs: int) -> Run:
    """Epochs are counted in birds, whatever the images."""
    steps = epochs * CUB_TRAIN // 256
    return RunConfig(
        recipe=name,
        task=task,
        model=ImageModelConfig(),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.05, warmup=steps // 20),
        budget=BudgetConfig(
            steps=steps, batch_size=256, evaluate_every=steps // 10, checkpoint_every=steps // 4
        ),
        precision="bf16",
    )
