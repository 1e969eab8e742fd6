"""The vision page: rows by method and variant, costs against T, places filled from records."""

from pathlib import Path

import pytest

from tensor_memory import MemoryConfig
from tensor_memory_lab.commands.grid import expand, read_plan
from tensor_memory_lab.models.image import ImageModelConfig
from tensor_memory_lab.models.video import VideoModelConfig
from tensor_memory_lab.recipes.images import cub
from tensor_memory_lab.recipes.video import ucf101_nine
from tensor_memory_lab.records.pages import fill
from tensor_memory_lab.records.paper import PUBLISHED
from tensor_memory_lab.records.records import config_dict, write_result
from tensor_memory_lab.records.rows import grouped
from tensor_memory_lab.records.vision_gains import gains
from tensor_memory_lab.records.vision_page import (
    NOT_RUN,
    action_gains,
    action_table,
    cost_table,
    main,
    missing_table,
    reconstruction_table,
)
from tensor_memory_lab.records.vision_runs import peak, planned_runs, rows
from vision_records import GIB, costs, image_record, record, video_record


def test_rows_are_named_by_what_departs_from_the_usual():
    runs = [image_record("spatial", 20.0, seed, model={"gate_init": 1.0}) for seed in (0, 1)]
    finer = {"scope": "depth", "gate_init": 1.0, "memory": MemoryConfig(channels=16, chunk_size=4)}
    runs.append(image_record("spatial", 20.1, model=finer))
    runs.append(image_record("base", 19.0, model={"gate_init": 1.0}))
    assert [(label, len(found)) for label, found in grouped(runs)] == [
        ("base", 1),
        ("spatial", 2),
        ("spatial (grid 8×8×8, K 4, scope depth)", 1),
    ]


def test_blocks_and_the_layers_with_a_memory_are_told_apart():
    runs = [
        video_record("spatial", 8, 0.5, seed, model={"memory_layers": (0, 2)} | model)
        for seed, model in enumerate(({}, {"layers": 4}))
    ]
    assert [(label, len(found)) for label, found in grouped(runs)] == [
        ("spatial", 1),  # the layers with a memory, which both share, go without saying
        ("spatial (blocks 4)", 1),
    ]
    assert [row.seeds for row in rows(runs)] == ["1", "1"]


def test_a_seed_twice_in_a_row_is_refused():
    with pytest.raises(ValueError, match="expected one run per seed, got seeds 1 and 1"):
        grouped([image_record("base", 19.0, seed=1), image_record("base", 19.5, seed=1)])


def test_runs_of_other_data_or_budgets_are_not_averaged():
    first, second = image_record("base", 20.0, 0), image_record("base", 22.0, 1)
    second["config"]["task"]["data_dir"] = "elsewhere.zip"  # the same data in another place
    assert len(grouped([first, second])) == 1
    second["config"]["task"]["side"] = 256
    second["config"]["budget"]["steps"] = 9
    with pytest.raises(ValueError, match=r"seed alone, got several .* task.side and budget.steps"):
        grouped([first, second])


def test_reconstruction_shows_what_knows_nothing_beside_the_methods():
    table = reconstruction_table([image_record("base", p, s) for s, p in enumerate((19, 20, 21))])
    assert [line["method"] for line in table] == [
        "base",
        "*mean of the visible pixels*",
        "*zero in every patch*",
    ]
    assert table[0]["PSNR 75%"] == "20.00 ± 2.48"  # t with 2 degrees of freedom, s = 1
    assert table[1]["PSNR 75%"] == "15.00"
    assert table[1]["published metric 25%"] == "16.20"
    assert table[2]["published metric 25%"] == "20.50"
    assert table[2]["PSNR 25%"] == "–"


def test_actions_are_listed_by_frames_and_with_the_memory_off():
    off = {"test_without_memory": {"test": {"accuracy": 0.3}}, "layers": []}
    runs = [
        video_record("spatial", 32, 0.6, memory=off, state_bytes=2**20),
        video_record("joint", 8, 0.5),
        video_record("joint", 32, 0.55),
    ]
    table = action_table(runs)
    assert [(line["T"], line["method"]) for line in table] == [
        ("8", "joint"),
        ("32", "joint"),
        ("32", "spatial"),
    ]
    assert table[2]["top-1"] == "60.0 %"
    assert table[2]["top-1, memory off"] == "30.0 %"
    assert table[2]["carried"] == "1.0 MiB"
    assert table[0]["top-1, memory off"] == "–"


def test_missing_frames_share_columns_by_their_part_of_the_clip():
    table = missing_table([video_record("joint", 8, 0.5), video_record("joint", 32, 0.6)])
    assert set(table[0]) == {
        "T",
        "method",
        "whole",
        *(f"{where}: {part} %" for where in ("somewhere", "at the end") for part in (25, 50)),
        "region=25%",
    }
    assert table[0]["somewhere: 50 %"] == "25.0 %"
    assert table[1]["at the end: 25 %"] == "47.5 %"


