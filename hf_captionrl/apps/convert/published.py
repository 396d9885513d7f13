"""Checkpoints of the published code of BLIP, CLIP and ClipCap, identified by the names of their tensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_captionrl.captioners import clipcap
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.utils.io import atomic_write_text, write_json
from hf_captionrl.utils.model_files import model_path, read_config, read_object

if TYPE_CHECKING:
    from hf_captionrl.captioners.clipcap import ClipCapForConditionalGeneration


# --- Sizes of a model from the shapes of its tensors, and a comparison of two sets of shapes -------------------------


def tower_sizes(state: Mapping[str, Tensor], layers: str, mlp: str, width: int, heads: int | None) -> dict[str, int]:
    """Sizes of a transformer whose layers are named by a prefix and a number, with a first matrix `mlp`."""
    return {
        "hidden_size": width,
        "intermediate_size": state[f"{layers}0.{mlp}.weight"].shape[0],
        "num_hidden_layers": len({n.removeprefix(layers).partition(".")[0] for n in state if n.startswith(layers)}),
        "num_attention_heads": head_count(width, heads),
    }


def head_count(width: int, given: int | None = None) -> int:
    """Number of attention heads: the given one, or those of width 64, as in BERT, ViT, CLIP and BLIP of every size."""
    heads = given or width // 64
    if not heads or width % heads:
        raise ValueError(
            f"A width of {width} cannot be split into {f'{given} heads' if given else 'heads of 64'}. Use --config with a "
            "folder whose config.json has the number of heads."
        )
    return heads


def side(count: int, what: str) -> int:
    """Side of a square grid with `count` positions."""
    root = math.isqrt(max(count, 0))
    if root < 1 or root * root != count:
        raise ValueError(f"{what} ({count}) are not a square. Use a checkpoint as it was released.")
    return root


def misfits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first differences in names and shapes between two sets of tensors; empty if they fit."""
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    wrong += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    wrong += [
        f"{name} is {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    return "; ".join(wrong[:5]) + ("; ..." if len(wrong) > 5 else "")


# --- The report of a conversion --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileRecord:
    """Name, size in bytes and hash of a file."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.name, path.stat().st_size, digest)


@dataclass
class Report:
    """Files that a conversion read and wrote."""

    kind: str  # what the source is
    source: str
    output: str
    read: list[FileRecord] = field(default_factory=list)
    written: list[FileRecord] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)  # of the tensors that were read
    copied: list[str] = field(default_factory=list)  # names of other files
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"read   {f.name}  {f.bytes:,} bytes  sha256 {f.sha256}" for f in self.read]
        lines += [f"wrote  {f.name}  {f.bytes:,} bytes  sha256 {f.sha256}" for f in self.written]
        lines += [f"dtypes {', '.join(self.dtypes)}"] if self.dtypes else []
        lines += [f"copied {', '.join(self.copied)}"] if self.copied else []
        return [*lines, *self.notes, f"{self.output}: {self.kind}."]


# --- Captioners of BLIP's published code, renamed for `BlipForConditionalGeneration` ---------------------------------
# The renaming is documented by transformers' `convert_blip_original_pytorch_to_hf.py`. Names that no rule knows stay as they
# are, and the comparison with the model class refuses them.


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for theirs, ours in rules.items():
        name = name.replace(theirs, ours)
    return name


_POSITIONS = "vision_model.embeddings.position_embedding"
_PATCHES = "vision_model.embeddings.patch_embedding.weight"
_BLIP_RULES = {
    "visual_encoder.cls_token": "vision_model.embeddings.class_embedding",
    "visual_encoder.pos_embed": _POSITIONS,
    "visual_encoder.patch_embed.proj": "vision_model.embeddings.patch_embedding",
    "visual_encoder.norm": "vision_model.post_layernorm",
    "visual_encoder.blocks": "vision_model.encoder.layers",
    ".attn.qkv": ".self_attn.qkv",
    ".attn.proj": ".self_attn.projection",
    ".norm": ".layer_norm",
}
# Parts of the pretraining checkpoint that captioning does not use.
_DROPPED = frozenset(
    "text_encoder vision_proj text_proj itm_head visual_encoder_m text_encoder_m image_queue vision_proj_m text_proj_m "
    "text_queue queue_ptr temp ptr_queue idx_queue".split()
)


def blip_names(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Rename the tensors of a captioner for transformers; also returns the omitted parts."""
    parts = {name.partition(".")[0] for name in state}
    if "text_decoder" not in parts or ("text_encoder" in parts and "itm_head" not in parts):
        raise ValueError(
            f"The checkpoint has the parts {sorted(parts)}, so it is not a captioner of BLIP. Use one of its captioning or "
            "pretraining checkpoints."
        )
    found: dict[str, Tensor] = {}
    dropped: set[str] = set()
    for name, value in state.items():
        part = name.partition(".")[0]
        if part in _DROPPED:
            dropped.add(part)
        elif not name.endswith(".position_ids"):  # a buffer that transformers creates
            found[name if part == "text_decoder" else _renamed(name, _BLIP_RULES)] = value
    return found, sorted(dropped)


def resize_image_positions(state: dict[str, Tensor], image_size: int) -> None:
    """Interpolate the image positions for images of another size, as `interpolate_pos_embed` of BLIP's code does."""
    positions, patch_size = state[_POSITIONS], state[_PATCHES].shape[-1]  # (1, 1 + M, D)
    if image_size % patch_size:
        raise ValueError(f"image_size is {image_size}, but the patches are {patch_size} wide. Use a multiple of it.")
    old, new = side(positions.shape[1] - 1, "BLIP's image positions"), image_size // patch_size
    if old == new:
        return
    grid = positions[:, 1:].float().unflatten(1, (old, old)).permute(0, 3, 1, 2)  # (1, D, old, old)
    grid = torch.nn.functional.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    patches = grid.flatten(2).transpose(1, 2).to(positions.dtype)
    state[_POSITIONS] = torch.cat([positions[:, :1], patches], dim=1)


def blip_config(state: dict[str, Tensor], given: Any | None = None) -> Any:
    """The configuration with the sizes of the tensors."""
    from transformers import BlipConfig

    patch = state[_PATCHES]  # (D, 3, P, P)
    words = state["text_decoder.bert.embeddings.word_embeddings.weight"]  # (V, D)
    width, patch_size = patch.shape[0], patch.shape[-1]
    grid = side(state[_POSITIONS].shape[1] - 1, "BLIP's image positions")
    config = BlipConfig() if given is None else given
    heads = given and given.vision_config.num_attention_heads
    sizes = tower_sizes(state, "vision_model.encoder.layers.", "mlp.fc1", width, heads)
    config.vision_config.update({**sizes, "patch_size": patch_size, "image_size": patch_size * grid})
    heads = given and given.text_config.num_attention_heads
    sizes = tower_sizes(state, "text_decoder.bert.encoder.layer.", "intermediate.dense", words.shape[1], heads)
    config.text_config.update(
        {
            **sizes,
            "vocab_size": words.shape[0],
            "max_position_embeddings": state["text_decoder.bert.embeddings.position_embeddings.weight"].shape[0],
            "encoder_hidden_size": width,
            "is_decoder": True,
        }
    )
    config.architectures = ["BlipForConditionalGeneration"]
    return config


# --- CLIP of OpenAI's published code, renamed for transformers' `CLIPModel` ------------------------------------------
# The renaming is documented by transformers' `convert_clip_original_pytorch_to_hf.py`.

_CLIP_RULES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "transformer.resblocks": "text_model.encoder.layers",
    "token_embedding": "text_model.embeddings.token_embedding",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final": "text_model.final_layer_norm",
    ".ln_": ".layer_norm",
    ".attn.": ".self_attn.",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_NUMBERS = ("input_resolution", "context_length", "vocab_size")  # settings that OpenAI's archives store as tensors


def clip_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors for transformers, with separate queries, keys and values, and transposed projections."""
    if "visual.layer1.0.conv1.weight" in state:
        raise ValueError(
            "The vision tower is a ResNet, which transformers' CLIP does not support. Use a checkpoint with a vision "
            "transformer, or the weights of open_clip ('open_clip:RN50@openai')."
        )
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = value.T.contiguous()
        elif ".attn.in_proj_" in name:
            layer, kind = _renamed(name, _CLIP_RULES).split(".in_proj_")
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                found[f"{layer}.{letter}_proj.{kind}"] = part.clone()
        elif name not in _NUMBERS:
            found[_renamed(name, _CLIP_RULES)] = value
    return found


def clip_config(state: dict[str, Tensor], given: Any | None = None) -> Any:
    """The configuration with the sizes of the tensors."""
    from transformers import CLIPConfig

    patch = state["vision_model.embeddings.patch_embedding.weight"]  # (D, 3, P, P)
    words = state["text_model.embeddings.token_embedding.weight"]  # (V, D)
    length = state["text_model.embeddings.position_embedding.weight"].shape[0]
    grid = side(state["vision_model.embeddings.position_embedding.weight"].shape[0] - 1, "CLIP's image positions")
    config = CLIPConfig() if given is None else given
    projection = state["visual_projection.weight"].shape[0]
    for tower, width, more in (
        ("vision", patch.shape[0], {"patch_size": patch.shape[-1], "image_size": patch.shape[-1] * grid}),
        ("text", words.shape[1], {"vocab_size": words.shape[0], "max_position_embeddings": length}),
    ):
        part = getattr(config, f"{tower}_config")
        heads = given and part.num_attention_heads
        sizes = tower_sizes(state, f"{tower}_model.encoder.layers.", "mlp.fc1", width, heads)
        part.update({**sizes, **more, "projection_dim": projection})
    config.projection_dim = projection
    config.architectures = ["CLIPModel"]
    return config


# --- Checkpoints of ClipCap's published code: the mapper (`clip_project.*`) and usually GPT-2 (`gpt.*`) --------------
# The vision tower, the tokenizer and the shape of the language model come from other checkpoints.

MAPPER = "clip_project."


def mapper_settings(state: dict[str, Tensor], width: int) -> dict[str, Any]:
    """Kind and lengths of the mapper, from the shapes."""
    first, last, constant = (state.get(MAPPER + n) for n in ("model.0.weight", "model.2.weight", "prefix_const"))
    if constant is not None:
        layers = {name.split(".")[3] for name in state if name.startswith(MAPPER + "transformer.layers.")}
        linear = state.get(MAPPER + "linear.weight")
        if linear is None or linear.size(0) % width or constant.size(1) != width:
            raise ValueError(
                f"The transformer mapper needs a language model of width {constant.size(1)}, not {width}. Use the "
                "--language_model that it was trained with."
            )
        return {
            "mapping_type": "transformer",
            "prefix_length": constant.size(0),
            "clip_length": linear.size(0) // width,
            "num_mapper_layers": len(layers),
        }
    if first is None or last is None:
        raise ValueError(
            f"{MAPPER}* is neither the published MLP (model.0, model.2) nor the published transformer (prefix_const). "
            "Use a checkpoint of ClipCap as it was released."
        )
    if last.size(0) % width:
        raise ValueError(
            f"The MLP's output ({last.size(0)}) is not a multiple of the language model's width ({width}). Use the "
            "--language_model that it was trained with."
        )
    return {"mapping_type": "mlp", "prefix_length": last.size(0) // width}


def assemble_clipcap(
    state: dict[str, Tensor], *, vision_model: str, language_model: str, **settings: Any
) -> tuple[ClipCapForConditionalGeneration, Any, bool]:
    """Build the model of a published checkpoint; also returns its processor, and whether only the mapper was stored."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if re.search(
            r"\.attn\.(masked_)?bias$", name
        ):  # buffers of old versions of GPT-2, which computes its mask today
            continue
        part, _, rest = name.partition(".")
        if part not in ("clip_project", "gpt"):
            raise ValueError(
                f"{name} belongs to neither clip_project.* nor gpt.*. Use a checkpoint of ClipCap as it was released."
            )
        found[f"{'mapper' if part == 'clip_project' else 'language_model'}.{rest}"] = value
    mapper_alone = not any(name.startswith("language_model.") for name in found)
    width = read_config(model_path(language_model)).hidden_size
    model, processor = assemble(
        vision_model,
        language_model,
        fresh_language_model=not mapper_alone,
        **settings,
        **mapper_settings(state, width),
    )
    parts = ("mapper.",) if mapper_alone else ("mapper.", "language_model.")
    expected = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    if wrong := misfits(found, expected):
        raise ValueError(
            f"The checkpoint does not fit --vision_model and --language_model: {wrong}. Use those it was trained with."
        )
    model.load_state_dict(found, strict=False)
    return model, processor, mapper_alone


