"""Images per second and core: decoding and preparing them, or reading prepared pixels from the cache.

Every path goes from JPEG files of 640 x 480 pixels to the `pixel_values` of a batch, in turn in one process.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_captionrl.captioners import Captioner
from hf_captionrl.data import DecodedPixels, cached_pixels, open_image
from hf_captionrl.data.columns import undecoded
from scripts.benchmarks.shapes_file import measure_each
from scripts.benchmarks.spread import summary, to_cell
from tests.data.sample_photo import photographs

TARGETS = {"torchvision": 1.8, "cache": 15.0}
"""How many times as fast as Pillow the paths have to be."""

PATHS = {
    "pillow": "Pillow's decoder and processor",
    "default": "Pillow's decoder, torchvision's processor",
    "torchvision": "`image_decoder=torchvision`",
    "cache": "`cache_pixels=uint8`",
    "jpeg": "`cache_pixels=jpeg`",
}
_BATCH = 16


class ImageInputs(Captioner):
    """The part of a captioner that reads images."""

    max_text_tokens = 0

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor


def paths(folder: Path, side: int) -> tuple[dict[str, Callable[[], Tensor]], dict[str, int]]:
    """The paths to a batch `(B, 3, side, side)`, and the bytes that an image takes on disk."""
    dataset = photographs(folder / "images", _BATCH)
    files = undecoded(dataset)["image"][:]
    settings = {"size": {"height": side, "width": side}}
    plain = ImageInputs(transformers.BlipImageProcessorPil(**settings))
    ours = ImageInputs(transformers.BlipImageProcessor(**settings))
    stored: dict[str, Any] = {
        "torchvision": DecodedPixels(dataset, ours.prepared_pixels),
        "cache": cached_pixels(dataset, ours.prepared_pixels, directory=folder / "cache", progress=False),
        "jpeg": cached_pixels(dataset, ours.prepared_pixels, form="jpeg", directory=folder / "cache", progress=False),
    }

    def opened(captioner: ImageInputs) -> Callable[[], Tensor]:
        return lambda: captioner.encode_images([open_image(file) for file in files])["pixel_values"]

    def read(pixels: Any) -> Callable[[], Tensor]:
        return lambda: ours.encode_pixels([pixels[i] for i in range(_BATCH)])["pixel_values"]

    found = {"pillow": opened(plain), "default": opened(ours), **{name: read(rows) for name, rows in stored.items()}}
    size = {"pillow": sum(Path(file["path"]).stat().st_size for file in files) // _BATCH}
    size |= {name: stored[name].rows[0].nbytes for name in ("cache", "jpeg")}
    return found, size


def differences(batches: dict[str, Tensor], processor: Any) -> dict[str, dict[str, float]]:
    """Largest and mean difference of each path's pixels from those of "default", of 255."""
    scale = 255 * torch.tensor(processor.image_std).view(3, 1, 1)
    apart = {name: ((batch - batches["default"]) * scale).abs() for name, batch in batches.items()}
    return {name: {"largest": float(found.max()), "mean": float(found.mean())} for name, found in apart.items()}


def measure(side: int, *, rounds: int) -> dict[str, Any]:
    """Time all paths in turn."""
    with tempfile.TemporaryDirectory() as folder:
        calls, size = paths(Path(folder), side)
        batches = {name: call() for name, call in calls.items()}
        for name in ("torchvision", "cache"):
            if not torch.equal(batches[name], batches["default"]):
                raise RuntimeError(f"The pixels of {name!r} are not those of the image processor.")
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):  # the first round is not counted
            for name in sorted(calls, reverse=bool(turn % 2)):
                start = time.process_time()
                calls[name]()
                if turn:
                    taken[name].append((time.process_time() - start) / _BATCH)
    ratios = {
        f"over_{base}": {
            name: summary([b / a for b, a in zip(taken[base], values, strict=True)]) for name, values in taken.items()
        }
        for base in ("pillow", "default")
    }
    milliseconds = {name: 1000 * summary(values)["median"] for name, values in taken.items()}
    apart = differences(batches, transformers.BlipImageProcessor())
    return {"milliseconds": milliseconds, **ratios, "bytes": size, "differences": apart}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 384], help="Input sizes of vision towers.")
    parser.add_argument("--rounds", type=int, default=9, help="Batches of 16 images on each path.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the paths on one thread."""
    return measure_each("sides", args.sides, lambda each: measure(each, rounds=args.rounds), args)


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    lines = [
        "## `loader`: images per second",
        "",
        "`python scripts/benchmark.py loader`: from JPEG files of 640 x 480 pixels to the `pixel_values` of a batch of 16, with BLIP's image",
        "processor. Ratios of CPU-seconds within a round: median [quartiles]. transformers loads torchvision's processor unless told otherwise.",
        "",
        "| size | path | images per CPU-second | ms per image | over Pillow | at least | over Pillow's decoder, torchvision's processor | KB per image | "
        "pixels differ by, mean (largest) of 255 |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for side, found in result["sides"].items():
        for name, title in PATHS.items():
            ms, apart = found["milliseconds"][name], found["differences"][name]
            cells = [
                side,
                title,
                f"{1000 / ms:,.0f}",
                f"{ms:.2f}",
                "" if name == "pillow" else to_cell(found["over_pillow"][name]),
                f"{TARGETS[name]:g}" if name in TARGETS else "",
                "" if name in ("pillow", "default") else to_cell(found["over_default"][name]),
                f"{found['bytes'][name] / 1000:.0f}" if name in found["bytes"] else "",
                f"{apart['mean']:.3f} ({apart['largest']:.0f})" if apart["largest"] else "0",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    versions = result["versions"]
    lines += [
        "",
        f"{result['processor']}, 1 thread, torch {versions['torch']}, transformers {versions['transformers']}; {result['rounds']} rounds. "
        "The files and the cache were in memory. The images are crops of one public-domain photograph, scaled to 640 pixels.",
    ]
    return "\n".join(lines)
