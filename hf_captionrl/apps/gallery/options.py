"""Options of `captionrl gallery`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from hf_captionrl.data.options import DatasetOptions, HeldOutScorerOptions
from hf_captionrl.utils.options import DeviceOptions, Positive, Range, SeedOptions, WritingOptions, option


@dataclass
class GalleryOptions(SeedOptions, WritingOptions, DeviceOptions, HeldOutScorerOptions, DatasetOptions):
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
        None, group="choice", metavar="FILE", help="bags of `captionrl bags` (default: the data set's column bag_id)"
    )
    bag_size: Positive | None = option(
        None, group="choice", metavar="K", help="images per bag (default: 5, or the smallest size)"
    )
    max_bags: Positive = option(8, group="choice", metavar="N", help="number of bags to show")
    max_shown: Positive = option(24, group="choice", metavar="N", help="images of errors.html and pairs of cider.html")
    min_gap: Annotated[float, Range(at_least=0)] = option(
        0.0, group="choice", metavar="X", help="cider.html: smallest difference in CIDEr-D, exclusive"
    )
    max_cider: Annotated[float, Range(above=0)] = option(
        0.1, group="choice", metavar="X", help="unrewarded.html: largest CIDEr-D of a right caption, exclusive"
    )
    num_beams: Positive = option(3, group="captioner", metavar="N", help="number of beams of captioners")