# --- Adds ClipCap's code to a checkpoint, for users without this package ---------------------------------------------
# transformers then loads the folder with `trust_remote_code=True`. A program that imports hf_captionrl uses its classes and
# runs no code from the folder.

AUTO_MAPS: dict[str, dict[str, str]] = {
    "config.json": {
        "AutoConfig": "configuration_clipcap.ClipCapConfig",
        "AutoModelForImageTextToText": "modeling_clipcap.ClipCapForConditionalGeneration",
    },
    "processor_config.json": {"AutoProcessor": "processing_clipcap.ClipCapProcessor"},
}
MODULES = ("configuration_clipcap", "modeling_clipcap", "processing_clipcap")


def export_code(folder: Path) -> None:
    """Write the code, and add it to the `auto_map` of the configurations."""
    configs = {name: read_object(folder / name) for name in AUTO_MAPS}
    model_type = configs["config.json"].get("model_type")
    if model_type != "clipcap":
        raise ValueError(
            f"{folder} has a model of type {model_type!r}, not 'clipcap'. Use --with_code only for ClipCap."
        )
    source = Path(str(clipcap.__file__)).parent
    for module in MODULES:
        atomic_write_text(folder / f"{module}.py", (source / f"{module}.py").read_text(encoding="utf-8"))
    for name, config in configs.items():
        write_json(folder / name, config | {"auto_map": AUTO_MAPS[name]})


