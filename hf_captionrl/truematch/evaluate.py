"""`captionrl truematch evaluate` and `leaderboard`: captioners on a benchmark of look-alikes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import DatasetOptions, load_split
from hf_captionrl.truematch.build import print_status
from hf_captionrl.truematch.files import DATA_FOLDER, TrueMatch, bags_fingerprint, load_truematch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hf_captionrl.evaluation.caption_files import CaptionFile
    from hf_captionrl.evaluation.dataset_options import LoadedSplit
    from hf_captionrl.reports.table import Column

__all__ = ["COLUMNS", "evaluate", "leaderboard"]

COLUMNS = ("rd100_recall_at_1", "cider_d", "clip_score", "hallucination", "fact_recall")
"""Numbers that stand beside the bags': random distractors, and whether the captions are true to their images."""

_FORMAT = "truematch-results-1"


def _split(arguments: argparse.Namespace, found: TrueMatch) -> tuple[LoadedSplit, argparse.Namespace]:
    """Images and captions, checked; and arguments that name them, for whoever captions them."""
    named = argparse.Namespace(**vars(arguments))
    if arguments.dataset is None:
        if not found.manifest.get("embed_images"):
            raise ValueError(
                f"{found.folder} was built without images. Say where they are: --dataset {found.manifest['source']} and its "
                "options, as for the build."
            )
        named.dataset, named.split = str((found.folder / DATA_FOLDER).resolve()), "test"
    return load_split(named, quarantine_path=arguments.output_dir / "quarantine.jsonl"), named


def _caption(model: str, named: argparse.Namespace, folder: Path) -> Path:
    """Let a model caption the images, or resume it; the same as `captionrl caption`."""
    from hf_captionrl.evaluation.write_captions import CaptionOptions, write_captions

    file_name = "".join(c if c.isalnum() or c in "-." else "_" for c in model).strip("._") or "model"
    output = folder / "captions" / f"{file_name}.jsonl"
    images = {field.name: getattr(named, field.name) for field in dataclasses.fields(DatasetOptions)}
    options = CaptionOptions(**{**images, "json": False, "model": model, "output": output})
    with contextlib.redirect_stdout(sys.stderr):  # the standard output may be JSON
        write_captions(options)
    return output


def _files(arguments: argparse.Namespace, named: argparse.Namespace) -> list[CaptionFile]:
    """What is to be judged: files, then models."""
    from hf_captionrl.evaluation.caption_files import read_caption_file
    from hf_captionrl.evaluation.caption_sources import source_names

    names = source_names([*arguments.captions, *arguments.models], arguments.names)
    if not names and not arguments.references:
        raise ValueError("There is nothing to evaluate. Pass --captions, --models or --references.")
    paths = list(arguments.captions)
    given = [
        read_caption_file(path, name=name) for path, name in zip(paths, names, strict=False)
    ]  # before anything slow
    for model, name in zip(arguments.models, names[len(paths) :], strict=True):
        given.append(read_caption_file(_caption(model, named, arguments.output_dir), name=name))
    return given


def _columns(sizes: Iterable[int]) -> list[Column]:
    """The columns of the table, of bags of these sizes."""
    from hf_captionrl.evaluation.paper_tables import TABLES
    from hf_captionrl.reports.table import Column

    known = {column.key: column for column in TABLES["ndlb"].columns}
    own = [Column(f"bag_{k}_recall_at_1", f"R@1, bags of {k}", "higher", is_fraction=True) for k in sorted(sizes)]
    return [*own, *(known[key] for key in COLUMNS)]


def _hits(row: Mapping[str, Any], bag_names: Mapping[int, Sequence[str]], ids: Sequence[str]) -> dict[str, Any]:
    """Every success of a captioner by the name of its bag or image, so that leaderboards can compare results."""
    found = {}
    for key, names in (
        *((f"bag_{size}_recall_at_1", names) for size, names in bag_names.items()),
        ("rd100_recall_at_1", ids),
    ):
        if row.get(key) is not None:
            groups = [names[number] for number in row["groups"][key]]
            found[key] = {"values": row["per_sample"][key], "groups": groups}
    return found


