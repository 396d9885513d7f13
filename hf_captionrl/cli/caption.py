"""`captionrl caption`: caption a folder or data set, one line per image, and continue an interrupted run."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from hf_captionrl.data.options import (
    CaptionerOptions,
    DatasetOptions,
    EndpointOptions,
    LoadedSplit,
    LoadingArguments,
    TrainingImagesOptions,
    WordingOptions,
    ids_digest,
    load_split,
)
from hf_captionrl.utils.io import (
    LineFile,
    atomic_write_text,
    counted,
    csv_cell,
    json_digest,
    read_jsonl,
    to_plain,
    write_json,
)
from hf_captionrl.utils.options import (
    CommandOptions,
    EngineOptions,
    NotNegative,
    Positive,
    Range,
    SeedOptions,
    WritingOptions,
    option,
)
from hf_captionrl.utils.parts import read_parts, refuse_other_settings, run_parts, seed_of_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.data import QuarantineEntry

    Written = tuple[dict[str, Any], list[QuarantineEntry], int]  # summary, unreadable images, number of images


@dataclass
class DecodingOptions(SeedOptions, WritingOptions, WordingOptions, CommandOptions):
    """How captions are written."""

    heading: ClassVar[str] = "decoding"

    num_beams: Positive | None = option(None, help="number of beams (default: 3, or 1 with --do_sample)")
    num_return_sequences: Positive = option(1, help="number of captions per image")
    do_sample: bool = option(False, help="sample captions from the whole distribution")
    temperature: Annotated[float, Range(above=0)] = option(1.0, help="temperature of sampling")
    top_p: Annotated[float, Range(above=0, at_most=1)] = option(
        1.0, help="nucleus sampling: smallest probability mass that is kept; 1: all tokens"
    )
    top_k: NotNegative = option(0, help="sample only from this many tokens; 0: all tokens")


@dataclass
class CaptionOptions(
    DecodingOptions,
    EngineOptions,
    LoadingArguments,
    CaptionerOptions,
    EndpointOptions,
    TrainingImagesOptions,
    DatasetOptions,
):
    """Caption every image of a folder or data set that the captioner was not trained on. The data need no captions.

    Each line of the output is {"image_id", "caption"}, plus "captions" if --num_return_sequences asks for several. Images
    that cannot be read are counted, and listed in NAME.quarantine.jsonl; the others are captioned, and if more than
    --max_bad_fraction cannot be read, the exit code is 2. Each batch is on disk as soon as it is written: after a crash or
    `kill -9` the same command resumes. NAME.run.json keeps the settings and what tells whether an image has changed; a file
    is never resumed with other settings or changed images.

    With --processes or --engine the output is a folder of Parquet shards, which the other commands read like a file.

    With --endpoint, a model behind an OpenAI-compatible address is asked. NAME.answers.jsonl keeps each answer when it arrives,
    so that none is asked for twice.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
          captionrl caption Salesforce/blip-image-captioning-base --dataset imagefolder --data_dir photos
          captionrl caption outputs/smile_blip/model --dataset dataset_coco.json --image_root coco --num_beams 3

        five captions per image, random samples or the best of a beam, for `captionrl evaluate --suite sle`:
          captionrl caption MODEL --num_return_sequences 5 --do_sample
          captionrl caption MODEL --num_return_sequences 5 --num_beams 5

        on all GPUs of this machine, and on a Ray cluster:
          captionrl caption MODEL --dataset OWNER/NAME --split train --output captions --processes 8
          captionrl caption MODEL --dataset OWNER/NAME --split train --output /shared/captions --engine ray --address auto

        a model of Ollama, vLLM, LM Studio or llama.cpp, and alternative texts that do not mention a word:
          captionrl caption qwen2.5vl --dataset photos --endpoint http://127.0.0.1:11434/v1 --max_new_tokens 100
          captionrl caption MODEL --dataset photos --do_not_mention logo watermark
    """

    model: str = option(
        positional=True,
        metavar="MODEL",
        help="captioner: a folder, a name on the Hub, or scenes:blip-mle; with --endpoint the name of the model there",
    )
    output: Path | None = option(
        None,
        metavar="FILE",
        help="file of JSON Lines (.jsonl) to write, or to resume, or .csv, made of NAME.jsonl at the end; a folder with --processes or --engine (default: captions.jsonl, "
        "or captions)",
    )
    overwrite: bool = option(False, help="start again even if the file exists")

    @property
    def decoding(self) -> dict[str, Any]:
        """Settings for `generate`, all explicit, so that the checkpoint's defaults have no effect."""
        is_asked = self.endpoint is not None
        beams, number = self.num_beams or (1 if self.do_sample or is_asked else 3), self.num_return_sequences
        given = f"--num_return_sequences {number} with --num_beams {beams}"
        if is_asked and (beams > 1 or (number > 1 and not self.do_sample)):
            raise ValueError(f"{given}: an endpoint has no beams. Use --do_sample for several captions.")
        if not self.do_sample and number > beams:
            raise ValueError(f"{given}. Use --num_beams {number} or more, or --do_sample for random samples.")
        self.check_wording()
        names = ["num_return_sequences", "max_new_tokens", *["min_new_tokens"] * bool(self.min_new_tokens)]
        names += ["temperature", "top_p", "top_k"] if self.do_sample else []
        more = {name: getattr(self, name) for name in names}
        more |= {"length_penalty": 1.0} if beams > 1 else {}
        return {"do_sample": self.do_sample, "num_beams": beams, "repetition_penalty": 1.0, **more}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the captions; an output is resumed only with equal settings."""
        places = [place and os.path.realpath(place) for place in (self.data_dir, self.image_root)]  # not names alone
        names = ["model", "dtype", "dataset", "split"]
        settings = {name: getattr(self, name) for name in names} | {"source": places, **self.decoding, **self.loading}
        names = ["include_training_images", "endpoint", "do_not_mention"]
        settings |= {name: value for name in names if (value := getattr(self, name))}
        if self.do_sample:
            settings |= {"seed": self.seed, "batch_size": self.batch_size}
        return settings


# --- Captions of the rows of a data set, batch by batch: for one file of lines, and for Parquet parts ----------------


class BatchCaptioner:
    """Captions the images of a split batch by batch."""

    def __init__(self, options: CaptionOptions, split: LoadedSplit) -> None:
        import torch

        from hf_captionrl.captioners.loading import load_captioner
        from hf_captionrl.captioners.prompts import forbidden_tokens, without_words
        from hf_captionrl.data.columns import VIDEO_FRAMES
        from hf_captionrl.data.quarantine import ImageReader

        self.options, self.decoding, self.dataset = options, options.decoding, split.dataset
        self.has_videos = VIDEO_FRAMES in split.dataset.column_names
        self.reader = ImageReader(split.dataset, split=split.split)
        if self.has_videos and options.endpoint:
            raise ValueError("--endpoint is for images, but the data are videos. Leave it out.")
        self.captioner: Any
        if options.endpoint is not None:
            from hf_captionrl.captioners.language_model_clients import EndpointCaptioner

            temperature = options.temperature if options.do_sample else 0.0
            self.captioner = EndpointCaptioner.from_options(options, _output(options), temperature)
            return
        self.captioner = load_captioner(
            options.model,
            revision=options.revision,
            prompt=options.prompt,
            dtype=getattr(torch, options.dtype),
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            **options.loading,
        )
        if self.captioner.family == "chat":
            self.captioner.prompt = without_words(self.captioner.prompt, options.do_not_mention)
        if words := forbidden_tokens(self.captioner.tokenizer, options.do_not_mention):
            self.decoding["bad_words_ids"] = words

    def made_by(self) -> dict[str, Any]:
        """What else affects the captions."""
        from hf_captionrl.retrieval.feature_cache import model_fingerprint

        is_local = self.options.endpoint is None
        weights = model_fingerprint(self.captioner.base_model) if is_local else self.captioner.backend.revision
        return {"weights": weights, "prompt": self.captioner.prompt}

    def __call__(self, rows: Sequence[int]) -> dict[int, list[str]]:
        """Captions of the rows of one batch, without those that cannot be read, or that the endpoint did not answer."""
        import torch

        from hf_captionrl.captioners.pipeline import CaptionPipeline

        number = self.decoding["num_return_sequences"]
        images: dict[int, Any] = dict.fromkeys(rows) if self.has_videos else self.reader.open_all(rows)
        readable = list(images)
        if not readable:
            return {}
        if self.options.do_sample:
            torch.manual_seed(seed_of_batch(self.options.seed, self.reader.ids[rows[0]]))
        ids = [self.reader.ids[row] for row in readable]
        opened = [images.pop(row) for row in readable]
        if self.options.endpoint is not None:
            groups = self.captioner.describe(ids, opened, number)
        else:
            pipeline = CaptionPipeline(self.captioner, batch_size=len(readable), **self.decoding)
            texts = pipeline(self.dataset.select(readable) if self.has_videos else opened)
            groups = texts if number > 1 else [[text] for text in texts]
        return {row: group for row, group in zip(readable, groups, strict=True) if len(group) == number}


class CaptionParts:
    """Parts with one row per image: `image_id`, `captions`, and `reason` and `detail` if it is unreadable.

    `ids` is [`ids_digest`] of the images; a process that finds other images stops.
    """

    def __init__(self, options: CaptionOptions, ids: str) -> None:
        self.options, self.ids = copy.copy(options), ids

    def load(self) -> dict[str, Any]:
        split = load_split(self.options, quarantine_path=None, require_captions=False, expected_ids=self.ids)
        self._captioner = BatchCaptioner(self.options, split)
        return self._captioner.made_by()

    def __call__(self, rows: range) -> pa.Table:
        import pyarrow as pa

        captions: dict[int, list[str]] = {}
        for start in range(rows.start, rows.stop, size := self.options.batch_size):
            captions |= self._captioner(range(start, min(start + size, rows.stop)))
        reader = self._captioner.reader
        faults = {row: {"reason": entry.reason, "detail": entry.detail} for row, entry in reader.unreadable.items()}
        values = [
            {"image_id": image_id} | ({"captions": captions[row]} if row in captions else faults[row])
            for row, image_id in zip(rows, reader.ids[rows.start : rows.stop], strict=True)
        ]
        text = pa.string()
        schema = pa.schema({"image_id": text, "captions": pa.list_(text), "reason": text, "detail": text})
        return pa.Table.from_pylist(values, schema=schema)


# --- The command -----------------------------------------------------------------------------------------------------


def write_captions(arguments: CaptionOptions) -> None:
    """Write the captions."""
    from hf_captionrl.data.quarantine import stop_if_too_many, write_entries

    _ = arguments.decoding  # refuses settings that exclude each other, before anything slow
    arguments.check_endpoint(_OF_LOCAL_MODELS)
    output = _output(arguments)
    rows: Iterable[dict[str, Any]]
    if arguments.uses_shards:
        listed = output / "quarantine.jsonl"
        summary, unreadable, size = _write_parts(arguments, output)
        rows = read_parts(output)
    else:
        listed = output.with_suffix(".quarantine.jsonl")
        lines = output.with_suffix(".jsonl") if output.suffix == ".csv" else output
        summary, unreadable, size = _write_lines(arguments, lines)
        summary["output"], rows = str(output), [row for _, row in read_jsonl(lines)] if lines.exists() else []
        if lines != output:  # for spreadsheets; lists are JSON
            import pandas as pd

            table = pd.DataFrame(rows)
            table = table.map(lambda v: csv_cell(json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v))
            atomic_write_text(output, "\ufeff" + table.to_csv(index=False))
    summary["unreadable"] = [{"image_id": entry.image_id, "reason": entry.reason} for entry in unreadable]
    if unreadable:
        write_entries(listed, unreadable)
    else:
        listed.unlink(missing_ok=True)
    if arguments.do_not_mention:
        from hf_captionrl.captioners.prompts import mentions

        texts = (text for row in rows for text in row.get("captions") or [row.get("caption") or ""])
        summary["mentions"] = sum(mentions(text, arguments.do_not_mention) for text in texts)
    print(json.dumps(summary) if arguments.json else _sentence(arguments, summary, listed))
    stop_if_too_many(unreadable, {str(arguments.split): size}, arguments.max_bad_fraction, listed)
    if failed := summary.get("failed"):
        from hf_captionrl.captioners.language_model_clients import BackendError

        first = ", ".join(f"{one['image_id']!r} ({one['reason']})" for one in failed[:3]) + ", ..." * (len(failed) > 3)
        raise BackendError(f"Images without a caption: {len(failed):,}; {first}. The same command asks again.")


def _output(arguments: CaptionOptions) -> Path:
    return arguments.output or Path("captions" if arguments.uses_shards else "captions.jsonl")


def _sentence(arguments: CaptionOptions, summary: dict[str, Any], listed: Path) -> str:
    text = f"{summary['output']}: captions of {summary['images']:,} of {counted(summary['of'], 'image')}"
    if summary["resumed"]:
        text += f", {summary['resumed']:,} of them from an earlier run"
    if arguments.max_images is not None and arguments.max_images < summary["of"]:
        text += f" (--max_images {arguments.max_images:,})"
    if bad := summary["unreadable"]:
        named = ", ".join(f"{entry['image_id']!r} ({entry['reason']})" for entry in bad[:5])
        more = ", ..." if len(bad) > 5 else ""
        text += f"; {len(bad):,} cannot be read and are listed in {listed}: {named}{more}"
    if number := summary.get("mentions"):
        text += f"; captions that mention what they should not, and are kept: {number:,}"
    if cost := summary.get("endpoint"):
        from hf_captionrl.captioners.language_model_clients import cost_sentence

        return f"{text}. {cost_sentence(cost)}"
    return text + "."


_OF_LOCAL_MODELS = """revision device dtype attn_implementation load_in_4bit load_in_8bit engine processes address rows_per_shard
    min_new_tokens top_k"""


_BEGIN = b'{"image_id": '


class CaptionWriter(LineFile):
    """Appends captions to a file that one process writes at a time; use it as a context manager.

    `done` has the captions of each image id in the existing file, `torn` is an incomplete last line. The file does not change
    before [`start`].
    """

    busy = "Wait until it ends, or use another --output."

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._overwrite = overwrite
        super().__init__(path)

    def _begin(self, data: bytes) -> None:
        from hf_captionrl.evaluation.caption_files import parse_captions

        data = b"" if self._overwrite else data
        end = data.rfind(b"\n") + 1
        self.torn = data[end:]
        self._lacks_end = self.torn.rstrip().endswith(b"}")  # a line that an editor saved without a line feed
        if self._lacks_end:
            end, self.torn = len(data), b""
        elif not self.torn.startswith(_BEGIN[: len(self.torn)]):
            text = f"the last line, {self.torn[:60]!r}, is not a line of captions. Use another --output."
            raise ValueError(f"{self.path}: {text}")
        self._whole = end
        self.done = parse_captions(data[:end], self.path) if end else {}

    def start(self) -> None:
        """Truncate the file to its complete lines; call this once, before [`append`]."""
        self.truncate(self._whole)
        if self._lacks_end:
            self.append_bytes(b"\n")

    def append(self, image_ids: Sequence[str], captions: Sequence[Sequence[str]]) -> None:
        """Append images; they are on disk when this returns."""
        lines = []
        for image_id, group in zip(image_ids, captions, strict=True):
            row: dict[str, Any] = {"image_id": image_id, "caption": group[0]}
            if len(group) > 1:
                row["captions"] = list(group)
            lines.append(json.dumps(to_plain(row), ensure_ascii=False) + "\n")
        # A lone surrogate has no UTF-8 form, but its escape is JSON.
        self.append_bytes("".join(lines).encode("utf-8", errors="backslashreplace"))


def _write_parts(arguments: CaptionOptions, output: Path) -> Written:
    """Write or resume a folder of parts."""
    from hf_captionrl.data.features import image_hashes
    from hf_captionrl.data.quarantine import QuarantineEntry

    size = arguments.rows_per_shard or 64 * arguments.batch_size
    if size % arguments.batch_size:
        raise ValueError(f"--rows_per_shard {size} must be a multiple of --batch_size {arguments.batch_size}.")
    if output.suffix:
        raise ValueError(
            f"--output {str(output)!r} names a file, but Parquet shards are a folder. Use {str(output.with_suffix(''))!r}."
        )
    split = load_split(arguments, quarantine_path=None, require_captions=False)
    ids, number = ids_digest(split.dataset), len(split.dataset)
    settings: dict[str, Any] = {"images": ids, "content of the images": json_digest(image_hashes(split.dataset))}
    settings |= {"batch_size": arguments.batch_size, **arguments.settings}
    sizes: dict[str, Any] = {"rows_per_shard": size, "overwrite": arguments.overwrite}
    resumed = run_parts(output, number, CaptionParts(arguments, ids), arguments, settings=settings, **sizes)
    write_json(output / "run.json", {"settings": arguments.settings, "trained_on": split.trained})
    entries = [
        QuarantineEntry(row, image["image_id"], split.split, image["reason"], image["detail"])
        for row, image in enumerate(read_parts(output, ["image_id", "reason", "detail"]))
        if image["reason"] is not None
    ]
    summary = _summary(arguments, output, split, number - len(entries), resumed)
    return summary | {"shards": -(-number // size)}, entries, number


def _summary(
    arguments: CaptionOptions, output: Path, split: LoadedSplit, captioned: int, resumed: int
) -> dict[str, Any]:
    return {
        "output": str(output),
        "split": arguments.split,
        "images": captioned,
        "of": len(split.all_ids),
        "written": captioned - resumed,
        "resumed": resumed,
        "trained_on": len(split.trained),
    }


def _write_lines(arguments: CaptionOptions, output: Path) -> Written:
    """Write or resume one file of lines, in this process."""
    if output.is_dir():
        raise ValueError(
            f"--output {str(output)!r} is a folder. Use a file, such as captions.jsonl, or --processes to write shards."
        )
    if output.suffix != ".jsonl":
        raise ValueError(
            f"--output {str(output)!r} must end in .jsonl or .csv. Use "
            f"{str(output.with_suffix('.jsonl') if output.name else 'captions.jsonl')!r}."
        )
    from tqdm import tqdm

    from hf_captionrl.data.features import UNREADABLE, image_hashes
    from hf_captionrl.utils.io import installed_versions

    record = output.with_suffix(".run.json")
    with CaptionWriter(output, overwrite=arguments.overwrite) as writer, ExitStack() as stack:
        # The data need no captions, and images are checked when they are opened.
        split = load_split(arguments, quarantine_path=None, require_captions=False)
        captioner = BatchCaptioner(arguments, split)
        if arguments.endpoint is not None:
            stack.enter_context(captioner.captioner)
        settings = arguments.settings | captioner.made_by()
        if unknown := sorted(split.all_ids.missing(list(writer.done))):
            raise ValueError(
                f"{output} has captions of images that are not in the data set, such as {unknown[0]!r}. Use another --output, or "
                "the data set that it was written for."
            )
        if writer.done and not record.is_file():
            raise ValueError(
                f"The output holds captions, but the file of their settings, {str(record)!r}, is missing. Use --overwrite to "
                "start again, or another --output."
            )
        ids, size = captioner.reader.ids, arguments.batch_size
        contents = dict(zip(ids, image_hashes(split.dataset), strict=True))
        made: dict[str, Any] = {"settings": settings, "versions": installed_versions(), "images": contents}
        if split.trained:
            made["trained_on"] = split.trained
        if writer.done:
            earlier = json.loads(record.read_text(encoding="utf-8"))
            refuse_other_settings(earlier.get("settings", {}), settings)
            known, done = earlier.get("images", {}), [i for i in ids if i in writer.done]
            # An image that an earlier run captioned keeps its caption even if it is unreadable now.
            if changed := [i for i in done if contents[i] not in (known.get(i, contents[i]), UNREADABLE)]:
                raise ValueError(
                    f"Images have changed since {output} got their captions ({len(changed)}), such as {changed[0]!r}. Remove their "
                    "lines to caption them again, or use --overwrite to start again."
                )
            made = earlier | {"images": known | contents | {i: known[i] for i in writer.done if i in known}}
        if writer.torn:
            text = writer.torn.decode(errors="replace")
            print(f"{output}: removed an incomplete last line: {text}", file=sys.stderr)
        writer.start()
        write_json(record, made)
        before = sum(map(writer.done.__contains__, ids))
        # A progress bar only on a terminal. Only one batch of images is in memory, and each image is opened once.
        with tqdm(total=len(ids), initial=before, unit=" images", disable=None) as progress:
            for start in range(0, len(ids), size):
                batch = range(start, min(start + size, len(ids)))
                id_of = dict(zip(batch, ids[batch.start : batch.stop], strict=True))
                wanted = [row for row, image_id in id_of.items() if image_id not in writer.done]
                # Batches start at fixed rows, and samples depend on the whole batch: an incomplete batch is sampled again as a
                # whole, so that a resumed output equals that of an uninterrupted run.
                is_whole = arguments.do_sample and arguments.endpoint is None
                texts = captioner(batch if is_whole else wanted) if wanted else {}
                if captioned := [row for row in wanted if row in texts]:
                    writer.append([id_of[row] for row in captioned], [texts[row] for row in captioned])
                progress.update(len(wanted))
        unreadable = [entry for _, entry in sorted(captioner.reader.unreadable.items())]
        failed = {} if arguments.endpoint is None else captioner.captioner.failed
        number = len(ids) - len(failed) - sum(entry.image_id not in writer.done for entry in unreadable)
    summary = _summary(arguments, output, split, number, before)
    if arguments.endpoint is not None:
        summary["endpoint"] = captioner.captioner.summary()
        summary["failed"] = [{"image_id": image_id, "reason": reason} for image_id, reason in failed.items()]
    return summary, unreadable, len(ids)