def test_growth_tells_linear_from_quadratic_and_ratios_are_to_frames():
    table = {line["method"]: line for line in cost_table(costs())}
    assert table["spatial"]["T = 8"] == "20.0 ms (2.0×), 1.0 GiB"
    assert table["joint"]["T = 64"] == "640.0 ms (8.0×), 64.0 GiB"
    assert table["spatial"]["growth of time"] == "T^1.00"
    assert table["joint"]["growth of time"] == "T^2.00"
    assert table["joint"]["growth of memory"] == "T^2.00"
    assert list(table["joint"])[-1] == "growth of memory"
    assert not any("growth" in name for name in cost_table(costs(), growths=False)[0])


def test_runs_that_shared_their_device_tell_no_time():
    shared = video_record("spatial", 16, 0.5, shared_device=True)
    assert cost_table([*costs(), shared]) == cost_table(costs())


def test_the_clips_that_lie_on_the_device_are_no_cost_of_a_method():
    assert peak(video_record("frames", 8, 0.5)) == 2 * GIB


PLAN = """
[[stage]]
recipes = ["any"]
set = { "budget.steps" = 2, "model.memory.chunk-size" = 4 }
[stage.over]
seed = [0, 1]
"task.frames" = [8, 32]
"model.method" = ["frames", "spatial"]
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "grids" / "vision-actions.toml"
    path.parent.mkdir()
    path.write_text(PLAN)
    return path


def test_what_is_planned_and_not_run_is_a_row(plan):
    memory = MemoryConfig(channels=64, grid=(8, 8, 8), chunk_size=4)
    runs = [video_record(m, 8, 0.5, model={"memory": memory}) for m in ("frames", "spatial")]
    runs.append(video_record("frames", 8, 0.6, seed=1, model={"memory": memory}))
    table = action_table(runs, planned_runs(plan, VideoModelConfig(), frames=8))
    shown = [(line["T"], line["method"], line["seeds"], line["top-1"]) for line in table]
    assert shown == [
        ("8", "frames", "2", "55.0 ± 63.5 %"),
        ("8", "spatial", "1 of 2", "50.0 %"),
        ("32", "frames", "0 of 2", NOT_RUN),
        ("32", "spatial", "0 of 2", NOT_RUN),
    ]
    del runs[0]["config"]["model"]["memory"]["forget_bias"]  # as if the field were younger
    assert action_table(runs, planned_runs(plan, VideoModelConfig(), frames=8)) == table
    costs = cost_table(runs, planned_runs(plan, VideoModelConfig(), frames=8))
    assert [line["T = 32"] for line in costs] == [NOT_RUN, NOT_RUN]
    assert [line["T = 8"] for line in costs] == ["10.0 ms (1.0×), 2.0 GiB"] * 2


def test_the_plans_of_the_page_name_the_runs_that_they_make():
    """A record of every planned run leaves nothing to be run."""
    grids = Path(__file__).parents[2] / "grids"
    for name, usual, frames, config in (
        ("vision-images-variants", ImageModelConfig(), None, cub()),
        ("vision-actions-variants", VideoModelConfig(), 8, ucf101_nine()),
    ):
        planned = planned_runs(grids / f"{name}.toml", usual, frames)
        made = [run.config for run in expand(read_plan(grids / f"{name}.toml"))]
        runs = [
            record(config, method=c.model.method, seed=c.seed, facts={"frames": frames})
            | {"config": config_dict(c)}
            for c in made
        ]
        found = rows([*runs, *planned])
        assert [row.seeds for row in found] == ["3"] * len(found)
        assert len(found) == len(made) / 3


def test_gains_are_paired_by_seed_and_bold_where_zero_is_left_out():
    psnr = {"base": (19.0, 21.0, 20.0), "wide": (20.5, 20.0, 21.5), "spatial": (19.1, 21.1, 20.11)}
    runs = [image_record(m, p, s) for m, values in psnr.items() for s, p in enumerate(values)]
    table = gains(runs, {"PSNR": ("test@75%", "psnr")})
    assert [(line["method"], line["against"], line["seeds"]) for line in table] == [
        ("spatial", "base", "3"),
        ("spatial", "wide", "3"),
    ]
    assert table[0]["PSNR"] == "**+0.10 ± 0.01**"  # 0.10, 0.10 and 0.11
    assert table[1]["PSNR"] == "-0.56 ± 3.58"  # -1.40, 1.10 and -1.39


def test_a_gain_of_nothing_is_not_bold_and_a_seed_alone_counts_for_nothing():
    runs = [image_record(m, 19.0 + s, s) for m in ("base", "spatial") for s in (0, 1)]
    runs += [image_record("spatial", 99.0, 2)]
    (line,) = gains(runs, {"PSNR": ("test@75%", "psnr"), "other": ("test@75%", "lpips")})
    assert (line["PSNR"], line["other"], line["seeds"]) == ("+0.00 ± 0.00", "–", "2")
    del runs[0]["test"]["test@75%"]["psnr"]
    assert gains(runs, {"PSNR": ("test@75%", "psnr")})[0]["PSNR"] == "–"


def test_variants_are_held_against_what_they_can_be_compared_with():
    runs = [
        video_record("frames", 8, 0.5),
        video_record("joint", 8, 0.5),
        video_record("frames", 8, 0.4, model={"readout": "last"}),
        video_record("spatial", 8, 0.5, model={"readout": "last"}),
        video_record("spatial", 8, 0.5, model={"scope": "depth"}),
        video_record("spatial", 8, 0.6, model={"readout": "last", "scope": "depth"}),
    ]
    table = gains(runs, {"top-1": ("test", "accuracy")})
    assert [(line["method"], line["against"], line["top-1"]) for line in table] == [
        ("spatial (readout last)", "frames (readout last)", "+10.0"),
        ("spatial (readout last, scope depth)", "frames (readout last)", "+20.0"),
        ("spatial (scope depth)", "frames", "+0.0"),
    ]


def test_the_page_says_where_the_memory_does_not_help():
    runs = [
        video_record(method, frames, accuracy + 0.01 * seed, seed)
        for method, accuracy in (("frames", 0.5), ("spatial", 0.4))
        for frames in (8, 32)
        for seed in (0, 1, 2)
    ]
    text = action_gains(runs)
    assert "the memory has more in 0, less in 8, and in 0 no difference is shown." in text
    assert "| 32 | spatial | frames | 3 | **-10.0 ± 0.0** |" in text
    assert action_gains([run for run in runs if run["method"] == "frames"]) == ""
    for run in runs:  # where no clip of 8 was tested with half of its frames
        if run["facts"]["frames"] == 8:
            run["test"] = {name: run["test"][name] for name in ("test", "test@region=25%")}
    text = action_gains(runs)
    assert "the memory has more in 0, less in 6, and in 0 no difference is shown." in text
    assert "| 8 | spatial | frames | 3 | **-10.0 ± 0.0** | **-10.0 ± 0.0** | – |" in text


PAGE = "".join(
    f"text\n<!-- {name} -->\nstale\n<!-- /{name} -->\n"
    for name in ("findings", "reconstruction", "actions", "missing", "cost", "cost-published")
)


def test_the_command_fills_the_page_from_results(tmp_path, capsys):
    results, page = tmp_path / "results", tmp_path / "docs" / "vision.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    write_result(results / "images", image_record("base", 20.0))
    (results / "images" / "reconstructions.png").write_bytes(b"birds")
    for run in costs():
        write_result(results / "cost", run)
        write_result(results / "video", run)
        write_result(results / "cost-published", run)
    assert main([str(results), str(page)]) == 0
    filled = page.read_text()
    assert "stale" not in filled
    assert "| *zero in every patch* |" in filled
    assert "(images/vision-cost.png)" in filled
    assert "cub200@120px; seed 0; H200; commit 0123456789." in filled
    assert "**Cost: linear in T" in filled
    assert "(images/vision-reconstructions.png)" in filled
    assert (page.parent / "images" / "vision-reconstructions.png").read_bytes() == b"birds"
    assert (page.parent / "images" / "vision-missing.svg").stat().st_size > 10_000
    assert (page.parent / "images" / "vision-cost.png").stat().st_size > 10_000
    assert (
        "filled reconstruction, actions, missing, cost, cost-published and findings"
        in capsys.readouterr().out
    )
    main([str(results), str(page)])
    assert page.read_text() == filled


def test_costs_of_runs_that_all_shared_their_device_leave_the_page_as_it_was(tmp_path):
    results, page = tmp_path / "results", tmp_path / "vision.md"
    page.write_text(PAGE)
    for run in costs():
        write_result(results / "cost", run | {"shared_device": True})
        write_result(results / "cost-published", run | {"shared_device": True})
    assert main([str(results), str(page)]) == 0
    assert page.read_text() == PAGE


def test_what_has_no_records_stays_as_it_was(tmp_path):
    results, page = tmp_path / "results", tmp_path / "vision.md"
    page.write_text(PAGE)
    write_result(results / "images", image_record("base", 20.0))
    main([str(results), str(page)])
    assert page.read_text().count("stale") == 5


def test_the_vision_page_has_every_place():
    page = (Path(__file__).parents[2] / "docs" / "vision.md").read_text()
    names = ("findings", "reconstruction", "actions", "missing", "cost", "cost-published")
    filled = fill(page, {name: f"table of {name}" for name in names})
    assert all(f"table of {name}\n" in filled for name in names)


def test_the_page_quotes_what_the_paper_reports():
    text = " ".join((Path(__file__).parents[2] / "docs" / "vision.md").read_text().split())
    found: dict[tuple[str, str], list[float]] = {}
    for entry in PUBLISHED:
        found.setdefault((entry.method, entry.measure), []).append(entry.value)
    for method in ("spatial", "base"):
        values = [f"{value:.2f}" for value in found[method, "published_psnr"]]
        assert f"{values[0]}, {values[1]} and {values[2]}" in text
    for method in ("spatial", "joint", "registers"):
        assert f"{100 * found[method, 'accuracy'][0]:.2f} %" in text


def test_a_page_without_the_place_is_refused():
    with pytest.raises(ValueError, match="expected <!-- cost --> and <!-- /cost -->"):
        fill("nothing", {"cost": "table"})
