"""Every diagnostic again, with attention limited to a window that what is asked for lies beyond.

    tensor-memory-lab run windowed-binding --model.method tensor
    tensor-memory-lab sweep --plan lab/plans/windowed.toml --jobs 6

A stack of L layers with windows of w tokens reaches L × (w - 1) tokens back; `out_of_reach` holds
every recipe here to answers further away than that, so `base` at chance is the control. `xl` gets a
cache of the memory's bytes, which reaches all answers but those of `windowed-binding-long`.
`windowed-no-harm` is the exception by design: nothing it asks for is beyond the window, and the
memory has nothing to add.
"""

from __future__ import annotations

from dataclasses import replace

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.recipes.binding import LONGER, Toy, diagnostic
from tensor_memory_lab.recipes.no_harm import no_harm
from tensor_memory_lab.recipes.occlusion import occlusion_valid
from tensor_memory_lab.tasks.binding import BindingConfig
from tensor_memory_lab.tasks.map_building import MapConfig
from tensor_memory_lab.tasks.no_harm import NoHarmConfig


def out_of_reach(config: Toy) -> Toy:
    """The config, after a check that no answer lies within the reach of its windows."""
    model, task = config.model, config.task.build(config.seed)
    reach = task.length if model.window is None else model.layers * (model.window - 1)
    if task.distance <= reach:
        raise ValueError(
            f"{config.recipe}: expected answers more than {reach} tokens back (layers × (window - "
            f"1)), got {task.distance}; widen the gap or narrow the window"
        )
    return config


@recipe(
    "windowed-binding",
    expected="10 s on one H200",
    settings=("task.writes", "task.noise", "task.gap"),
)
def windowed_binding() -> Toy:
    """8 writes of 8 values, 4 questions; attention sees a token and the one before, 2 layers."""
    task = BindingConfig(writes=8, values=8, noise=0.0, gap=2)
    model = ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.0, window=2)
    return out_of_reach(diagnostic("windowed-binding", task, model, LONGER, steps=4000))


@recipe(
    "windowed-binding-long",
    expected="40 s on one H200",
    settings=("task.writes", "task.noise", "task.gap"),
)
def windowed_binding_long() -> Toy:
    """20 writes of 32 values, then blanks beyond the reach of a cache of the memory's bytes.

    One memory layer: 27,648 bytes are 54 cached tokens in each of the two layers of `xl`, which
    then reaches 2 × (54 + 7) = 122 tokens back.
    """
    task = BindingConfig(writes=20, values=32, noise=0.05, gap=124)
    model = ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.0, window=8, memory_layers=(0,))
    return out_of_reach(diagnostic("windowed-binding-long", task, model, LONGER, steps=4000))


@recipe("windowed-map", expected="30 s on one H200", settings=("task.observations", "task.gap"))
def windowed_map() -> Toy:
    """32 patches of an 8×8 map, then 8 questions beyond the reach of three windows of 4 tokens."""
    task = MapConfig(observations=32, queries=8, gap=9)
    model = ToyModelConfig(dim=96, layers=3, heads=4, dropout=0.0, window=4)
    return out_of_reach(diagnostic("windowed-map", task, model, LONGER, steps=4000, batch_size=64))


@recipe("windowed-occlusion", expected="50 s on one H200", settings=("task.hidden",))
def windowed_occlusion() -> Toy:
    """The last four of eight frames hidden; a patch sees as far as itself one frame before."""
    config = occlusion_valid()
    model = replace(config.model, window=17)
    return out_of_reach(replace(config, recipe="windowed-occlusion", model=model))


@recipe("windowed-no-harm", expected="10 s on one H200", settings=("task.lag",))
def windowed_no_harm() -> Toy:
    """No-harm with a window that still holds the symbol asked for: nothing is to be remembered."""
    config = no_harm()
    return replace(config, recipe="windowed-no-harm", model=replace(config.model, window=2))


@recipe("windowed-delay", expected="20 s on one H200", settings=("task.lag",))
def windowed_delay() -> Toy:
    """Repeat the symbol of eight tokens before: a delay line beyond the windows' reach."""
    task = NoHarmConfig(symbols=16, tokens=32, lag=8)
    model = ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.0, window=2)
    return out_of_reach(diagnostic("windowed-delay", task, model, LONGER, steps=3000))


@recipe(
    "windowed-ablation",
    expected="10 s on one H200",
    settings=("task.writes", "task.noise", "task.gap"),
)
def windowed_ablation() -> Toy:
    """What of the memory matters, where all depends on it: W 20, σ 0.05, windows of two tokens."""
    task = BindingConfig(writes=20, values=32, noise=0.05, gap=2)
    model = ToyModelConfig(method="tensor", dim=64, layers=2, heads=4, dropout=0.0, window=2)
    return out_of_reach(diagnostic("windowed-ablation", task, model, LONGER, steps=3000))


@recipe(
    "demo", expected="2 min on two CPU cores", settings=("task.writes", "task.noise", "task.gap")
)
def demo() -> Toy:
    """Windowed binding for a CPU: the task of `examples/windowed_binding.py`, base and tensor.

    One memory layer, and a forget gate that starts open: at the paper's bias of 0 it halves what
    it holds at every token and takes twice the steps.
    """
    task = BindingConfig(writes=8, values=8, noise=0.0, gap=2, valid_rows=512, test_rows=2048)
    model = ToyModelConfig(
        dim=64,
        layers=2,
        heads=4,
        dropout=0.0,
        window=2,
        memory=MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1, forget_bias=4.0),
        memory_layers=(0,),
    )
    config = diagnostic(
        "demo",
        task,
        model,
        replace(LONGER, warmup=50),
        steps=500,
        batch_size=32,
        evaluate_every=25,
        evaluation_batch_size=512,
    )
    return out_of_reach(config)