def evaluate(arguments: argparse.Namespace) -> None:
    """Judge captioners on the benchmark; writes results.json and results.md."""
    found = load_truematch(arguments.folder)
    bags = found.bags if arguments.all_bags else found.kept
    arguments.output_dir = arguments.output_dir or Path("outputs") / found.folder.resolve().name

    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.evaluation.paper_tables import TABLES, compare_with_first
    from hf_captionrl.evaluation.scored_captions import human_captions, load_evaluators, score_captions
    from hf_captionrl.io import atomic_write_text, to_plain, write_json
    from hf_captionrl.reports.comparison import Section, comparison_markdown, print_comparison
    from hf_captionrl.reports.versions import installed_versions
    from hf_captionrl.truematch.decisions import bag_id

    for path in arguments.captions:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r} for --captions.")
    split, named = _split(arguments, found)
    dataset = split.dataset
    if arguments.bag_images_only:
        wanted = {image_id for bag in bags.bags for image_id in bag}
        dataset = dataset.select([row for row, i in enumerate(dataset["image_id"][:]) if str(i) in wanted])
    ids = [str(i) for i in dataset["image_id"][:]]
    rows_of = bags.rows(ids)  # refuses images that are not there, before any model is asked
    files = _files(arguments, named)
    aligned = [file.aligned(ids, split.all_ids) for file in files]

    scorer, _, reasons = load_evaluators(found.manifest["source"], arguments.scorer, "none")
    if scorer is None:
        why = reasons.get("no scorer", "--scorer is 'none'")
        raise ValueError(f"Retrieval needs a scorer, and {why}. Pass another --scorer.")
    evaluator = Evaluator(dataset, scorer, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    evaluator.bags = rows_of
    pairs = zip(files, aligned, strict=True)
    scored = [score_captions(evaluator, file.name, c, evaluator.references) for file, c in pairs]
    if arguments.references:
        human = human_captions(evaluator)
        if human is None:
            raise ValueError("--references needs two references or more for every image. Leave it out.")
        scored.append(human)

    columns = _columns(rows_of)
    rows = [{"name": source.name, **TABLES["ndlb"].compute(source, evaluator)} for source in scored]
    signatures = rows[0]["signatures"]
    compare_with_first(rows, seed=arguments.seed)
    names_of = {size: [bag_id([ids[row] for row in bag]) for bag in group] for size, group in rows_of.items()}
    hits = {row["name"]: _hits(row, names_of, ids) for row in rows}
    keys = tuple(column.key for column in columns)
    shown = [{"name": row["name"], **{k: v for k, v in row.items() if k.startswith(keys)}} for row in rows]
    result: dict[str, Any] = {
        "format": _FORMAT,
        "benchmark": found.manifest["card"]["dataset_id"],
        "fingerprint": bags_fingerprint(bags),
        "bags": {str(size): len(group) for size, group in rows_of.items()},
        "review": found.status(),
        "num_images": len(ids),
        "scorer": scorer.signature,
        "scorer_made_the_bags": scorer.signature == bags.signature,
        "rows": shown,
        "hits": hits,
        "signatures": {column.key: signatures[column.key] for column in columns if column.key in signatures},
        "seed": arguments.seed,
        "versions": installed_versions(),
    }
    section = Section(f"{result['benchmark']}, judged by {scorer.signature.partition('|')[0]}", columns, shown)
    title = f"{', '.join(f'{n} bags of {size}' for size, n in result['bags'].items())}; {len(ids)} images"
    atomic_write_text(arguments.output_dir / "results.md", comparison_markdown([section], title=title))
    write_json(arguments.output_dir / "results.json", result)
    if result["scorer_made_the_bags"]:
        print(
            "captionrl truematch: the scorer that judges is the one that made the bags, which makes them harder for it than "
            "for another. Pass another --scorer.",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print_status(found)
    print_comparison([section])
    print(f"Written to {arguments.output_dir}: results.json, results.md")


def _read_results(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Write one with `captionrl truematch evaluate`.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}). Write it again with `captionrl truematch evaluate`.") from None
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no results of `captionrl truematch evaluate`. Give its results.json.")
    return value


def leaderboard(arguments: argparse.Namespace) -> None:
    """Put results into one table, the best first; writes leaderboard.md and leaderboard.html."""
    from hf_captionrl.truematch.leaderboard import write_leaderboard

    found = load_truematch(arguments.folder)
    files = [(path, _read_results(path)) for path in arguments.results]
    first_path, first = files[0]
    rows: list[dict[str, Any]] = []
    hits: dict[str, Any] = {}
    for path, result in files:
        for what in ("fingerprint", "scorer", "num_images"):
            if result[what] != first[what]:
                raise ValueError(
                    f"{path} has {what} {result[what]!r} and {first_path} {first[what]!r}: other bags, images or judges give other "
                    "numbers. Evaluate again on this benchmark as it stands."
                )
        for row in result["rows"]:
            if row["name"] in hits and hits[row["name"]] != result["hits"][row["name"]]:
                raise ValueError(f"{path}: there are other results of {row['name']!r} already. Pass --names there.")
            if row["name"] not in hits:
                rows.append({k: v for k, v in row.items() if not k.endswith(("_mark", "_p_value", "_difference"))})
                hits[row["name"]] = result["hits"][row["name"]]
    now = bags_fingerprint(found.kept)
    if first["fingerprint"] not in (now, bags_fingerprint(found.bags)):
        raise ValueError(
            f"The results are of other bags ({first['fingerprint']}) than {arguments.folder} has now ({now}): the review went on, "
            "or they are of another benchmark. Evaluate again."
        )
    columns = _columns(map(int, first["bags"]))
    key = "rd100_recall_at_1" if arguments.sort_by == "rd100" else f"bag_{arguments.sort_by}_recall_at_1"
    if key not in {column.key for column in columns} or any(row.get(key) is None for row in rows):
        sizes = ", ".join(first["bags"])
        raise ValueError(
            f"--sort_by {arguments.sort_by!r} was not measured for every row. Use one of {sizes} or rd100."
        )
    folder = arguments.output_dir or arguments.folder
    note = (
        f"{', '.join(f'{n} bags of {size}' for size, n in first['bags'].items())}; {first['num_images']} images; judged by "
        f"{first['scorer'].partition('|')[0]}; bags {first['fingerprint']}."
    )
    ranked = write_leaderboard(
        folder,
        rows,
        {name: values.get(key) for name, values in hits.items()},
        columns=columns,
        key=key,
        title=f"Leaderboard of {first['benchmark']}",
        note=note,
        seed=arguments.seed,
    )
    if arguments.json:
        print(json.dumps({"sorted_by": key, "rows": ranked}, ensure_ascii=False))
        return
    for row in ranked:
        low, high = row[f"{key}_ci"]
        print(f"{row['place']:>3}  {row[key]:.3f} [{low:.3f}, {high:.3f}]  {row['name']}{row['remark']}")
    print(f"Written to {folder}: leaderboard.md, leaderboard.html")