# --- Any of these checkpoints, identified by the names of its tensors ------------------------------------------------

# The models that ClipCap's published checkpoints were trained with.
VISION_MODEL, LANGUAGE_MODEL = "openai/clip-vit-base-patch32", "openai-community/gpt2"


def write_published(
    state: dict[str, Tensor],
    folder: Path,
    report: Report,
    *,
    like: Path | None,
    image_size: int | None,
    clipcap: dict[str, Any],
) -> None:
    """Write model, configuration and image processor of a published checkpoint."""
    names = set(state)
    is_blip = "visual_encoder.cls_token" in names
    if image_size is not None and not is_blip:
        raise ValueError(
            f"image_size is {image_size}, but {report.source!r} is not a captioner of BLIP. Leave it out."
        )
    if any(name.startswith(MAPPER) for name in names):
        report.kind = "ClipCap captioner"
        settings = {"vision_model": VISION_MODEL, "language_model": LANGUAGE_MODEL, "stop_at_period": True, **clipcap}
        model, processor, mapper_alone = assemble_clipcap(state, **settings)
        if mapper_alone:
            language_model = f"The language model is {settings['language_model']} as published."
            report.notes.append(f"The checkpoint contains only the mapper. {language_model}")
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    elif is_blip:
        _write_blip(state, folder, report, like, image_size)
    elif {"visual.proj", "token_embedding.weight"} <= names or "visual.layer1.0.conv1.weight" in names:
        _write_clip(state, folder, report, like)
    else:
        raise ValueError(
            f"{report.source!r} has tensors such as {min(names)}, which are not names of the published code of BLIP, CLIP and "
            "ClipCap. Use an output that ends in .safetensors to keep the names, or a folder with a config.json."
        )


