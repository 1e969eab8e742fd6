"""Actions in UCF-101, with the memory or another way to bring frames together.

    tensor-memory-lab run ucf101-9 --task.data-dir DIR --model.method spatial --task.frames 32
    tensor-memory-lab sweep ucf101-9 --over seed=0,1,2 \\
        --over model.method=joint,frames,registers,spatial,wide

DIR holds `UCF-101/<Class>/*.avi` and the official lists. Every run is also tested with frames and
with a region missing.
"""

from __future__ import annotations

from dataclasses import replace

from tensor_memory_lab.models.video import VideoModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.video import VideoTaskConfig

Run = RunConfig[VideoTaskConfig, VideoModelConfig]

NINE = (
    "ApplyEyeMakeup",
    "ApplyLipstick",
    "Archery",
    "BabyCrawling",
    "BalanceBeam",
    "BandMarching",
    "BaseballPitch",
    "Basketball",
    "BasketballDunk",
)
"""The first nine classes of classInd.txt."""


@recipe(
    "ucf101-9",
    expected="one to three minutes on one H200, by method and frames",
    settings=("task.frames", "model.readout"),
)
def ucf101_nine() -> Run:
    """Nine classes of UCF-101 at 128 x 96, T = 8 frames (--task.frames 32 or 64 for longer)."""
    return RunConfig(
        recipe="ucf101-9",
        task=VideoTaskConfig(classes=NINE),
        model=VideoModelConfig(),
        optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.05, warmup=50),
        budget=BudgetConfig(
            steps=1000,  # 44 epochs of 727 clips
            batch_size=32,
            evaluate_every=100,
            checkpoint_every=500,
        ),
        precision="bf16",
    )


@recipe(
    "ucf101-9-cost",
    expected="ten seconds on one H200, alone on it",
    settings=("task.frames", "model.readout"),
)
def ucf101_cost() -> Run:
    """Forty steps of `ucf101-9` for step time and peak memory; its accuracy means nothing."""
    made = ucf101_nine()
    return replace(
        made,
        recipe="ucf101-9-cost",
        task=replace(made.task, missing=(), region=0.0),
        budget=replace(made.budget, steps=40, evaluate_every=40, checkpoint_every=40),
    )


@recipe(
    "ucf101-cost-published",
    expected="ten seconds on one H200, alone on it",
    settings=("task.frames", "model.readout"),
)
def ucf101_cost_published() -> Run:
    """Forty steps at the paper's shape: 224 px, patch 16, T = 8, batch 32, two classes."""
    made = ucf101_cost()
    large = {"height": 240, "width": 320, "crop": (224, 224), "cached_frames": 8}
    return replace(
        made,
        recipe="ucf101-cost-published",
        task=replace(made.task, classes=("Archery", "BasketballDunk"), **large),
    )


@recipe("ucf101-published", settings=("task.frames", "model.readout"))
def ucf101_published() -> Run:
    """All of UCF-101 with the paper's sizes: 224 px, patch 16, T = 8, batch 16, 50 epochs.

    Sixteen frames of every clip are 49 GB, which stay on the host.
    """
    steps = 50 * 7933 // 16
    return RunConfig(
        recipe="ucf101-published",
        task=VideoTaskConfig(
            cached_frames=16,
            height=240,
            width=320,
            crop=(224, 224),
            missing=(0.25, 0.5, 0.75),
            resident="host",
        ),
        model=VideoModelConfig(),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.05, warmup=steps // 20),
        budget=BudgetConfig(
            steps=steps, batch_size=16, evaluate_every=steps // 25, checkpoint_every=steps // 10
        ),
        precision="bf16",
    )
