"""`captionrl evaluate`: tables of several files of captions, side by side, from text alone or with images."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.cli.options import EvaluateOptions
from hf_captionrl.data.columns import CAPTIONS, id_column, replace_column
from hf_captionrl.data.options import LoadedSplit, load_split
from hf_captionrl.evaluation.caption_files import (
    CaptionFile,
    measured_images,
    read_files,
    read_references,
    training_of,
)
from hf_captionrl.evaluation.evaluator import (
    BEST,
    TABLES,
    Evaluator,
    Source,
    compare_with_first,
    human_captions,
    pool_images,
    read_bags,
    sle_row,
    source_row,
)
from hf_captionrl.evaluation.options import clip_prefix, load_evaluators
from hf_captionrl.evaluation.plots import write_length_histogram
from hf_captionrl.metrics.caption_checks import spoken, text_warnings
from hf_captionrl.metrics.columns import variants
from hf_captionrl.metrics.suites import BAG_SIZES, FUNCTIONS, bag_keys
from hf_captionrl.metrics.table import (
    REFERENCES,
    Section,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    print_comparison,
    without_repeats,
)
from hf_captionrl.metrics.words import characteristic_words, spacy_tagger
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.retrieval.ranking import duplicate_images
from hf_captionrl.text.tokenize import lacks_blanks, split_characters
from hf_captionrl.utils.io import (
    atomic_write_text,
    counted,
    escape_markdown,
    folded,
    installed_versions,
    plain_config,
    say,
    to_plain,
    write_json,
)

_WORDS_TITLE = "Words that distinguish the sources (local mutual information)"


def _texts(source: Source) -> list[str]:
    """All captions of a source that are scored."""
    return spoken([caption for group in source.captions for caption in (group[:1] if source.is_human else group)])


def _words(sources_of: Sequence[Source], references: Sequence[list[str]]) -> dict[str, Any]:
    """Typical nouns and adjectives of each source, or the reason why there are none."""
    sources = {source.name: _texts(source) for source in sources_of if not source.is_human}
    human = [caption for group in references for caption in group]
    sources |= {REFERENCES: human} if human else {}
    if len(sources) < 2:
        return {"reason": "no references, and one file of captions"}
    try:
        tagger = spacy_tagger()
    except ImportError as error:
        return {"reason": str(error)}
    result = characteristic_words(sources, tagger=tagger)
    words: dict[str, Any] = {"signature": result["signature"]}
    for kind, part in (("adjectives", "ADJ"), ("nouns", "NOUN")):
        words[kind] = {source: [word for word, _ in scored] for source, scored in result[part].items()}
    return words


def _words_lines(words: Mapping[str, Any]) -> list[str]:
    """The words as text, one line per source and kind."""
    if "reason" in words:
        return [f"not run: {words['reason']}"]
    kinds = ("adjectives", "nouns")
    return [f"{kind}, {name}: {', '.join(typical) or '–'}" for kind in kinds for name, typical in words[kind].items()]


def _count_copies(evaluator: Evaluator, num_images: int) -> int:
    """Number of images that are copies of earlier ones: false negatives of their captions. Prints a warning if there are any."""
    first = () if evaluator.image_features is None else duplicate_images(evaluator.image_features).tolist()
    copies = sum(other != row for row, other in enumerate(first))
    if copies:
        text = f"copies of other images: {copies} of {num_images}, which lowers the retrieval of both."
        say(folded(f"captionrl evaluate: {text} Leave them out, or merge them with metrics.self_retrieval."))
    return copies


_SUFFIXES = re.compile("(_ci|_ci_method|_reason|_difference|_p_value|_mark)$")


def _sections(
    names: Sequence[str], sources: Sequence[Source], evaluator: Evaluator, reasons: Mapping[str, str]
) -> tuple[dict[str, Section], dict[str, Any]]:
    """The chosen tables by name, and the signatures of their numbers."""
    tables = {name: TABLES[name] for name in names}
    tables |= {"preferences": TABLES["preferences"]} if evaluator.parts else {}
    tables["captions"] = TABLES["captions"]
    parts = ["rd100_recall_at_1", "hallucination"] if evaluator.parts else []
    bags = bag_keys(sorted({*BAG_SIZES, *evaluator.bags})) if "ndlb" in names else []
    keys = [column.key for name, (_, columns) in tables.items() if name != "sle" for column in columns]
    keys = [*dict.fromkeys(key for key in (*keys, *parts, *bags) if key in FUNCTIONS or key in bags)]
    several = any(source.number > 1 for source in sources)
    rows_of = {"": [source_row(each, evaluator, keys, with_best=several) for each in sources]}
    if "sle" in names:
        rows_of["sle"] = [sle_row(source, evaluator) for source in sources]
    for rows in rows_of.values():
        compare_with_first(rows, seed=evaluator.seed)
        for row in rows:
            row |= {key: reasons.get(row[key], row[key]) for key in row if key.endswith("_reason")}
    sections, signatures = {}, {}
    for name, (title, columns) in tables.items():
        if several and name != "sle":
            title += ", mean over an image's captions"
            columns += variants("best", ", best caption of an image", *(c for c in columns if c.key in BEST))
        shown = {"name", *(column.key for column in columns), *(bags if name == "ndlb" else ())}
        rows = rows_of.get(name, rows_of[""])
        signatures[name] = {key: value for key, value in rows[0]["signatures"].items() if key in shown}
        rows = [{key: value for key, value in row.items() if _SUFFIXES.sub("", key) in shown} for row in rows]
        sections[name] = Section(title, columns, rows)
    return sections, signatures


def _set_defaults(arguments: EvaluateOptions) -> None:
    """Set the options that depend on each other, and refuse those that need images where there are none."""
    arguments.dataset = arguments.dataset or ("scenes" if arguments.references is None else "none")
    is_text = arguments.dataset == "none"
    arguments.suite = arguments.suite or ("text" if is_text else "smile")
    if arguments.suite not in ("text", "smile", "all"):
        arguments.language_model = "none"
    if is_text:
        for name in "scorer pool bags split data_dir image_root dataset_config dataset_revision".split():
            value = getattr(arguments, name)
            if value not in (None, "none"):
                raise ValueError(
                    f"--{name} is {str(value)!r}, but without --dataset there are no images. Use --dataset."
                )
        arguments.scorer = "none"
    for name, path, suite in (("bags", arguments.bags, "ndlb"), ("pool", arguments.pool, "smile")):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"There is no file {str(path)!r} for --{name}. Use an existing one.")
        if path is not None and (arguments.suite not in (suite, "all") or arguments.scorer == "none"):
            raise ValueError(
                f"--{name} is {str(path)!r}, but only --suite {suite} ranks captions in it, with a scorer. Use --suite {suite} or all "
                f"with a --scorer, or leave --{name} out."
            )


def _captioned_images(
    arguments: EvaluateOptions, files: Sequence[CaptionFile], references: CaptionFile | None
) -> LoadedSplit:
    """The images that the captions name, without pixels, and their references."""
    ids = measured_images(files, references)
    if references is not None and len(references.captions) > len(ids):
        text = f"the other {len(references.captions) - len(ids):,} of the {len(references.captions):,} images of"
        count = counted(len(ids), "image")
        say(folded(f"captionrl evaluate: captions of {count}; {text} {references.path} are left out."))
    shown = ids[: arguments.max_images]
    captions = [[] if references is None else references.captions[i] for i in shown]
    kinds = datasets.Features({"image_id": datasets.Value("string"), "captions": CAPTIONS})
    rows = datasets.Dataset.from_dict({"image_id": shown, "captions": captions}, features=kinds)
    return LoadedSplit(rows, RowLookup(ids), "all", {"all": len(ids)})


_REASONS = {"no language model": "no language model (use --language_model, for example openai-community/gpt2)"}
_TEXT_ALONE = {
    "no scorer": "no images (use --dataset and --scorer)",
    "no scorer, or one that does not count tokens": "no images (use --dataset and --scorer)",
    "no references": "no references (use --references)",
}


def evaluate_captions(arguments: EvaluateOptions) -> None:
    """Compare the files."""
    _set_defaults(arguments)
    files = read_files(arguments.captions, arguments.names)  # before anything slow
    references = None if arguments.references is None else read_references(arguments.references)
    is_text, folder = arguments.dataset == "none", arguments.output_dir
    scorer, language_model, reasons = load_evaluators(arguments.dataset, arguments.scorer, arguments.language_model)
    asked = arguments.split
    if is_text:
        split = _captioned_images(arguments, files, references)
    else:
        needs_captions = None if references is None and not arguments.no_references else False
        split = load_split(arguments, quarantine_path=folder / "quarantine.jsonl", require_captions=needs_captions)
    rows, data = split.dataset, arguments.dataset
    if references is not None and not is_text:
        ids = list(id_column(rows))
        measured_images([CaptionFile(data, Path(data), {i: [] for i in ids})], references)  # raises if one has none
        rows = replace_column(rows, "captions", [references.captions[i] for i in ids], CAPTIONS)
    for file in files:
        model, trained = training_of(file.path)
        rows = arguments.without(rows, trained & set(id_column(rows)), model)
    split, known = split._replace(dataset=rows), split.all_ids
    if not is_text and asked not in (None, "all") and any(set(file.captions).difference(known) for file in files):
        # A file may also hold captions of other splits.
        whole = replace(arguments, split="all", max_images=None)
        known = load_split(whole, quarantine_path=None, require_captions=False).all_ids
    ids = id_column(split.dataset)
    described = [{"name": file.name, "path": str(file.path), "captions": len(file.captions)} for file in files]
    aligned = [files.pop(0).aligned(ids, known) for _ in described]
    reasons = _REASONS | (_TEXT_ALONE if is_text else {"no references": _TEXT_ALONE["no references"]}) | reasons
    evaluator = Evaluator(split.dataset, scorer, language_model, seed=arguments.seed, cache_dir=arguments.cache_dir)
    evaluator.tokenize = arguments.tokenize
    evaluator.clip_prefix = clip_prefix(arguments.clip_prefix, arguments.dataset, arguments.scorer)
    if arguments.pool is not None and scorer is not None:
        whole = replace(arguments, split="all", max_images=None)
        every = load_split(whole, quarantine_path=None, require_captions=False)
        evaluator.pool_features = evaluator.features_of(pool_images(arguments.pool, split.dataset, every.dataset))
    if arguments.bags is not None:
        evaluator.bags = read_bags(arguments.bags, ids)
    sources = [
        Source(str(file["name"]), captions, evaluator.references)
        for file, captions in zip(described, aligned, strict=True)
    ]
    if arguments.tokenize == "ptb" and any(lacks_blanks(_texts(source)) for source in sources):
        text = "most captions of a file have no blanks, and count as one word each. Use --tokenize char."
        say(folded(f"captionrl evaluate: {text}"))
    for each in sources:
        for text in text_warnings(each.captions, each.references):
            say(folded(f"captionrl evaluate: {each.name}: {text}"))
    human = None if arguments.no_references else human_captions(evaluator)
    if human is not None:
        sources.append(human)
    names = ["text", "smile", "discritune", "sle", "ndlb"] if arguments.suite == "all" else [str(arguments.suite)]
    if "sle" not in names and any(source.number > 1 for source in sources):
        names.append("sle")
    copies = _count_copies(evaluator, len(ids))
    sections, signatures = _sections(names, sources, evaluator, reasons)
    shown = without_repeats(list(sections.values()))
    words = _words(sources, evaluator.references) if "discritune" in names else None

    result: dict[str, Any] = {
        "suite": arguments.suite,
        "num_images": len(ids),
        "num_images_left_out": len(references.captions) - len(ids) if references is not None else 0,
        "num_duplicate_images": copies,
        "files": described,
        "scorer": None if scorer is None else scorer.signature,
        "tables": {name: {"title": section.title, "rows": section.rows} for name, section in sections.items()},
        "signatures": signatures,
        "words": words,
        "seed": arguments.seed,
        "config": plain_config({k: v for k, v in vars(arguments).items() if k not in ("traceback", "json")}),
        "versions": installed_versions(),
    }
    write_json(folder / "comparison.json", result)
    source = arguments.dataset if references is None or not is_text else references.path
    title = counted(len(ids), "image") + ("" if source == "none" else f" of {Path(source).name}")
    text = comparison_markdown(shown, title=title)
    if words is not None:
        text += f"\n## {_WORDS_TITLE}\n\n" + "".join(f"- {escape_markdown(line)}\n" for line in _words_lines(words))
    atomic_write_text(folder / "comparison.md", text)
    atomic_write_text(folder / "comparison.csv", comparison_csv(shown))
    atomic_write_text(folder / "comparison.tex", comparison_latex(shown))
    words_of = split_characters if arguments.tokenize == "char" else list
    lengths = {source.name: [len(text.split()) for text in words_of(_texts(source))] for source in sources}
    write_length_histogram(folder / "lengths.png", lengths)
    written = [f"comparison.{suffix}" for suffix in ("json", "md", "csv", "tex")] + ["lengths.png"]
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print_comparison(shown)
    if words is not None:
        print("\n  ".join([_WORDS_TITLE, *_words_lines(words)]))
    print(folded(f"Written to {folder}: {', '.join(written)}"))
