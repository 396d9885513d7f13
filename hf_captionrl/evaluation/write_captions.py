"""`captionrl caption`: caption a folder or data set, one line per image, and continue an interrupted run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.evaluation.dataset_options import CaptionerOptions, DatasetOptions, LoadedSplit, load_split
from hf_captionrl.options import option, positive

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.data import ImageReader
    from hf_captionrl.evaluation.caption_files import CaptionWriter
    from hf_captionrl.pipelines import CaptionPipeline
    from hf_captionrl.retrieval import Scorer

__all__ = ["CaptionOptions", "check_settings", "write_captions"]


@dataclass
class CaptionOptions(CaptionerOptions, DatasetOptions):
    """Caption every image of a folder or data set. The data need no captions.

    Each line of the output is {"image_id", "caption"}, plus "captions" if --num_return_sequences asks for several. Images
    that cannot be read are counted, and listed in NAME.quarantine.jsonl. Each batch is on disk as soon as it is written:
    after a crash or `kill -9` the same command resumes. NAME.run.json keeps the settings; a file is never resumed with
    other settings.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
          captionrl caption Salesforce/blip-image-captioning-base --dataset imagefolder --data_dir photos
          captionrl caption outputs/smile_blip/model --dataset dataset_coco.json --image_root coco --num_beams 3

        five captions per image, for the diversity suite (`captionrl evaluate --suite sle`):
          captionrl caption MODEL --num_return_sequences 5 --do_sample          random samples, "rs" in the paper
          captionrl caption MODEL --num_return_sequences 5 --num_beams 5        the five best of a beam, "bs"
    """

    model: str = option(positional=True, metavar="MODEL", help="a folder, a name on the Hub, or scenes:blip-mle")
    output: Path = option(Path("captions.jsonl"), metavar="FILE", help="file to write, or to resume")
    overwrite: bool = option(False, help="start again even if the file exists")
    batch_size: int = option(16, parse=positive, metavar="N", group="captioner", help="images captioned at once")
    attn_implementation: str | None = option(
        None,
        metavar="NAME",
        group="captioner",
        help="of attention: 'sdpa', 'eager', 'flash_attention_2', ... (default: transformers')",
    )
    load_in_4bit: bool = option(False, group="captioner", help="quantize the weights; needs bitsandbytes and a GPU")
    load_in_8bit: bool = option(False, group="captioner", help="the same with 8 bits")
    compile_decoding: bool = option(
        False,
        group="decoding",
        help="compile the decoding step with torch.compile; needs greedy or sampled captions (--num_beams 1)",
    )
    cache_implementation: Literal["dynamic", "static"] | None = option(
        None,
        group="decoding",
        help="of keys and values; transformers compiles the decoding step of a static cache on a GPU",
    )
    num_beams: int | None = option(
        None, parse=positive, metavar="N", group="decoding", help="(default: 3, or 1 with --do_sample)"
    )
    max_new_tokens: int = option(40, parse=positive, metavar="N", group="decoding", help="longest caption in tokens")
    num_return_sequences: int = option(1, parse=positive, metavar="N", group="decoding", help="captions per image")
    rerank: str | None = option(
        None,
        metavar="SCORER",
        group="decoding",
        help="of the captions of an image, write only the one most similar to it: a folder, a name on the Hub, scenes:clip-reward; "
        "needs --num_return_sequences above 1, as in the authors' code of SLE (100 samples)",
    )
    length_penalty: float = option(1.0, metavar="X", group="decoding", help="of beams")
    repetition_penalty: float = option(1.0, metavar="X", group="decoding", help="above 1: fewer repeated tokens")
    do_sample: bool = option(False, group="decoding", help="sample captions from the whole distribution")
    temperature: float = option(1.0, metavar="X", group="decoding", help="of sampling")
    top_p: float = option(1.0, metavar="X", group="decoding", help="of sampling")
    top_k: int = option(0, metavar="N", group="decoding", help="of sampling; 0: all tokens")
    seed: int = option(0, metavar="N", group="decoding", help="of sampling")


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
        raise ValueError(f"--top_k must be 0 (all words) or more, got {arguments.top_k}.")
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


def _loading(arguments: CaptionOptions) -> dict[str, Any]:
    """Arguments of `load_captioner` that were set."""
    names = ("attn_implementation", "load_in_4bit", "load_in_8bit")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name)}


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Refuse to resume a file whose captions were made with other settings."""
    remedy = "Use --overwrite to start again, or another --output."
    if not path.is_file():
        raise ValueError(
            f"The output holds captions, but the file of their settings, {str(path)!r}, is missing. {remedy}"
        )
    before = json.loads(path.read_text(encoding="utf-8")).get("settings", {})
    for name in sorted({*before, *settings}):
        if before.get(name) != settings.get(name):
            raise ValueError(
                f"The output was written with {name} {before.get(name)!r}, but {name} is now {settings.get(name)!r}. {remedy}"
            )


