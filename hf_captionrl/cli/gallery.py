"""`captionrl gallery`: captions of several systems side by side, their errors marked, and where CIDEr-D fails."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.cli.arguments import add_common, add_dataset, positive
from hf_captionrl.evaluation.caption_sources import source_names
from hf_captionrl.evaluation.dataset_options import load_split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_captionrl.evaluation.dataset_options import LoadedSplit
    from hf_captionrl.evaluation.evaluator import Evaluator

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Show what several captioners write about the same images. Writes gallery.json, and pages that need nothing else:
bags.html, bags of look-alikes with the rank of each caption in its bag; errors.html, wrong claims marked where they
stand, those that are true of something else in the scene apart (images of the embedded world, whose truth is known);
cider.html, pairs of captions of which CIDEr-D prefers the worse, found by rule, counted, the widest gap first;
unrewarded.html, captions that say only what is right and that CIDEr-D gives next to nothing (embedded world).
"""

_EPILOG = """\
captions: files that `captionrl caption` writes, or captioners: a folder, a name on the Hub, or scenes:blip-mle. A captioner
captions every image that is used, which takes its time: cut them with --max_images, or caption once and give the file.

examples:
  captionrl gallery --captions scenes:blip-mle scenes:clipcap-mle --max_images 105
  captionrl gallery --captions mle.jsonl smile.jsonl sr.jsonl --names MLE SMILE SR --dataset scenes --bag_size 3
  captionrl gallery --captions mle.jsonl sr.jsonl --dataset dataset_coco.json --image_root coco --bags truematch.parquet

HolisticCaps as references, after `captionrl boost --dataset scenes --output boosted --embed_images`:
  captionrl gallery --captions scenes:blip-mle scenes:blip-sr --dataset boosted/captions.parquet --split train \\
      --scorer scenes:clip-judge
"""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "gallery",
        help="show captions of several systems side by side, errors marked",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--captions", nargs="+", required=True, metavar="FILE_OR_MODEL", help="files of captions, or captioners"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call them (default: the files' names)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/gallery"), metavar="DIR", help="(default: %(default)s)"
    )
    add_dataset(parser)
    group = parser.add_argument_group("choice")
    group.add_argument(
        "--bags", type=Path, metavar="FILE", help="bags of `captionrl bags` (default: the data set's column bag_id)"
    )
    group.add_argument(
        "--bag_size", type=positive, metavar="K", help="images of a bag (default: 5, or the smallest there is)"
    )
    group.add_argument("--max_bags", type=positive, default=8, metavar="N", help="bags shown (default: %(default)s)")
    group.add_argument(
        "--max_shown", type=positive, default=24, metavar="N", help="images of errors.html and cases of cider.html"
    )
    group.add_argument(
        "--min_gap", type=float, default=0.0, metavar="X", help="CIDEr-D must differ by more (default: %(default)s)"
    )
    group.add_argument(
        "--max_cider",
        type=float,
        default=0.1,
        metavar="X",
        help="unrewarded.html: CIDEr-D of right captions is below (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of bags (default: %(default)s)")
    group = parser.add_argument_group("judge and captioners")
    group.add_argument(
        "--scorer",
        metavar="NAME",
        help="dual encoder that judges: a folder, a name on the Hub, open_clip:NAME@TAG, scenes:clip-judge, or 'none' "
        "(default: scenes:clip-judge on the embedded world, else openai/clip-vit-base-patch32)",
    )
    group.add_argument("--cache_dir", metavar="DIR", help="folder of the feature cache")
    group.add_argument(
        "--num_beams", type=positive, default=3, metavar="N", help="of captioners (default: %(default)s)"
    )
    group.add_argument("--max_new_tokens", type=positive, default=40, metavar="N", help="(default: %(default)s)")
    group.add_argument("--batch_size", type=positive, default=16, metavar="N", help="(default: %(default)s)")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    add_common(parser)
    parser.set_defaults(run=run)


def _captions(
    arguments: argparse.Namespace, names: Sequence[str], split: LoadedSplit, ids: list[str]
) -> dict[str, list[str]]:
    """The first caption of each image, of each source."""
    import torch

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.evaluation.caption_files import read_caption_file
    from hf_captionrl.scenes.models import model_path
    from hf_captionrl.trainers.caption_generation import LazyImages, generate_captions

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    files = {
        name: read_caption_file(source, name=name).aligned(ids, split.all_ids)
        for name, source in zip(names, arguments.captions, strict=True)
        if Path(source).is_file() or Path(source).suffix == ".jsonl"
    }
    found = {}
    for name, source in zip(names, arguments.captions, strict=True):
        if name in files:
            found[name] = [group[0] for group in files[name]]
            continue
        found[name] = generate_captions(
            load_captioner(model_path(source), device=device),
            LazyImages(split.dataset, range(len(split.dataset))),
            batch_size=arguments.batch_size,
            do_sample=False,
            num_beams=arguments.num_beams,
            max_new_tokens=arguments.max_new_tokens,
        )
    return found