def _write_blip(
    state: dict[str, Tensor], folder: Path, report: Report, like: Path | None, image_size: int | None
) -> None:
    from transformers import BlipForConditionalGeneration, BlipImageProcessor

    report.kind = "BLIP captioner"
    found, dropped = blip_names(state)
    if dropped:
        report.notes.append(f"Omitted {', '.join(dropped)}, which captioning does not use.")
    if image_size is not None:
        resize_image_positions(found, image_size)
    config = blip_config(found, _config_of(like, "blip"))
    _save(found, config, BlipForConditionalGeneration, folder)
    if like is None:
        size = config.vision_config.image_size
        BlipImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)


def _write_clip(state: dict[str, Tensor], folder: Path, report: Report, like: Path | None) -> None:
    from transformers import CLIPImageProcessor, CLIPModel

    report.kind = "CLIP scorer"
    found = clip_names(state)
    config = clip_config(found, _config_of(like, "clip"))
    _save(found, config, CLIPModel, folder)
    if like is None:
        report.notes.append("The activation is quick_gelu, as in OpenAI's models. Use --config for another one.")
        size = config.vision_config.image_size
        crop = {"height": size, "width": size}
        CLIPImageProcessor(size={"shortest_edge": size}, crop_size=crop).save_pretrained(folder)


def _config_of(like: Path | None, model_type: str) -> Any:
    if like is None:
        return None
    config = read_config(str(like))
    if config.model_type != model_type:
        raise ValueError(
            f"--config {str(like)!r} has model type {config.model_type!r}, but the checkpoint has {model_type!r}. Use a "
            "configuration of the same type."
        )
    config._name_or_path = ""
    return config


def _save(state: dict[str, Tensor], config: Any, model_class: Any, folder: Path) -> None:
    """Write weights and configuration, if the weights fit the model class."""
    # The widest, because loading rounds to it: OpenAI's code stores some tensors in 16 bits and others in 32.
    floats = (value.dtype for value in state.values() if value.is_floating_point())
    config.dtype = max(floats, key=lambda dtype: dtype.itemsize)
    with torch.device("meta"):
        wrong = misfits(state, model_class(config).state_dict())
    if wrong:
        raise ValueError(
            f"The checkpoint does not match {model_class.__name__}: {wrong}. Use a checkpoint as it was released, and "
            "--config of the same model."
        )
    state = {name: value.contiguous() for name, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
