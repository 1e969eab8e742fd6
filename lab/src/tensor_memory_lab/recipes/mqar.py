"""Associative recall at a budget of state bytes, by zoology's protocol.

    tensor-memory-lab run mqar --model.method gated-deltanet --model.state-bytes 32768
    tensor-memory-lab sweep --plan lab/plans/mqar.toml --jobs 9 --results results/mqar.jsonl

Batch 256, 32 epochs, AdamW without warm-up or clipping, the rate falling along a half cosine. Four
rates from 1e-3 to 10^-1.5 are tried for every method. What differs from zoology:

- the rate falls at every step, there once an epoch;
- matrices alone have weight decay, there all weights;
- rates and weights are chosen on rows of their own, there on the test set, and no run stops early;
- the convolution's weights start from N(0, 0.02²) and 0, there as those of `nn.Conv1d`;
- the last batch of a part is filled up with its first rows, there it is smaller;
- the bytes of the state are chosen apart from the width.
"""

from __future__ import annotations

from tensor_memory_lab.models.recall import RecallModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.mqar import MqarConfig

BATCH, EPOCH, EPOCHS = 256, 707, 32
"""Rows per step, steps per epoch, epochs."""

Recall = RunConfig[MqarConfig, RecallModelConfig]


def recall(name: str, task: MqarConfig) -> Recall:
    """A run of recall by zoology's protocol."""
    optimizer = OptimizerConfig(
        lr=3.16e-3, weight_decay=0.1, betas=(0.9, 0.999), clip=0.0, schedule="cosine"
    )
    budget = BudgetConfig(
        steps=EPOCHS * EPOCH,
        batch_size=BATCH,
        evaluate_every=EPOCH,
        evaluation_batch_size=250,
        checkpoint_every=8 * EPOCH,
    )
    return RunConfig(name, task, RecallModelConfig(), optimizer, budget)


@recipe("mqar", expected="2 to 6 min on one H200", settings=("model.state_bytes", "model.dim"))
def mqar() -> Recall:
    """Associative recall: 4 to 64 pairs in training, 4 to 256 in the test, 8,192 words."""
    return recall("mqar", MqarConfig())


@recipe(
    "mqar-overwrite",
    expected="2 to 6 min on one H200",
    settings=("model.state_bytes", "model.dim"),
)
def mqar_overwrite() -> Recall:
    """The same where a third of the keys is written twice and counts by its last value."""
    return recall("mqar-overwrite", MqarConfig(overwrite=True))