def _batches(
    ids: Sequence[str], done: set[str], arguments: CaptionOptions
) -> Iterator[tuple[list[int], list[int], int]]:
    """Rows to caption together, those of them to write, and a seed.

    Batches start at fixed rows of the data set. Samples depend on the whole batch, so an incomplete batch is sampled again
    as a whole: a resumed file equals that of an uninterrupted run.
    """
    for start in range(0, len(ids), arguments.batch_size):
        rows = list(range(start, min(start + arguments.batch_size, len(ids))))
        wanted = [row for row in rows if ids[row] not in done]
        if wanted:
            digest = hashlib.blake2b(f"{arguments.seed}/{ids[start]}".encode("utf-8", "surrogatepass"), digest_size=7)
            yield (rows if arguments.do_sample else wanted), wanted, int.from_bytes(digest.digest(), "big")


def _write(
    caption: CaptionPipeline,
    images: Sequence[Any],
    dataset: datasets.Dataset,
    rows: list[int],
    decoding: dict[str, Any],
) -> list[list[str]]:
    """Captions of some rows, as one batch."""
    from hf_captionrl.captioners.eval_mode import evaluating
    from hf_captionrl.data import frames_of

    number = decoding["num_return_sequences"]
    if frames_of(dataset):
        found = caption(dataset.select(rows), batch_size=len(rows), **decoding)
        return found if number > 1 else [[text] for text in found]
    captioner = caption.captioner
    with evaluating(captioner.model):
        texts = captioner.generate(**captioner.encode_images(list(images)), **decoding).captions
    return [texts[start : start + number] for start in range(0, len(texts), number)]


