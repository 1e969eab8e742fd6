"""What the plans of the language runs hold, so that a sweep measures what was asked for."""

from collections import Counter
from pathlib import Path

from tensor_memory_lab.commands.grid import expand, read_plan

ROOT = Path(__file__).parents[2]


def plan(name):
    return [run.config for run in expand(read_plan(ROOT / "grids" / f"language-{name}.toml"))]


def test_the_plans_hold_what_is_to_be_run():
    fresh = {(c.recipe, c.model.method, c.seed) for c in plan("1-fresh")}
    methods = ("base", "local", "tensor", "tensor-local")
    assert fresh == {
        (recipe, method, seed)
        for recipe in ("language", "language-paper")
        for method in methods
        for seed in (0, 1, 2)
    }
    carried = plan("2-carried")
    assert {c.model.method for c in carried} == {"base", "local", "tensor-local", "xl"}
    assert all(c.task.carried for c in carried)
    best = plan("3-best")
    settings = [(c.model, c.budget, c.seed) for c in [*carried, *best]]
    assert len(set(map(repr, settings))) == len(settings)
    assert {(c.task, c.budget) for c in best} == {(c.task, c.budget) for c in carried}
    assert Counter(repr(c.model) for c in best) == {repr(c.model): 3 for c in best}
    assert {c.seed for c in best} == {0, 1, 2}
    turned = {c.model.method for c in best if c.model.positions == "rotary"}
    assert turned == {"base", "local", "conv-local", "tensor-local"}  # both ends of their gap
    rest = {"base-sln", "linear", "wide", "xl", "wide-local"}
    assert Counter(c.model.method for c in plan("4-rest")) == dict.fromkeys(rest, 3)
    assert "tensor-depth" in {c.model.method for c in plan("5-leak")}
    assert all(c.task.leak for c in plan("5-leak"))


def test_the_search_varies_all_that_was_asked_for():
    configs = plan("3-search")
    assert all(c.task.carried and c.budget.steps == 1200 for c in configs)
    local = [c.model for c in configs if c.model.method == "tensor-local"]
    assert {m.window for m in local} == {64, 128}
    assert {m.placement for m in local} == {"after_mlp", "after_attention"}
    assert len({m.memory_layers for m in local}) >= 4
    memories = [m.memory for m in local]
    assert {m.reads for m in memories} == {"chunk", "token"}
    assert {m.read_heads for m in memories} == {1, 4}
    assert {m.chunk_size for m in memories} == {1, 2, 4, 16}
    assert {m.state_values for m in memories} == {2 * 32 * 8**3}  # equal bytes
    assert len({(m.channels, m.grid) for m in memories}) == 4
    assert {m.forget_bias for m in memories} == {0, 1, 3, 5}
    assert {m.spread_bias for m in memories} == {1, -1, -1.5}
    assert {(m.forget_bias, m.gain) for m in memories if m.feedback == 0} == {(5, 4)}
    first = configs[:20]  # what a sweep cut short must have told
    assert {c.model.method for c in first} == {
        "base",
        "local",
        "tensor-local",
        "linear-local",
        "xl",
        "tensor-xl",
    }
    assert {c.model.memory.forget_bias for c in first} == {0, 1, 3, 5}
    assert any(
        (m.reads, m.read_heads, m.forget_bias) == ("token", 4, 3.0)
        for m in (c.model.memory for c in first)
    )
    others = {c.model.method for c in configs} - {"tensor-local"}
    rivals = {"linear-local", "conv-local", "xl", "recurrent-slots"}
    assert others == rivals | {"base", "local", "tensor-xl", "tensor"}
    turned = [c.model for c in configs if c.model.positions == "rotary"]
    assert {m.method for m in turned} >= {"base", "local", "tensor-local"}  # both ends of their gap
    above = [m for m in turned if m.memory.chunk_size == 1 and 0 not in (m.memory_layers or ())]
    assert {m.memory.feedback for m in above} == {1, 0}  # as published, and started for long gaps
    caches = [c.model.cache for c in configs if c.model.method == "xl" and c.model.window == 64]
    assert caches == [None, 0]  # what relative positions are worth without one
