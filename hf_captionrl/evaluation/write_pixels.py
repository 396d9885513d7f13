"""`captionrl pixels`: images as a vision tower reads them, in Parquet shards and in the pixel cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.engine import read_manifest
from hf_captionrl.evaluation.cached_rows import CachedRowsOptions, fill_cache, keys_and_cached, print_summary
from hf_captionrl.evaluation.dataset_options import DatasetOptions, LoadedSplit, cache_dir_option, source_settings
from hf_captionrl.evaluation.image_stage import ImageStage, run_on_images
from hf_captionrl.options import option, positive

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.data import ImageReader

__all__ = ["PixelStage", "PixelsOptions", "write_pixels"]

_ROWS_AT_ONCE = 64


@dataclass
class PixelsOptions(CachedRowsOptions, DatasetOptions):
    """Prepare every image for a captioner once: in processes of this machine, or on a Ray cluster.

    The output is a folder of Parquet shards with a manifest: image_id, key (of the image in the pixel cache) and pixels,
    before they are normalised. The pixels are then put into the pixel cache of this machine: training with `cache_pixels`
    reads them by memory map and opens no image.

    Images whose pixels are in the cache are not opened. The same command skips finished shards. On another machine that
    shares the folder, it only fills the cache.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl pixels --model scenes:blip-mle --dataset scenes --output pixels
          captionrl pixels --model Salesforce/blip-image-captioning-base --dataset OWNER/NAME --split train --form jpeg \\
              --processes 8
          captionrl pixels --model MODEL --dataset OWNER/NAME --split train --output /shared/pixels --engine ray --address auto
    """

    model: str = option(metavar="NAME", help="captioner to train: a folder, a name on the Hub, or scenes:blip-mle")
    revision: str | None = option(None, metavar="REV", help="branch, tag or commit of the captioner on the Hub")
    form: Literal["uint8", "jpeg"] = option(
        "uint8", help="exact pixels, or JPEGs in about a tenth of the space; the value of cache_pixels in training"
    )
    output: Path = option(Path("pixels"), metavar="DIR", help="folder of the shards")
    batch_size: int = option(8, parse=positive, metavar="N", help="images per batch; a shard holds 64 batches")
    cache_dir: str | None = cache_dir_option()


class PixelStage(ImageStage):
    """Pixels of shards: `key` and `pixels`, the bytes of a row of the pixel cache."""

    options: PixelsOptions
    needs_gpu = False

    @property
    def rows_at_once(self) -> int:
        """Enough for the threads of a large machine; each image is prepared on its own."""
        return max(self.options.batch_size, _ROWS_AT_ONCE)

    def load_model(self, split: LoadedSplit) -> ImageReader:
        from hf_captionrl.captioners import load_captioner
        from hf_captionrl.data import ImageReader
        from hf_captionrl.data.pixel_cache import pixel_rows, refuse_videos, row_reader
        from hf_captionrl.data.source_keys import file_hashes

        refuse_videos(split.dataset)
        captioner = load_captioner(self.options.model, revision=self.options.revision, dtype="float32")
        self._processor = captioner.prepared_pixels
        self._pixels = row_reader(self._processor, self.options.form)
        self._cache = pixel_rows(self._processor.signature, self.options.form, self.options.cache_dir)
        self._hashes = file_hashes(self.options.cache_dir)
        return ImageReader(split.dataset, split=split.split, max_bad_fraction=self.options.max_bad_fraction)

    def made_by(self) -> dict[str, Any]:
        shape = self._processor.shape if self.options.form == "uint8" else [-1]
        return {"processor": self._processor.signature, "shape": list(shape)}

    def columns(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"key": pa.string(), "pixels": pa.binary()}

    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        import numpy as np

        from hf_captionrl.data.source_keys import in_threads

        keys, cached = keys_and_cached(self.reader, self._cache, self._hashes, rows)
        new = self.reader.read_all([row for row in keys if row not in cached], in_threads(self._pixels))
        return {
            row: {"key": keys[row], "pixels": np.asarray(pixels).tobytes()}
            for row, pixels in {**cached, **new}.items()
        }


def _fill_cache(arguments: PixelsOptions) -> int:
    """Put the pixels into the cache that `cached_pixels` reads; returns the number of rows that were new."""
    from hf_captionrl.data.pixel_cache import pixel_rows

    made_by = read_manifest(arguments.output)["made_by"]
    cache = pixel_rows(made_by["processor"], arguments.form, arguments.cache_dir)
    return fill_cache(cache, arguments.output, "pixels", made_by["shape"])


def write_pixels(arguments: PixelsOptions) -> None:
    """Write the pixels."""
    arguments.check_engine()
    settings = {"model": arguments.model, "revision": arguments.revision, "form": arguments.form}
    summary = run_on_images(
        arguments,
        arguments.output,
        lambda: source_settings(arguments) | settings,
        lambda ids: PixelStage(arguments, ids),
    )
    if arguments.fill_cache and summary["finished"]:
        summary["cached"] = _fill_cache(arguments)
    print_summary(arguments, summary, "pixels")
