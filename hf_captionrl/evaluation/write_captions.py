"""`captionrl caption`: caption a folder or data set, one line per image, and continue an interrupted run."""

from __future__ import annotations

import json
import sys
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.engine import refuse_other_settings
from hf_captionrl.evaluation.caption_options import CaptionOptions
from hf_captionrl.evaluation.dataset_options import (
    LoadedSplit,
    load_split,
    source_settings,
)

if TYPE_CHECKING:
    from hf_captionrl.data import ImageReader
    from hf_captionrl.evaluation.caption_files import CaptionWriter
    from hf_captionrl.evaluation.caption_stage import BatchCaptioner

__all__ = ["check_settings", "write_captions"]


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
    from hf_captionrl.evaluation.caption_stage import load_batch_captioner
    from hf_captionrl.io import write_json
    from hf_captionrl.reports.versions import installed_versions
    from hf_captionrl.retrieval import model_fingerprint

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
    from hf_captionrl.evaluation.caption_stage import CaptionStage
    from hf_captionrl.evaluation.image_stage import run_on_images

    return run_on_images(
        arguments,
        output,
        lambda: _settings(arguments, decoding),
        lambda ids: CaptionStage(arguments, decoding, ids),
    )