def _choose_bags(arguments: argparse.Namespace, evaluator: Evaluator, ids: list[str]) -> list[list[int]]:
    """Bags of one size, drawn by the seed, in the order of the data set."""
    bags = evaluator.bags
    if arguments.bags is not None:
        from hf_captionrl.retrieval.bag_files import load_bags

        bags = load_bags(arguments.bags, image_ids=ids).rows(ids)
    sizes = sorted(size for size, found in bags.items() if found)
    if arguments.bag_size is not None and arguments.bag_size not in sizes:
        raise ValueError(f"There is no whole bag of {arguments.bag_size} images here; there are bags of {sizes}.")
    if not sizes:
        return []
    found = bags[arguments.bag_size or (5 if 5 in sizes else sizes[0])]
    chosen = random.Random(arguments.seed).sample(range(len(found)), min(arguments.max_bags, len(found)))
    return [found[number] for number in sorted(chosen)]


def run(arguments: argparse.Namespace) -> None:
    """Write the pages."""
    names = source_names(arguments.captions, arguments.names)  # before anything slow
    if arguments.min_gap < 0:
        raise ValueError(f"--min_gap must be at least 0, got {arguments.min_gap}.")
    if arguments.max_cider <= 0:
        raise ValueError(f"--max_cider must be above 0, got {arguments.max_cider}.")

    from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.gallery.caption_errors import error_counts
    from hf_captionrl.gallery.cider import CiderScores, cider_note
    from hf_captionrl.gallery.pages import (
        Pages,
        Shown,
        bag_items,
        counted,
        write_cider,
        write_errors,
        write_unrewarded,
    )
    from hf_captionrl.io import to_plain, write_json
    from hf_captionrl.reports.versions import installed_versions

    folder = arguments.output_dir
    split = load_split(arguments, quarantine_path=folder / "quarantine.jsonl")
    ids = [str(i) for i in split.dataset["image_id"][:]]
    held_out_scorer = EvaluationArguments(held_out_scorer_name_or_path=arguments.scorer)
    held_out_scorer.resolve(arguments.dataset, trains=False)
    captions = _captions(arguments, names, split, ids)
    evaluator = Evaluator(
        split.dataset,
        optional_scorer(held_out_scorer.held_out_scorer_name_or_path),
        None,
        seed=arguments.seed,
        cache_dir=arguments.cache_dir,
    )
    bags = _choose_bags(arguments, evaluator, ids)
    shown = Shown(evaluator, captions)
    errors = {name: error_counts(marks) for name, marks in shown.marks.items()}
    cider = CiderScores(shown.captions, evaluator, shown.ranks)

    pages = Pages(folder, f"{len(ids)} images of {Path(arguments.dataset).name}, {arguments.split}")
    pages.write(
        "bags.html",
        bag_items(shown, bags),
        title="The same bags, captioned by " + ", ".join(names),
        note="Each caption's rank is that of its own image in the bag.",
        told=f"{len(bags)} bags",
    )
    write_errors(pages, shown, errors, arguments.max_shown)
    failures = write_cider(pages, shown, cider, arguments.min_gap, arguments.max_shown)
    unrewarded = write_unrewarded(pages, shown, cider, arguments.max_cider, arguments.max_shown)
    pages.remove_others()
    result: dict[str, Any] = {
        "num_images": len(ids),
        "sources": dict(zip(names, map(str, arguments.captions), strict=True)),
        "scorer": None if evaluator.held_out_scorer is None else evaluator.held_out_scorer.signature,
        "bags": [[ids[row] for row in bag] for bag in bags],
        "errors": errors or None,
        "cider": failures,
        "unrewarded": unrewarded,
        "seed": arguments.seed,
        "versions": installed_versions(),
        "pages": pages.written,
    }
    write_json(folder / "gallery.json", result)
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    for name, counts in errors.items():
        print(f"{name}: {counted(counts)}")
    if failures is not None:
        print(cider_note(failures))
    told = [f"{name} ({what})" for name, what in pages.written.items()]
    print(f"Written to {folder}: {', '.join([*told, 'gallery.json'])}")
