"""Tables and captions of results: what stands in them and what they refuse."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invented_runs import BASE, TENSOR, SignTaskConfig, record, run, sign, sweep_records
from tensor_memory import MemoryConfig
from tensor_memory_lab.models.image import ImageModelConfig
from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.models.video import VideoModelConfig
from tensor_memory_lab.records import tables
from tensor_memory_lab.records.comparison import Row, compare, flatten
from tensor_memory_lab.records.paper import published
from tensor_memory_lab.records.report import write_report
from tensor_memory_lab.run_config import OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.binding import BindingConfig
from tensor_memory_lab.tasks.language import LanguageTaskConfig
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig
from tensor_memory_lab.tasks.video import VideoTaskConfig


def table(records: list[dict[str, Any]], **options: Any) -> list[dict[str, str]]:
    (comparison,) = compare(records)
    return tables.result_table(comparison, **options)


def test_a_row_is_the_mean_and_interval_over_its_seeds():
    records = [run(seed=seed, accuracy=a) for seed, a in enumerate((0.91, 0.94, 0.94))]
    (line,) = table(records)
    assert line["method"] == "base"
    assert line["seeds"] == "3"
    assert line["accuracy"] == "93.0 ± 4.3 %"  # 4.303 × 0.01732 / √3
    assert line["ceiling: accuracy"] == "100.0 %"
    assert (line["parameters"], line["state"], line["steps/s"]) == ("10", "2.0 KiB", "50")


def test_the_best_that_can_be_scored_is_a_floor_where_less_is_better():
    (line,) = table([run() | {"higher_is_better": False}])
    assert line["floor: accuracy"] == "100.0 %"
    assert "ceiling: accuracy" not in line


def test_one_seed_shows_no_interval_and_a_diverged_run_is_not_averaged_away():
    assert table([run(accuracy=0.5)])[0]["accuracy"] == "50.0 %"
    diverged = run(seed=1, test={"test": {"accuracy": None, "loss": None}})
    assert table([run(accuracy=0.5), diverged])[0]["accuracy"] == "diverged"


def test_methods_come_in_their_order_and_settings_by_number():
    tasks = [SignTaskConfig(numbers=count) for count in (10, 9, 2)]
    found = table([run(model, task=task) for task in tasks for model in (TENSOR, BASE)])
    rows = [(line["numbers"], line["method"]) for line in found]
    assert rows == list(itertools.product(("2", "9", "10"), ("base", "tensor")))


def test_timings_of_a_shared_device_are_left_out():
    records = [run(shared_device=True), run(seed=1, steps_per_second=70.0)]
    assert table(records)[0]["steps/s"] == "70"
    assert "steps/s" not in table(records[:1])[0]


def test_labels_and_early_stops_stand_in_the_notes():
    records = [run(labels={"non_causal": True, "cache": 7, "odd": False}, stopped_early=True)]
    assert table(records)[0]["notes"] == "non-causal, cache: 7, 1 of 1 stopped early"


def test_a_departure_of_one_method_is_part_of_its_name():
    small = replace(TENSOR, memory=MemoryConfig(channels=4, grid=(3, 3)))
    found = table([run(BASE), run(TENSOR), run(small)])
    assert [line["method"] for line in found] == ["base", "tensor", "tensor (grid=3×3)"]


def test_a_model_field_that_all_methods_share_the_values_of_is_a_setting():
    models = [replace(model, wide=wide) for model in (BASE, TENSOR) for wide in (False, True)]
    found = table([run(model) for model in models])
    rows = [(line["wide"], line["method"]) for line in found]
    assert rows == [("no", "base"), ("no", "tensor"), ("yes", "base"), ("yes", "tensor")]


def test_ablations_of_one_method_are_departures_each_of_its_own():
    other = [
        replace(TENSOR, memory=replace(TENSOR.memory, forget_bias=1.0)),
        replace(TENSOR, memory=replace(TENSOR.memory, write="nearest")),
    ]
    found = table([run(TENSOR), *(run(model) for model in other)])
    labels = ["tensor", "tensor (forget_bias=1)", "tensor (write=nearest)"]
    assert [line["method"] for line in found] == labels


def test_runs_of_different_budgets_are_refused_with_the_fields_named():
    long = replace(sign().budget, steps=4000)
    records = [run(), run(TENSOR, budget=long, optimizer=OptimizerConfig(lr=0.5))]
    complaint = r"sign: expected runs of one budget in a table, got optimizer\.lr 0\.1 and 0\.5; .*"
    with pytest.raises(ValueError, match=complaint + r"budget\.steps 4 and 4000; .*--split-budg"):
        compare(records)
    parts = compare(records, split_budgets=True)
    assert [len(part.rows) for part in parts] == [1, 1]
    assert "budget.steps=4000" in parts[1].title


def test_what_changes_no_number_does_not_part_budgets():
    budget = replace(sign().budget, checkpoint_every=1, accumulate=2, evaluation_batch_size=2)
    assert len(compare([run(), run(TENSOR, budget=budget)])) == 1


def test_where_the_data_lies_tells_no_runs_apart():
    records = [run(task=SignTaskConfig(data_dir=place), seed=i) for i, place in enumerate("ab")]
    assert len(table(records)) == 1


def test_a_seed_that_comes_twice_is_refused():
    budget = replace(sign().budget, accumulate=2)
    told = r"sign, base: expected one run per seed, got seeds 0 and 0, apart in budget.accumulate, "
    with pytest.raises(ValueError, match=told):
        compare([run(), run(budget=budget)])


def test_runs_of_two_metrics_under_one_recipe_are_refused():
    with pytest.raises(ValueError, match="expected runs of one metric, got accuracy and loss"):
        compare([run(), run(seed=1, metric="loss")])


def test_unfinished_runs_are_left_out_and_counted():
    (comparison,) = compare([run(), run(seed=1, finished=False, test={})])
    assert len(comparison.rows[0].records) == 1
    assert "1 unfinished run is left out" in tables.caption(comparison)
    assert compare([run(finished=False)]) == []


def test_a_field_added_since_a_run_was_written_has_its_default():
    old = run(seed=1)
    del old["config"]["model"]["wide"]
    assert len(table([run(), old])) == 1


def test_the_caption_says_seeds_hardware_commit_and_budget():
    records = [run(), run(seed=1, commit="fedcba9876543210", dirty=True), run(TENSOR)]
    (comparison,) = compare(records)
    assert tables.caption(comparison) == (
        "Seeds 0 and 1 (1 to 2 per row); mean ± half of the 95 % interval (Student t). "
        "Chance: 50.0 %. Hardware: a CPU. Commit: 0123456789 and fedcba9876 with changes. "
        "Budget: 4 steps of 8 rows, AdamW, rate 0.1 constant, weight decay 0.01."
    )


def test_a_measure_can_be_added_and_an_unknown_one_is_refused():
    assert table([run()], measures=["loss"])[0]["loss"] == "0.5000"
    with pytest.raises(ValueError, match="expected a measure among accuracy, loss, got 'los'"):
        table([run()], measures=["los"])


def binding(method: str, **task: Any) -> dict[str, Any]:
    model = ToyModelConfig(method=method)  # pyright: ignore[reportArgumentType]
    return record(RunConfig(recipe="binding", task=BindingConfig(**task), model=model))


def test_the_papers_number_stands_beside_ours_where_the_setting_is_the_same():
    ours = [binding("tensor", writes=20, noise=0.1), binding("linear", writes=20, noise=0.1)]
    with_paper, without = table(ours)[::-1]
    assert with_paper["paper: accuracy"] == "94.8 %"
    (comparison,) = compare(ours)
    note = "Paper's numbers: one seed, 2,000 steps of 128 rows at 3e-4."
    assert tables.caption(comparison).endswith(note)
    assert without["paper: accuracy"] == "–"
    assert table([binding("tensor", writes=100)])[0]["paper: accuracy"] == "75.0–91.0 %"
    assert "paper: accuracy" not in table([binding("tensor", writes=20, noise=0.05)])[0]


def test_the_papers_language_number_carries_its_note():
    config = replace(sign(), task=LanguageTaskConfig(), model=TENSOR)
    found = published(record(config), "test", "perplexity")
    assert found is not None
    assert found.value == 100.07
    assert "sees later tokens" in found.note
    carried = replace(config, task=LanguageTaskConfig(carried=True))
    assert published(record(carried), "test", "perplexity") is None


def test_notes_on_the_papers_numbers_name_their_methods_where_they_differ():
    runs = [
        record(replace(sign(), task=LanguageTaskConfig(), model=model))
        | {"metric": "perplexity", "test": {"test": {"perplexity": 100.0}}}
        for model in (BASE, TENSOR)
    ]
    (comparison,) = compare(runs)
    protocol = "without `<eos>`, 30,000 words, not annealed"  # without the ticks a page hides it
    told = f"{protocol} (base); {protocol}, and its memory sees later tokens (tensor)"
    assert f"Paper's numbers: {told}." in tables.caption(comparison)


def test_the_papers_vision_numbers_stand_beside_its_own_protocol_alone():
    birds = record(replace(sign(), task=MaskedImagesConfig(), model=ImageModelConfig("spatial")))
    found = published(birds, "test@75%", "published_psnr")
    assert found is not None
    assert found.value == 20.19
    assert published(birds, "test@75%", "psnr") is None
    video = {"": VideoTaskConfig(), "some": VideoTaskConfig(classes=("Archery",))}
    models = VideoModelConfig("joint")
    runs = {name: record(replace(sign(), task=t, model=models)) for name, t in video.items()}
    whole = published(runs[""], "test", "top5")
    assert whole is not None
    assert whole.value == 0.9322
    assert published(runs["some"], "test", "top5") is None


def test_what_a_memory_does_has_a_table_of_its_own():
    memory = {
        "layers": [{"name": "0", "gate": 0.5, "use": 0.1}, {"name": "1", "gate": 0.7, "use": 0.2}],
        "test_without_memory": {"test": {"accuracy": 0.25, "loss": 2.0}},
    }
    (comparison,) = compare([run(), run(TENSOR, memory=memory)])
    (line,) = tables.memory_table(comparison)
    assert line["σ(γ) per layer"] == "0.5, 0.7"
    assert line["‖σ(γ)m‖/‖x‖ per layer"] == "0.1, 0.2"
    assert line["accuracy without memory"] == "25.0 %"
    assert (line["loss"], line["loss without memory"]) == ("0.5000", "2.000")
    (plain,) = compare([run()])
    assert tables.memory_table(plain) == []


def test_a_memory_that_is_never_called_has_no_use():
    layers = [{"name": "0", "gate": 0.5, "use": 0.1}, {"name": "1", "gate": 0.7, "use": None}]
    memory = {"layers": layers, "test_without_memory": {}}
    (comparison,) = compare([run(TENSOR, memory=memory)])
    (line,) = tables.memory_table(comparison)
    assert line["‖σ(γ)m‖/‖x‖ per layer"] == "0.1, –"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 3))
def test_the_csv_has_every_number_the_table_is_made_of(accuracies, methods):
    models = [BASE, TENSOR, replace(TENSOR, wide=True)][:methods]
    (comparison,) = compare(
        [run(m, seed=s, accuracy=a) for m in models for s, a in enumerate(accuracies)]
    )
    rows = list(csv.DictReader(tables.csv_text(comparison).splitlines()))
    assert len(rows) == methods * 2  # accuracy and loss
    mean = sum(accuracies) / len(accuracies)
    assert float(rows[0]["mean"]) == pytest.approx(mean)
    assert rows[0]["runs"] == str(len(accuracies))


def test_the_csv_has_a_ceiling_for_the_metric_alone():
    (comparison,) = compare([run()])
    lines = csv.DictReader(tables.csv_text(comparison).splitlines())
    assert {line["measure"]: line["ceiling"] for line in lines} == {"accuracy": "1.0", "loss": ""}


def test_a_report_holds_tables_curves_and_sweeps(tmp_path):
    text = write_report(sweep_records(), tmp_path / "deep" / "report", title="Signs")
    folder = tmp_path / "deep" / "report"
    assert (folder / "report.md").read_text() == text
    assert text.startswith("# Signs\n")
    assert "| numbers | method | seeds | accuracy |" in text
    assert "![accuracy against steps, sign](sign-curves.png)" in text
    assert "![accuracy against numbers, sign](sign-numbers.png)" in text
    for name in ("sign-curves", "sign-numbers"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        drawn = (folder / f"{name}.svg").read_text()
        assert all(word in drawn for word in ("base", "tensor", "ceiling"))
    assert (folder / "sign.csv").is_file()


def test_the_same_results_make_the_same_files(tmp_path):
    for name in ("a", "b"):
        write_report(sweep_records(), tmp_path / name)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_what_goes_without_saying_is_what_most_methods_have_not_most_runs():
    memory = replace(TENSOR.memory, forget_bias=5.0, spread_bias=-1.0)
    departed = [run(replace(TENSOR, memory=memory), seed=seed) for seed in range(3)]
    told = "tensor (spread_bias=-1, forget_bias=5)"
    for others in ([BASE], [BASE, TENSOR], [TENSOR]):
        labels = [line["method"] for line in table([*map(run, others), *departed])]
        assert labels == [*(model.method for model in others), told]


def test_fields_of_one_name_keep_apart():
    names = ["task.dim", "model.dim", "task.method", "task.writes"]
    row = Row(tuple((name, 1) for name in names), "base", "", ())
    assert list(tables.setting_cells(row)) == ["task.dim", "model.dim", "task.method", "writes"]


def test_fields_of_lists_in_lists_can_be_compared():
    flat = flatten({"task": {"shape": [[1, 2], [3, [4]]]}})
    assert {flat["task.shape"]} == {((1, 2), (3, (4,)))}


@pytest.mark.parametrize("task", [{"values": 4}, {"queries": 1}])
def test_the_papers_number_stands_beside_the_papers_task_alone(task):
    assert published(binding("base", noise=0.1), "test", "accuracy") is not None
    assert published(binding("base", noise=0.1, **task), "test", "accuracy") is None
    narrow = binding("base", noise=0.1)
    narrow["config"]["model"]["dim"] = 16
    assert published(narrow, "test", "accuracy") is None


def test_a_report_of_nothing_finished_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="expected at least one finished run, got 1 unfinished"):
        write_report([run(finished=False)], tmp_path)
