"""Numbers that README and docs quote of images, video and the leak are those of their records."""

from quoted import ROOT, records_of, words_of
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.rows import grouped
from tensor_memory_lab.records.wording import estimate_text


def test_what_the_readme_says_of_images_and_video_was_measured():
    text = words_of("README.md")
    birds = records_of("vision", "images")
    clips = records_of("vision", "video")
    short = [run for run in clips if run["facts"]["frames"] == 8]

    def shown(records, method, split, measure):
        runs = dict(grouped(records))[method]  # less its variants
        return estimate_text(estimate([run["test"][split][measure] for run in runs]), measure)

    spatial, base = (shown(birds, method, "test@75%", "psnr") for method in ("spatial", "base"))
    assert f"{spatial} dB with the memory, {base} without" in text
    spatial, frames, joint = (
        shown(short, method, "test", "accuracy") for method in ("spatial", "frames", "joint")
    )
    assert f"{spatial} with the memory, {frames} frame by frame" in text
    assert f"{joint} with attention over all frames" in text
    long = [run for run in clips if run["facts"]["frames"] == 64]
    spatial, frames, joint = (
        shown(long, method, "test", "accuracy").removesuffix(" %")
        for method in ("spatial", "frames", "joint")
    )
    assert f"with 64 frames {spatial}, {frames} and {joint} %" in text


def test_what_the_readme_says_of_the_leak_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    records = records_of("leak-demo")
    scores = {
        method: estimate([r["test"]["test"]["score"] for r in records if r["method"] == method])
        for method in ("tensor", "base", "tensor-depth")
    }
    leaking = scores["tensor-depth"]
    assert f"{leaking.mean:.2f} ± {leaking.half_width:.2f}" in text
    assert {f"{scores[method].mean:.2f}" for method in ("base", "tensor")} == {"6.00"}
    assert "causal models score 6.00" in text


def test_what_is_said_of_the_leak_in_real_text_was_measured():
    readme, page = words_of("README.md"), words_of("docs/leak.md")
    runs = {run["method"]: run for run in records_of("language", "leak")}
    (window, prefix), (honest, cut) = (
        [run["test"][split]["score"] for split in ("test@window", "test@prefix")]
        for run in (runs["tensor-depth"], runs["tensor"])
    )
    assert f"{honest - window:.2f} better than the causal one" in page
    assert f"it is {prefix - cut:.2f} worse" in page
    assert f"rises by {100 * (prefix / window - 1):.1f} %" in page
    assert abs(cut - honest) < 0.02
    assert f"{window:.2f} with the future and {prefix:.2f} without" in readme
    assert f"the causal memory {honest:.2f} and {cut:.2f}" in readme
