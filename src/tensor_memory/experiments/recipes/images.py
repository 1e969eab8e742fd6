"""Masked reconstruction of birds, and of any folder of images.

    tensor-memory run cub --task.data-dir cub200-2011-120px.zip --model.method spatial
    tensor-memory sweep cub --over model.method=base,local,registers,spatial,wide --over seed=0,1,2

`cub` takes images with a short side of 120 pixels; `cub-published` has the paper's sizes and wants
the original images.
"""

from __future__ import annotations

from dataclasses import replace

from tensor_memory.experiments.models.image import ImageModelConfig
from tensor_memory.experiments.recipes import recipe
from tensor_memory.experiments.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory.experiments.tasks.masked_images import MaskedImagesConfig

Run = RunConfig[MaskedImagesConfig, ImageModelConfig]

EPOCHS = 200
CUB_TRAIN = 5395
"""Images to train on: the official 5,994 less a tenth held out for validation."""


@recipe("cub", expected="about a minute on one H200; hours on a CPU")
def cub() -> Run:
    """Masked reconstruction on CUB-200-2011 at 120 px: crops of 112, patches of 8, 200 epochs."""
    steps = EPOCHS * CUB_TRAIN // 256
    return RunConfig(
        recipe="cub",
        task=MaskedImagesConfig(),
        model=ImageModelConfig(),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.05, warmup=steps // 20),
        budget=BudgetConfig(
            steps=steps, batch_size=256, evaluate_every=steps // 10, checkpoint_every=steps // 4
        ),
        precision="bf16",
    )


@recipe("cub-published")
def cub_published() -> Run:
    """The same with the paper's sizes and rate: crops of 224, patches of 16, lr 1.5e-4."""
    made = cub()
    return replace(
        made,
        recipe="cub-published",
        task=MaskedImagesConfig(data_dir="CUB_200_2011", side=256, crop=224, patch=16),
        optimizer=replace(made.optimizer, lr=1.5e-4),
    )


@recipe("images")
def images() -> Run:
    """Masked reconstruction on any folder of images, split by the hash of their names."""
    return replace(
        cub(), recipe="images", task=MaskedImagesConfig(data_dir="images", layout="folder")
    )
