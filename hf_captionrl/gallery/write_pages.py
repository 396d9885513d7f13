"""`captionrl gallery`: captions of several systems side by side, their errors marked, and where CIDEr-D fails."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_captionrl.evaluation.caption_sources import source_names
from hf_captionrl.evaluation.dataset_options import DatasetOptions, HeldOutScorerOptions, device_option, load_split
from hf_captionrl.options import option, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_captionrl.evaluation.dataset_options import LoadedSplit
    from hf_captionrl.evaluation.evaluator import Evaluator

__all__ = ["GalleryOptions", "write_pages"]


@dataclass
class GalleryOptions(HeldOutScorerOptions, DatasetOptions):
    """Show what several captioners write about the same images.

    Writes gallery.json and self-contained pages:

      bags.html        bags of look-alikes with the rank of each caption in its bag
      errors.html      wrong claims, marked; claims that are true of another object have another mark (embedded world)
      cider.html       pairs of captions of which CIDEr-D prefers the worse, found by rule and counted, widest gap first
      unrewarded.html  captions with right claims only whose CIDEr-D is close to 0 (embedded world)

    errors.html and unrewarded.html need facts, which only the embedded world has.
    """

    examples: ClassVar[str] = """
        captions: files that `captionrl caption` writes, or captioners: a folder, a name on the Hub, or scenes:blip-mle. A
        captioner captions every image, which is slow: use fewer with --max_images, or caption once and give the file.

        examples:
          captionrl gallery --captions scenes:blip-mle scenes:clipcap-mle --max_images 105
          captionrl gallery --captions mle.jsonl smile.jsonl sr.jsonl --names MLE SMILE SR --dataset scenes --bag_size 3
          captionrl gallery --captions mle.jsonl sr.jsonl --dataset dataset_coco.json --image_root coco \\
              --bags truematch.parquet

        HolisticCaps as references, after `captionrl boost --dataset scenes --output boosted --embed_images`:
          captionrl gallery --captions scenes:blip-mle scenes:blip-sr --dataset boosted/captions.parquet --split train \\
              --scorer scenes:siglip-held-out
    """

    captions: list[str] = option(metavar="FILE_OR_MODEL", help="files of captions, or captioners")
    names: list[str] | None = option(None, metavar="NAME", help="names on the pages (default: file and model names)")
    output_dir: Path = option(Path("outputs/gallery"), metavar="DIR", help="folder to write")
    bags: Path | None = option(
        None,
        group="choice",
        metavar="FILE",
        help="bags of `captionrl bags` (default: the data set's column bag_id)",
    )
    bag_size: int | None = option(
        None, parse=positive, group="choice", metavar="K", help="images per bag (default: 5, or the smallest size)"
    )
    max_bags: int = option(8, parse=positive, group="choice", metavar="N", help="number of bags to show")
    max_shown: int = option(
        24, parse=positive, group="choice", metavar="N", help="images of errors.html and pairs of cider.html"
    )
    min_gap: float = option(
        0.0, group="choice", metavar="X", help="cider.html: smallest difference in CIDEr-D, exclusive"
    )
    max_cider: float = option(
        0.1, group="choice", metavar="X", help="unrewarded.html: largest CIDEr-D of a right caption, exclusive"
    )
    seed: int = option(0, group="choice", metavar="N", help="seed of the choice of bags")
    num_beams: int = option(3, parse=positive, group="captioners", metavar="N", help="number of beams of captioners")
    max_new_tokens: int = option(40, parse=positive, group="captioners", metavar="N", help="longest caption in tokens")
    batch_size: int = option(16, parse=positive, group="captioners", metavar="N", help="images captioned at once")
    device: str | None = device_option(group="captioners")


def _captions(
    arguments: GalleryOptions, names: Sequence[str], split: LoadedSplit, ids: list[str]
) -> dict[str, list[str]]:
    """For each source, the first caption of each image."""
    import torch

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.engine import MANIFEST
    from hf_captionrl.evaluation.caption_files import read_caption_file
    from hf_captionrl.scenes.models import model_path
    from hf_captionrl.trainers.caption_generation import LazyImages, generate_captions

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    files = {
        name: read_caption_file(source, name=name).aligned(ids, split.all_ids)
        for name, source in zip(names, arguments.captions, strict=True)
        if Path(source).is_file() or Path(source).suffix == ".jsonl" or (Path(source) / MANIFEST).is_file()
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


def _choose_bags(arguments: GalleryOptions, evaluator: Evaluator, ids: list[str]) -> list[list[int]]:
    """Random bags of one size, in the order of the data set."""
    bags = evaluator.bags
    if arguments.bags is not None:
        from hf_captionrl.retrieval.bag_files import load_bags

        bags = load_bags(arguments.bags, image_ids=ids).rows(ids)
    sizes = sorted(size for size, found in bags.items() if found)
    if arguments.bag_size is not None and arguments.bag_size not in sizes:
        raise ValueError(
            f"There is no complete bag of {arguments.bag_size} images. Use --bag_size with one of {sizes}."
        )
    if not sizes:
        return []
    found = bags[arguments.bag_size or (5 if 5 in sizes else sizes[0])]
    chosen = random.Random(arguments.seed).sample(range(len(found)), min(arguments.max_bags, len(found)))
    return [found[number] for number in sorted(chosen)]


def write_pages(arguments: GalleryOptions) -> None:
    """Write the pages."""
    names = source_names(arguments.captions, arguments.names)  # before anything slow
    if arguments.min_gap < 0:
        raise ValueError(f"--min_gap must be at least 0, got {arguments.min_gap}.")
    if arguments.max_cider <= 0:
        raise ValueError(f"--max_cider must be above 0, got {arguments.max_cider}.")

    from hf_captionrl.evaluation.arguments import EvaluationArguments, optional_scorer
    from hf_captionrl.evaluation.evaluator import Evaluator
    from hf_captionrl.gallery.caption_errors import error_counts
    from hf_captionrl.gallery.cider_examples import CiderScores, cider_note
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
    held_out_scorer.resolve(arguments.dataset, is_training=False)
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
        note="The rank of a caption is that of its image in the bag.",
        summary=f"{len(bags)} bags",
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
    summary = [f"{name} ({what})" for name, what in pages.written.items()]
    print(f"Written to {folder}: {', '.join([*summary, 'gallery.json'])}")
