"""Differences between methods are taken seed by seed."""

from dataclasses import replace

from invented_runs import LinearConfig, SignTaskConfig, record, sign
from tensor_memory_lab.records.comparison import compare
from tensor_memory_lab.records.paired import paired_table


def runs(method, accuracies, *, model=None, **changes):
    """Records of seeds 0, 1, … with these accuracies; None leaves a seed out."""
    config = replace(sign(), model=model or LinearConfig(method=method), **changes)
    return [
        record(replace(config, seed=seed), accuracy=accuracy)
        for seed, accuracy in enumerate(accuracies)
        if accuracy is not None
    ]


def table(*records):
    (comparison,) = compare([record for some in records for record in some])
    return paired_table(comparison)


def test_seeds_that_differ_much_can_show_a_difference_that_does_not():
    # Means of 0.6 and 0.64, each ± 0.5; the differences are 0.03, 0.05 and 0.04.
    (line,) = table(runs("base", (0.4, 0.6, 0.8)), runs("tensor", (0.43, 0.65, 0.84)))
    assert line == {"method": "tensor", "less base": "**+4.0 ± 2.5**"}  # 4.303 × 0.01 / √3


def test_only_seeds_of_both_count_and_one_shows_nothing():
    memory = runs("tensor", (0.5, 0.6, 0.7, 0.9))
    (line,) = table(runs("base", (None, 0.7, 0.7)), runs("wide", (None, None, 0.9)), memory)
    assert line == {"method": "tensor", "less base": "-5.0 ± 63.5"}  # 12.706 × 0.0707 / √2
    assert table(runs("base", (0.5,)), runs("tensor", (0.6,))) == []
    assert table(runs("base", (0.5, 0.5))) == []


def test_methods_are_compared_under_the_same_setting():
    tasks = [SignTaskConfig(numbers=count) for count in (2, 3)]
    found = table(
        runs("base", (0.5, 0.5), task=tasks[0]),
        runs("tensor", (0.6, 0.6), task=tasks[0]),
        runs("base", (0.9, 0.9), task=tasks[1]),
        runs("tensor", (0.6, 0.6), task=tasks[1]),
    )
    assert [line["numbers"] for line in found] == ["2", "3"]
    assert [line["less base"] for line in found] == ["**+10.0 ± 0.0**", "**-30.0 ± 0.0**"]


def test_a_variant_of_the_memory_stands_beside_the_memory_itself():
    usual = LinearConfig(method="tensor")
    variant = replace(usual, memory=replace(usual.memory, forget_bias=3.0))
    plain, changed = table(
        runs("base", (0.5, 0.6)),
        runs("tensor", (0.6, 0.7)),
        runs("tensor", (0.9, 1.0), model=variant),
    )
    assert plain == {"method": "tensor", "less base": "**+10.0 ± 0.0**", "less tensor": "–"}
    assert changed["method"] == "tensor (forget_bias=3)"
    assert (changed["less base"], changed["less tensor"]) == ("**+40.0 ± 0.0**", "**+30.0 ± 0.0**")


def test_a_run_that_diverged_is_not_left_out():
    diverged = {"test": {"test": {"accuracy": None, "loss": None}}}
    memory = [run | diverged for run in runs("tensor", (0.6, 0.6))]
    assert table(runs("base", (0.5, 0.5)), memory)[0]["less base"] == "diverged"
