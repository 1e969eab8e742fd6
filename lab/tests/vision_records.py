"""Records of vision runs that were never run, for tests of what is said of them."""

from dataclasses import replace

from tensor_memory_lab.recipes.images import cub
from tensor_memory_lab.recipes.video import ucf101_nine
from tensor_memory_lab.records.records import config_dict

GIB = 2**30


def record(config, *, method, seed=0, model=None, **values):
    plain = config_dict(replace(config, model=replace(config.model, method=method, **model or {})))
    plain["seed"] = seed
    return {
        "kind": "run",
        "recipe": config.recipe,
        "config": plain,
        "method": method,
        "seed": seed,
        "labels": {},
        "parameters": 5_014_373,
        "state_bytes": 0,
        "shared_device": False,
        "step_ms": 10.0,
        "peak_memory_bytes": 3 * GIB,
        "metric": "accuracy",
        "curve": [],
        "ceiling": {},
        "memory": None,
        "finished": True,
        "hardware": {"gpu": "H200", "cpu": "x"},
        "commit": "0123456789abcdef",
    } | values


def image_record(method, psnr, seed=0, **values):
    test = {}
    for ratio in (25, 75):
        measures = {"psnr": psnr, "ssim": 0.5, "published_psnr": 21.0, "published_psnr_zero": 20.5}
        measures |= {"psnr_mean_of_visible": 15.0, "ssim_mean_of_visible": 0.38}
        test[f"test@{ratio}%"] = measures | {"published_psnr_mean_of_visible": 16.2}
    return record(
        cub(),
        method=method,
        seed=seed,
        task="cub200@120px",
        metric="psnr",
        test=test,
        facts={},
        **values,
    )


def video_record(method, frames, accuracy, seed=0, **values):
    config = ucf101_nine()
    test = {"test": {"accuracy": accuracy, "top5": 0.9}}
    for k in (frames // 4, frames // 2):
        for kind in ("missing", "last"):
            test[f"test@{kind}={k}"] = {"accuracy": accuracy - k / frames / 2, "top5": 0.8}
    test["test@region=25%"] = {"accuracy": accuracy - 0.1, "top5": 0.8}
    made = record(
        config,
        method=method,
        seed=seed,
        task=f"ucf101-9@128x96 T={frames}",
        test=test,
        facts={"frames": frames, "chance": 1 / 9, "resident_bytes": GIB},
        **values,
    )
    made["config"]["task"]["frames"] = frames
    return made


def costs():
    runs = []
    for frames in (8, 32, 64):
        linear, square = frames / 8, (frames / 8) ** 2
        times = {"frames": 10 * linear, "spatial": 20 * linear, "joint": 10 * square}
        for method, ms in times.items():
            peak_bytes = int(GIB * (1 + (square if method == "joint" else linear)))
            runs.append(video_record(method, frames, 0.5, step_ms=ms, peak_memory_bytes=peak_bytes))
    return runs
