"""The manifest and the card of boosted captions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.boosting.boosted_file import BoostedFile
    from hf_captionrl.boosting.options import BoostOptions

__all__ = ["BOOSTED_FILE", "rewrite_boosted_card", "write_boosted"]

BOOSTED_FILE = "boosting.json"
"""Manifest: settings and the facts of the card; published with the captions."""

_COLUMNS = {
    "image": "the image",
    "image_id": "its id in the source",
    "captions": "only the HolisticCap, for training",
    "references": "the human captions",
    "blend_caption": "BlendCap: the references, blended by the language model",
    "visual_caption": "VisualCap: description by the vision model",
    "holistic_caption": "HolisticCap: the BlendCap with the additional details of the VisualCap",
    "conflicts": "contradictions between HolisticCap and BlendCap, in words",
    "blend_source": "model, revision, prompt hash, time and attempt of the BlendCap",
    "visual_source": "the same for the VisualCap",
    "holistic_source": "the same for the HolisticCap",
}


def _name(folder: Path) -> str:
    """Name of the folder, as the Hub accepts it."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", folder.resolve().name).strip("-_")[:96] or "boosted"


def write_boosted(arguments: BoostOptions, written: BoostedFile, made_by: Mapping[str, Any]) -> Path:
    """Write `boosting.json` and the card beside the captions; `made_by`: model and revision of both backends."""
    import pyarrow.parquet

    from hf_captionrl.hub import DatasetCardFacts, public_values

    embedded = arguments.dataset == "scenes"
    source = "hf_captionrl scenes" if embedded else str(public_values(arguments.dataset))
    columns = pyarrow.parquet.read_schema(written.path).names
    by = "the facts of the scenes" if embedded else "word lists, which find only a few conflicts"
    split = "all splits" if arguments.split == "all" else f"the {arguments.split} split"
    named = {
        role: f"{public_values(made_by[name][0])}, revision {made_by[name][1] or 'not named'}"
        for role, name in (("language model", "text"), ("vision model", "vision"))
    }
    facts = DatasetCardFacts(
        dataset_id=arguments.repo_id or _name(written.path.parent),
        kind="boosted captions",
        file=written.path.name,
        source=source,
        source_license=arguments.source_license_of(arguments.dataset),
        description=f"Richer captions of {written.rows} images, {split} of {source}.",
        made_with={
            **named,
            "method": "Visual Caption Boosting (No Detail Left Behind, section 2), prompts of its Appendix A.1",
            "seed": arguments.seed,
        },
        columns={name: _COLUMNS.get(name, "as in the source") for name in columns},
        sizes={str(arguments.split): written.rows},
        license=arguments.license,
        checked=f"{written.conflicts} of {written.rows} HolisticCaps contradict their BlendCap, by {by}; {written.quarantined} rows were "
        "left out as unusable. No one has read the captions.",
        language=arguments.language,
        # Paths of image files cannot be published: a push requires --embed_images or --no_images.
        has_images="image" in columns,
    )
    return _write(written.path.parent, facts, {"rows": written.rows, "quarantined": written.quarantined})


def _write(folder: Path, facts: Any, counts: Mapping[str, Any]) -> Path:
    from hf_captionrl.hub import write_dataset_card
    from hf_captionrl.hub.manifest import public_versions
    from hf_captionrl.io import write_json

    card = write_dataset_card(folder, facts)
    write_json(folder / BOOSTED_FILE, {"format": 1, **counts, "card": asdict(facts), "versions": public_versions()})
    return card


def rewrite_boosted_card(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Render the card of boosted captions again from their manifest."""
    from hf_captionrl.hub import DatasetCardFacts

    path = folder / BOOSTED_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        facts = DatasetCardFacts(**manifest["card"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a manifest of boosted captions ({error}). Write it again with the same `captionrl boost` command."
        ) from None
    return _write(folder, replace(facts, **changes), {name: manifest.get(name) for name in ("rows", "quarantined")})
