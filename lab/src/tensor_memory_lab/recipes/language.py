"""WikiText-2: the paper's table with causal models, and streams whose state is carried.

    tensor-memory-lab run language --task.data-dir wikitext-2 --model.method tensor
    tensor-memory-lab run language-paper --task.data-dir wikitext-2
    tensor-memory-lab run language-carried --task.data-dir wikitext-2 --model.method tensor-local

A run of `base` is about a minute on one H200. The learning rate and the budget were chosen on
`base` and serve every method.
"""

from __future__ import annotations

from dataclasses import replace

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.language import LanguageModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.language import LanguageTaskConfig

MEMORY = MemoryConfig(channels=32, grid=(8, 8, 8), chunk_size=16)

Language = RunConfig[LanguageTaskConfig, LanguageModelConfig]


@recipe("language", expected="1 to 2 min on one H200")
def language() -> Language:
    """WikiText-2 in the standard protocol, windows of 512 that start empty."""
    return RunConfig(
        recipe="language",
        task=LanguageTaskConfig(),
        model=LanguageModelConfig(memory=MEMORY),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, schedule="cosine", warmup=200),
        budget=BudgetConfig(steps=2400, batch_size=32, evaluate_every=400, checkpoint_every=1200),
        precision="bf16",
    )


@recipe("language-paper", expected="1 to 2 min on one H200; base 100 test PPL")
def language_paper() -> Language:
    """WikiText-2 with the paper's vocabulary: 30,000 words, no <eos>."""
    config = language()
    return replace(config, recipe="language-paper", task=replace(config.task, protocol="paper"))


@recipe("language-carried", expected="1 to 2 min on one H200")
def language_carried() -> Language:
    """WikiText-2 as 32 streams read in order, the state carried from window to window."""
    config = language()
    return replace(
        config,
        recipe="language-carried",
        task=replace(config.task, carried=True),
        model=replace(config.model, method="tensor-local"),
    )


@recipe("language-leak", expected="3 min on one H200")
def language_leak() -> Language:
    """The published depth-threaded memory, which sees the future: never a perplexity."""
    config = language_paper()
    return replace(
        config,
        recipe="language-leak",
        task=replace(config.task, leak=True),
        model=replace(config.model, method="tensor-depth", non_causal=True),
    )
