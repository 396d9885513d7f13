"""`captionrl caption`: caption a folder or data set, one line per image, and continue an interrupted run."""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.cli.features import ImageStage
from hf_captionrl.data.options import CaptionerOptions, DatasetOptions, LoadedSplit, load_split, source_settings
from hf_captionrl.utils.options import EngineOptions, option, positive
from hf_captionrl.utils.parts import refuse_other_settings, seed_of_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.captioners.pipeline import CaptionPipeline
    from hf_captionrl.data import ImageReader
    from hf_captionrl.evaluation.caption_files import CaptionWriter
    from hf_captionrl.retrieval import Scorer


# --- Options of `captionrl caption` ----------------------------------------------------------------------------------


@dataclass
class CaptionOptions(EngineOptions, CaptionerOptions, DatasetOptions):
    """Caption every image of a folder or data set. The data need no captions.

    Each line of the output is {"image_id", "caption"}, plus "captions" if --num_return_sequences asks for several. Images
    that cannot be read are counted, and listed in NAME.quarantine.jsonl. Each batch is on disk as soon as it is written:
    after a crash or `kill -9` the same command resumes. NAME.run.json keeps the settings; a file is never resumed with
    other settings.

    With --processes or --engine the output is a folder of Parquet shards, which the other commands read like a file.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
          captionrl caption Salesforce/blip-image-captioning-base --dataset imagefolder --data_dir photos
          captionrl caption outputs/smile_blip/model --dataset dataset_coco.json --image_root coco --num_beams 3

        five captions per image, for the diversity suite (`captionrl evaluate --suite sle`):
          captionrl caption MODEL --num_return_sequences 5 --do_sample          random samples, "rs" in the paper
          captionrl caption MODEL --num_return_sequences 5 --num_beams 5        the five best of a beam, "bs"

        on all GPUs of this machine, and on a Ray cluster:
          captionrl caption MODEL --dataset OWNER/NAME --split train --output captions --processes 8
          captionrl caption MODEL --dataset OWNER/NAME --split train --output /shared/captions --engine ray --address auto
    """

    model: str = option(
        positional=True, metavar="MODEL", help="captioner: a folder, a name on the Hub, or scenes:blip-mle"
    )
    output: Path | None = option(
        None,
        metavar="FILE",
        help="file to write, or to resume; a folder with --processes or --engine (default: captions.jsonl, or captions)",
    )
    overwrite: bool = option(False, help="start again even if the file exists")
    batch_size: int = option(16, parse=positive, metavar="N", group="captioner", help="images captioned at once")
    attn_implementation: str | None = option(
        None,
        metavar="NAME",
        group="captioner",
        help="implementation of attention: 'sdpa', 'eager', 'flash_attention_2', ... (default: transformers')",
    )
    load_in_4bit: bool = option(
        False, group="captioner", help="quantize the weights to 4 bits; needs bitsandbytes and a GPU"
    )
    load_in_8bit: bool = option(
        False, group="captioner", help="quantize the weights to 8 bits; needs bitsandbytes and a GPU"
    )
    compile_decoding: bool = option(
        False,
        group="decoding",
        help="compile the decoding step with torch.compile; needs greedy or sampled captions (--num_beams 1)",
    )
    cache_implementation: Literal["dynamic", "static"] | None = option(
        None,
        group="decoding",
        help="cache of keys and values; transformers compiles the decoding step of a static cache on a GPU",
    )
    num_beams: int | None = option(
        None, parse=positive, metavar="N", group="decoding", help="number of beams (default: 3, or 1 with --do_sample)"
    )
    max_new_tokens: int = option(40, parse=positive, metavar="N", group="decoding", help="longest caption in tokens")
    num_return_sequences: int = option(
        1, parse=positive, metavar="N", group="decoding", help="number of captions per image"
    )
    rerank: str | None = option(
        None,
        metavar="SCORER",
        group="decoding",
        help="write only the caption most similar to its image, by this scorer: a folder, a name on the Hub, scenes:clip-reward; "
        "needs --num_return_sequences above 1, as in the authors' code of SLE (100 samples)",
    )
    length_penalty: float = option(
        1.0,
        metavar="X",
        group="decoding",
        help="exponent of the length that divides a beam's score; above 0: longer captions",
    )
    repetition_penalty: float = option(1.0, metavar="X", group="decoding", help="penalty on repeated tokens; 1: none")
    do_sample: bool = option(False, group="decoding", help="sample captions from the whole distribution")
    temperature: float = option(1.0, metavar="X", group="decoding", help="temperature of sampling")
    top_p: float = option(
        1.0,
        metavar="X",
        group="decoding",
        help="nucleus sampling: smallest probability mass that is kept; 1: all tokens",
    )
    top_k: int = option(0, metavar="N", group="decoding", help="sample only from this many tokens; 0: all tokens")
    seed: int = option(0, metavar="N", group="decoding", help="seed of sampling")

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_captioner` that were set."""
        names = ("attn_implementation", "load_in_4bit", "load_in_8bit")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


# --- Captions of the rows of a data set, batch by batch: for one file of lines, and for Parquet shards ---------------


class BatchCaptioner:
    """A loaded captioner and the images of a split; captions them batch by batch."""

    def __init__(
        self,
        options: CaptionOptions,
        decoding: dict[str, Any],
        split: LoadedSplit,
        pipeline: CaptionPipeline,
        reader: ImageReader,
        scorer: Scorer | None,
    ) -> None:
        from hf_captionrl.data import frames_of

        self.options, self.decoding, self.dataset = options, decoding, split.dataset
        self.pipeline, self.reader, self.scorer = pipeline, reader, scorer
        self.has_videos = bool(frames_of(split.dataset))

    def batches(self, rows: range, done: set[str]) -> Iterator[tuple[list[int], list[int]]]:
        """Rows to caption together, and those of them whose captions are missing.

        Batches start at fixed rows of the data set. Samples depend on the whole batch, so an incomplete batch is sampled
        again as a whole: a resumed output equals that of an uninterrupted run.
        """
        size, ids = self.options.batch_size, self.reader.ids
        for start in range(rows.start, rows.stop, size):
            batch = range(start, min(start + size, rows.stop))
            names = ids[batch.start : batch.stop]
            wanted = [row for row, name in zip(batch, names, strict=True) if name not in done]
            if wanted:
                yield (list(batch) if self.options.do_sample else wanted), wanted

    def __call__(self, rows: Sequence[int]) -> dict[int, list[str]]:
        """Captions of the rows of one batch, without those that cannot be read."""
        import torch

        images: dict[int, Any] = dict.fromkeys(rows) if self.has_videos else self.reader.open_all(rows)
        good = list(images)
        if not good:
            return {}
        if self.options.do_sample:
            torch.manual_seed(seed_of_batch(self.options.seed, self.reader.ids[rows[0]]))
        # No variable holds the list, so the images are freed before the next batch is opened.
        if self.scorer is None:
            texts = self._generate([images.pop(row) for row in good], good)
        else:
            texts = self._generate([images[row] for row in good], good)
            texts = _reranked(self.scorer, [images.pop(row) for row in good], texts)
        return dict(zip(good, texts, strict=True))

    def _generate(self, images: list[Any], rows: list[int]) -> list[list[str]]:
        from hf_captionrl.captioners.head_tap import evaluating

        number = self.decoding["num_return_sequences"]
        if self.has_videos:
            found = self.pipeline(self.dataset.select(rows), batch_size=len(rows), **self.decoding)
            return found if number > 1 else [[text] for text in found]
        captioner = self.pipeline.captioner
        with evaluating(captioner.model):
            texts = captioner.generate(**captioner.encode_images(images), **self.decoding).captions
        return [texts[start : start + number] for start in range(0, len(texts), number)]


def _reranked(scorer: Scorer, images: Sequence[Any], texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """The caption of each image that is most similar to it; the first of equal ones."""
    from hf_captionrl.metrics.suites import spoken

    features = scorer.image_features(list(images))
    best = []
    for image, group in zip(features, texts, strict=True):
        similarity = scorer.text_features(spoken(group)) @ image
        best.append([group[int(similarity.argmax())]])
    return best


def load_batch_captioner(
    options: CaptionOptions, decoding: dict[str, Any], split: LoadedSplit, quarantine_path: Any = None
) -> BatchCaptioner:
    """Load the captioner, the scorer of `--rerank`, and a reader of the images."""
    import torch

    from hf_captionrl.captioners.pipeline import pipeline
    from hf_captionrl.data import ImageReader, frames_of
    from hf_captionrl.evaluation.options import optional_scorer

    scorer = None
    if options.rerank is not None:
        if frames_of(split.dataset):
            raise ValueError("--rerank is for images, but the data are videos. Leave it out.")
        scorer = optional_scorer(options.rerank)
    loaded = pipeline(
        options.model,
        revision=options.revision,
        prompt=options.prompt,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        model_kwargs=options.loading,
    )
    reader = ImageReader(
        split.dataset,
        split=split.split,
        quarantine_path=quarantine_path,
        max_bad_fraction=options.max_bad_fraction,
    )
    return BatchCaptioner(options, decoding, split, loaded, reader, scorer)


class CaptionStage(ImageStage):
    """Captions of shards, in the column `captions`."""

    def __init__(self, options: CaptionOptions, decoding: dict[str, Any], ids: str) -> None:
        super().__init__(options, ids)
        self.decoding = decoding

    def load_model(self, split: LoadedSplit) -> ImageReader:
        self._captioner = load_batch_captioner(self.options, self.decoding, split)
        return self._captioner.reader

    def made_by(self) -> dict[str, Any]:
        from hf_captionrl.retrieval import model_fingerprint

        captioner = self._captioner.pipeline.captioner
        return {"weights": model_fingerprint(captioner.base_model), "prompt": captioner.prompt}

    def columns(self) -> dict[str, pa.DataType]:
        import pyarrow as pa

        return {"captions": pa.list_(pa.string())}

    def batch(self, rows: list[int]) -> dict[int, dict[str, Any]]:
        return {row: {"captions": texts} for row, texts in self._captioner(rows).items()}


# --- `captionrl caption`: caption a folder or data set, one line per image, and continue an interrupted run ----------


def _decoding(arguments: CaptionOptions) -> dict[str, Any]:
    """Settings for `generate`, all explicit, so that the checkpoint's defaults have no effect."""
    beams = arguments.num_beams or (1 if arguments.do_sample else 3)
    number = arguments.num_return_sequences
    if not arguments.do_sample and number > beams:
        raise ValueError(
            f"--num_return_sequences {number} needs at least as many beams, but --num_beams is {beams}. Use --num_beams {number}, or "
            "--do_sample for random samples."
        )
    if arguments.compile_decoding and beams > 1:
        raise ValueError(
            f"--compile_decoding is for greedy and sampled captions, but --num_beams is {beams}. Use --num_beams 1, or leave it out."
        )
    if arguments.rerank is not None and number < 2:
        raise ValueError(
            f"--rerank chooses among captions, but --num_return_sequences is {number}. Use --num_return_sequences 5, for example."
        )
    if arguments.temperature <= 0:
        raise ValueError(
            f"--temperature must be above 0, got {arguments.temperature}. Leave out --do_sample for greedy."
        )
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top_p must lie in (0, 1], got {arguments.top_p}.")
    if arguments.top_k < 0:
        raise ValueError(f"--top_k must be 0 (all tokens) or more, got {arguments.top_k}.")
    settings = {
        "do_sample": arguments.do_sample,
        "num_beams": beams,
        "num_return_sequences": number,
        "max_new_tokens": arguments.max_new_tokens,
        "repetition_penalty": arguments.repetition_penalty,
    }
    for name in ("compile_decoding", "cache_implementation"):
        if value := getattr(arguments, name):
            settings[name] = value
    if beams > 1:
        settings["length_penalty"] = arguments.length_penalty
    if arguments.do_sample:
        settings |= {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    return settings


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to resume a file whose captions were made with other settings."""
    remedy = "Use --overwrite to start again, or another --output."
    if not path.is_file():
        raise ValueError(
            f"The output holds captions, but the file of their settings, {str(path)!r}, is missing. {remedy}"
        )
    refuse_other_settings(json.loads(path.read_text(encoding="utf-8")).get("settings", {}), settings)


def _settings(arguments: CaptionOptions, decoding: dict[str, Any]) -> dict[str, Any]:
    """Settings of the captions; an output is resumed only with equal settings."""
    settings = {"model": arguments.model, "dtype": arguments.dtype, **source_settings(arguments), **decoding}
    if arguments.rerank is not None:
        settings["rerank"] = arguments.rerank
    settings |= arguments.loading
    if arguments.do_sample:
        settings |= {"seed": arguments.seed, "batch_size": arguments.batch_size}
    return settings


def _caption_all(captioner: BatchCaptioner, writer: CaptionWriter) -> None:
    """Write the missing captions batch by batch. Only one batch of images is in memory, and each image is opened once."""
    from tqdm import tqdm

    ids, done = captioner.reader.ids, set(writer.done)
    # A progress bar only on a terminal.
    with tqdm(total=len(ids), initial=sum(i in done for i in ids), unit=" images", disable=None) as progress:
        for rows, wanted in captioner.batches(range(len(ids)), done):
            texts = captioner(rows)
            good = [row for row in wanted if row in texts]
            if good:
                writer.append([ids[row] for row in good], [texts[row] for row in good])
            progress.update(len(wanted))


def _summary(
    arguments: CaptionOptions, output: Path, split: LoadedSplit, reader: ImageReader, done: Container[str]
) -> dict[str, Any]:
    """Numbers of images written, resumed and unreadable. Unreadable images are listed in a file."""
    report = reader.report()
    path = output.with_suffix(".quarantine.jsonl")
    if report.entries:
        report.write()
    else:
        path.unlink(missing_ok=True)
    # An image that an earlier run captioned keeps its caption even if it is unreadable now.
    captioned = len(reader.ids) - sum(entry.image_id not in done for entry in report.entries)
    before = sum(image_id in done for image_id in reader.ids)
    return {
        "output": str(output),
        "split": arguments.split,
        "images": captioned,
        "of": len(split.all_ids),
        "written": captioned - before,
        "resumed": before,
        "unreadable": [{"image_id": entry.image_id, "reason": entry.reason} for entry in report.entries],
    }


def _sentence(summary: dict[str, Any], arguments: CaptionOptions, listed: Path) -> str:
    """The summary as a sentence; `listed` is the list of unreadable images."""
    text = f"{summary['output']}: captions of {summary['images']:,} of {summary['of']:,} images"
    if summary["resumed"]:
        text += f", {summary['resumed']:,} of them from an earlier run"
    if arguments.max_images is not None and arguments.max_images < summary["of"]:
        text += f" (--max_images {arguments.max_images:,})"
    if bad := summary["unreadable"]:
        named = ", ".join(f"{entry['image_id']!r} ({entry['reason']})" for entry in bad[:5])
        more = ", ..." if len(bad) > 5 else ""
        text += f"; {len(bad):,} cannot be read and are listed in {listed}: {named}{more}"
    return text + "."


def write_captions(arguments: CaptionOptions) -> None:
    """Write the captions."""
    decoding = _decoding(arguments)  # before anything slow
    arguments.check_engine()
    if arguments.uses_shards:
        output = arguments.output or Path("captions")
        summary, listed = _write_shards(arguments, output, decoding), output / "quarantine.jsonl"
    else:
        output = arguments.output or Path("captions.jsonl")
        summary, listed = _write_lines(arguments, output, decoding), output.with_suffix(".quarantine.jsonl")
    print(json.dumps(summary) if arguments.json else _sentence(summary, arguments, listed))


def _write_lines(arguments: CaptionOptions, output: Path, decoding: dict[str, Any]) -> dict[str, Any]:
    """Write or resume one file of lines, in this process."""
    if output.is_dir():
        raise ValueError(
            f"--output {str(output)!r} is a folder. Use a file, such as captions.jsonl, or --processes to write shards."
        )

    from hf_captionrl.evaluation.caption_files import CaptionWriter
    from hf_captionrl.metrics.table import installed_versions
    from hf_captionrl.retrieval import model_fingerprint
    from hf_captionrl.utils.io import write_json

    with CaptionWriter(output, overwrite=arguments.overwrite) as writer:
        # The data need no captions, and images are checked when they are opened.
        split = load_split(arguments, quarantine_path=None, require_captions=False)
        captioner = load_batch_captioner(arguments, decoding, split, output.with_suffix(".quarantine.jsonl"))
        loaded = captioner.pipeline.captioner
        settings = _settings(arguments, decoding)
        settings |= {"weights": model_fingerprint(loaded.base_model), "prompt": loaded.prompt}
        unknown = sorted(split.all_ids.missing(list(writer.done)))
        if unknown:
            raise ValueError(
                f"{output} has captions of images that are not in the data set, such as {unknown[0]!r}. Use another --output, or "
                "the data set that it was written for."
            )
        if writer.done:
            check_settings(output.with_suffix(".run.json"), settings)
        if writer.torn:
            print(f"{output}: truncated {writer.torn} bytes of an incomplete last line.", file=sys.stderr)
        writer.start()
        if not writer.done:
            write_json(output.with_suffix(".run.json"), {"settings": settings, "versions": installed_versions()})
        _caption_all(captioner, writer)
    return _summary(arguments, output, split, captioner.reader, writer.done)


def _write_shards(arguments: CaptionOptions, output: Path, decoding: dict[str, Any]) -> dict[str, Any]:
    """Write or resume a folder of Parquet shards, in several processes or on a cluster."""
    from hf_captionrl.cli.features import run_on_images

    return run_on_images(
        arguments,
        output,
        lambda: _settings(arguments, decoding),
        lambda ids: CaptionStage(arguments, decoding, ids),
    )