def _reranked(scorer: Scorer, images: Sequence[Any], texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """The caption of each image that is most similar to it; the first of equal ones."""
    from hf_captionrl.metrics.suites.suite_row import spoken

    features = scorer.image_features(list(images))
    best = []
    for image, group in zip(features, texts, strict=True):
        similarity = scorer.text_features(spoken(group)) @ image
        best.append([group[int(similarity.argmax())]])
    return best


def _settings(arguments: CaptionOptions, caption: CaptionPipeline, decoding: dict[str, Any]) -> dict[str, Any]:
    """Settings of the captions; a file is resumed only with equal settings."""
    from hf_captionrl.retrieval import model_fingerprint

    settings = {
        "model": arguments.model,
        "weights": model_fingerprint(caption.captioner.base_model),
        "prompt": caption.captioner.prompt,
        "dtype": arguments.dtype,
        "dataset": arguments.dataset,
        # Two folders may hold files of the same names.
        "source": [
            None if place is None else os.path.realpath(place) for place in (arguments.data_dir, arguments.image_root)
        ],
        "split": arguments.split,
        **decoding,
    }
    if arguments.rerank is not None:
        settings["rerank"] = arguments.rerank
    settings |= _loading(arguments)
    if arguments.do_sample:
        settings |= {"seed": arguments.seed, "batch_size": arguments.batch_size}
    return settings


def _caption_all(
    arguments: CaptionOptions,
    caption: CaptionPipeline,
    reader: ImageReader,
    dataset: datasets.Dataset,
    writer: CaptionWriter,
    decoding: dict[str, Any],
    scorer: Scorer | None,
) -> None:
    """Write the missing captions batch by batch. Only one batch of images is in memory, and each image is opened once."""
    import torch
    from tqdm import tqdm

    from hf_captionrl.data import frames_of

    ids, done, videos = reader.ids, set(writer.done), bool(frames_of(dataset))
    # A progress bar only on a terminal.
    with tqdm(total=len(ids), initial=sum(i in done for i in ids), unit=" images", disable=None) as progress:
        for rows, wanted, seed in _batches(ids, done, arguments):
            images = {row: None if videos else reader.open(row) for row in rows}
            rows = [row for row in rows if videos or images[row] is not None]
            good = [row for row in wanted if row in rows]
            if good:
                if arguments.do_sample:
                    torch.manual_seed(seed)
                # No variable holds the list, so the images are freed before the next batch is opened.
                if scorer is None:
                    texts = _write(caption, [images.pop(row) for row in rows], dataset, rows, decoding)
                else:
                    texts = _write(caption, [images[row] for row in rows], dataset, rows, decoding)
                    texts = _reranked(scorer, [images.pop(row) for row in rows], texts)
                found = dict(zip(rows, texts, strict=True))
                writer.append([ids[row] for row in good], [found[row] for row in good])
            progress.update(len(wanted))


def _summary(
    arguments: CaptionOptions, split: LoadedSplit, reader: ImageReader, done: Container[str]
) -> dict[str, Any]:
    """Numbers of images written, resumed and unreadable. Unreadable images are listed in a file."""
    report = reader.report()
    path = arguments.output.with_suffix(".quarantine.jsonl")
    if report.entries:
        report.write()
    else:
        path.unlink(missing_ok=True)
    # An image that an earlier run captioned keeps its caption even if it is unreadable now.
    captioned = len(reader.ids) - sum(entry.image_id not in done for entry in report.entries)
    before = sum(image_id in done for image_id in reader.ids)
    return {
        "output": str(arguments.output),
        "split": arguments.split,
        "images": captioned,
        "of": len(split.all_ids),
        "written": captioned - before,
        "resumed": before,
        "unreadable": [{"image_id": entry.image_id, "reason": entry.reason} for entry in report.entries],
    }


def _sentence(summary: dict[str, Any], arguments: CaptionOptions) -> str:
    """The summary as a sentence."""
    text = f"{summary['output']}: captions of {summary['images']:,} of {summary['of']:,} images"
    if summary["resumed"]:
        text += f", {summary['resumed']:,} of them from an earlier run"
    if arguments.max_images is not None and arguments.max_images < summary["of"]:
        text += f" (--max_images {arguments.max_images:,})"
    if bad := summary["unreadable"]:
        named = ", ".join(f"{entry['image_id']!r} ({entry['reason']})" for entry in bad[:5])
        more = ", ..." if len(bad) > 5 else ""
        listed = arguments.output.with_suffix(".quarantine.jsonl")
        text += f"; {len(bad):,} cannot be read and are listed in {listed}: {named}{more}"
    return text + "."


def write_captions(arguments: CaptionOptions) -> None:
    """Write the captions."""
    decoding = _decoding(arguments)  # before anything slow
    output = arguments.output
    if output.is_dir():
        raise ValueError(f"--output {str(output)!r} is a folder. Use a file, such as captions.jsonl.")

    import torch

    from hf_captionrl.data import ImageReader, frames_of
    from hf_captionrl.evaluation.arguments import optional_scorer
    from hf_captionrl.evaluation.caption_files import CaptionWriter
    from hf_captionrl.io import write_json
    from hf_captionrl.pipelines import pipeline
    from hf_captionrl.reports.versions import installed_versions

    with CaptionWriter(output, overwrite=arguments.overwrite) as writer:
        # The data need no captions, and images are checked when they are opened.
        split = load_split(arguments, quarantine_path=None, require_captions=False)
        scorer = None
        if arguments.rerank is not None:
            if frames_of(split.dataset):
                raise ValueError("--rerank is for images, but the data are videos. Leave it out.")
            scorer = optional_scorer(arguments.rerank)
        caption = pipeline(
            arguments.model,
            revision=arguments.revision,
            prompt=arguments.prompt,
            dtype=getattr(torch, arguments.dtype),
            device=arguments.device,
            model_kwargs=_loading(arguments),
        )
        settings = _settings(arguments, caption, decoding)
        unknown = sorted(set(writer.done) - split.all_ids)
        if unknown:
            raise ValueError(
                f"{output} has captions of images that are not in the data set, such as {unknown[0]!r}. Use another --output, or "
                "the data set that it was written for."
            )
        if writer.done:
            check_settings(output.with_suffix(".run.json"), settings)
        if writer.torn:
            print(f"{output}: truncated {writer.torn} bytes of an incomplete last line.", file=sys.stderr)
        reader = ImageReader(
            split.dataset,
            split=split.split,
            quarantine_path=output.with_suffix(".quarantine.jsonl"),
            max_bad_fraction=arguments.max_bad_fraction,
        )
        writer.start()
        if not writer.done:
            write_json(output.with_suffix(".run.json"), {"settings": settings, "versions": installed_versions()})
        _caption_all(arguments, caption, reader, split.dataset, writer, decoding, scorer)
    summary = _summary(arguments, split, reader, writer.done)
    print(json.dumps(summary) if arguments.json else _sentence(summary, arguments))
