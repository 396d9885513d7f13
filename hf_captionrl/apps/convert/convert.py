"""`captionrl convert`: write a checkpoint of pickles, or of published code, as safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_captionrl.apps.convert.options import ConvertOptions
from hf_captionrl.apps.convert.published import kind_of, write_published
from hf_captionrl.utils.io import temporary_path
from hf_captionrl.utils.model_files import hub_name, read_object

# Configuration, tokenizer, processor, README and licence; never code or weights of another format.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README*", "LICENSE*", "NOTICE*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Pickles of a Trainer, which are not weights.
_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\S*)\.(bin|pt|pth)")
# The models whose configuration, tokenizer and processor files of published code get without --config.
_LIKE = {"BLIP captioner": "Salesforce/blip-image-captioning-base", "CLIP scorer": "openai/clip-vit-base-patch32"}
# Kind of a folder, and names of its pickle and of the new file, by its configuration.
_CONFIGS = {
    "adapter_config.json": ("adapter", "adapter_model.bin", "adapter_model.safetensors"),
    "open_clip_config.json": ("open_clip model", "open_clip_pytorch_model.bin", "open_clip_model.safetensors"),
    "config.json": ("transformers model", "pytorch_model.bin", "model.safetensors"),
}


@dataclass
class Report:
    """Files that a conversion read and wrote, each with its `name`, `bytes` and `sha256`."""

    kind: str  # what the source is
    source: str
    output: str
    read: list[dict[str, Any]] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)  # names of other files
    notes: list[str] = field(default_factory=list)


def _record(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


def read_pickle(path: Path, report: Report) -> dict[str, torch.Tensor]:
    """Read the tensors of a pickle without executing its code. Pickles of weights are opened nowhere else."""
    try:
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                    raise ValueError(
                        "a TorchScript archive with code; for OpenAI's CLIP use 'open_clip:ViT-B-32@openai'"
                    )
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                    raise ValueError("a compressed archive, which torch.save does not write")
                if damaged := archive.testzip():  # torch does not compare the checksums
                    raise ValueError(f"{damaged} differs from its checksum")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except OSError:
        raise
    except Exception as error:  # damaged bytes raise any of a dozen types
        reason = error if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(
            f"{path.name} is not a plain file of tensors ({reason}), and other pickles can execute code. Use an intact file with "
            "only the state dict, torch.save(model.state_dict(), ...)."
        ) from error
    others: list[str] = []
    for key in ("state_dict", "model", "model_state_dict", "module"):  # of published training code
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            others += [str(name) for name in loaded if name != key]
            loaded = loaded[key]
    tensors = loaded.values() if isinstance(loaded, dict) else ()
    if not tensors or not all(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in tensors):
        raise ValueError(f"{path.name} is no state dict of tensors. Use torch.save(model.state_dict(), ...).")
    # A tensor may repeat its bytes (stride 0), and tensors may share them: a small file can describe terabytes.
    if (claimed := sum(value.nbytes for value in tensors)) > 16 * path.stat().st_size:
        raise ValueError(
            f"{path.name} has {path.stat().st_size:,} bytes, but describes tensors of {claimed:,}. Use a file of tensors that "
            "were copied (tensor.clone()) before torch.save."
        )
    if others:
        report.notes.append(f"{path.name}: omitted {', '.join(others)}, which are not weights.")
    report.read.append(_record(path))
    shared: set[int] = set()
    state = {}
    for name, value in loaded.items():
        name = name.removeprefix("module.")  # of DistributedDataParallel
        if not torch.isfinite(value.float() if value.is_floating_point() else value).all():
            raise ValueError(f"{path.name} has NaN or infinite numbers in {name}. Use an intact copy.")
        pointer = value.untyped_storage().data_ptr()
        state[name] = value.detach().clone().contiguous() if pointer in shared else value.detach().contiguous()
        shared.add(pointer)
    return state


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    revision: str | None = None,
    config: str | None = None,
    image_size: int | None = None,
    **clipcap: Any,
) -> Report:
    """Convert a checkpoint to a folder for `load_captioner` and `load_scorer`, or to one file `*.safetensors`."""
    source, output = os.fspath(source), Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"{str(output)!r} exists. Use another output, or remove it first.")
    place = Path(source) if os.path.exists(source) else _downloaded(source, revision, with_weights=True)
    if place.is_dir() and not any((place / name).is_file() for name in _CONFIGS):
        files = _pickles(place)
        if len(files) != 1:
            raise ValueError(
                f"{source!r} has no config.json, and its checkpoints are: {', '.join(path.name for path in files) or 'none'}. Use the "
                "path of one file, or a folder written by save_pretrained."
            )
        place = files[0]
    report = Report("tensors", source, str(output))
    with temporary_path(output.parent, is_folder=True) as scratch:
        new = scratch / output.name  # gets its place when it is complete
        if output.suffix == ".safetensors" and place.is_file():
            save_file(read_pickle(place, report), new, {"format": "pt"})
        else:
            new.mkdir()
            if place.is_dir():
                _write_folder(place, new, report)
            else:
                _write_checkpoint(place, new, report, config, image_size, clipcap)
        report.written = [_record(path) for path in ([new] if new.is_file() else sorted(new.glob("*.safetensors")))]
        if output.is_dir():
            output.rmdir()
        new.rename(output)
    return report


def _write_checkpoint(
    place: Path, folder: Path, report: Report, config: str | None, image_size: int | None, clipcap: dict[str, Any]
) -> None:
    """A file of published code: tensors renamed, with configuration, tokenizer and processor of the model `config`."""
    state, like = read_pickle(place, report), None
    try:
        report.kind = kind_of(state)
        if report.kind in _LIKE:
            config = config or _LIKE[report.kind]
            like = Path(config) if os.path.isdir(config) else _downloaded(config, None, with_weights=False)
        settings: dict[str, Any] = {"like": like, "image_size": image_size, "clipcap": clipcap}
        report.notes += write_published(state, report.kind, folder, **settings)
    except (LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else f"tensors of published code are missing ({error!r})."
        raise ValueError(f"{place.name}: {reason}") from error
    if like is not None:
        report.copied = _copy(like, folder)


def _downloaded(name: str, revision: str | None, *, with_weights: bool) -> Path:
    """A repository on the Hub as a folder, with its pickles if `with_weights`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import httpx

    patterns = [*_COPIED, *(_PICKLES if with_weights else ())]
    try:
        if hub_name(name) is None:
            raise OSError("no valid name")
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (httpx.HTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{name!r} is neither a file, a folder, nor a reachable repository on the Hub ({' '.join(str(error).split())[:200]}). "
            "Check the name; offline, use a repository in the cache."
        ) from error


def _pickles(folder: Path) -> list[Path]:
    files = (path for pattern in _PICKLES for path in folder.glob(pattern))
    return sorted(path for path in files if path.is_file() and not _STATE.fullmatch(path.name))


def _write_folder(place: Path, folder: Path, report: Report) -> None:
    """A folder of transformers, PEFT or open_clip: the same files, with the weights in one file of safetensors."""
    report.kind, source, target = next(names for name, names in _CONFIGS.items() if (place / name).is_file())
    index = place / "pytorch_model.bin.index.json"
    if safe := sorted(place.glob("*.safetensors")):
        raise ValueError(f"{report.source!r} already has {safe[0].name}. Use it without conversion.")
    if (place / source).is_file():
        state = read_pickle(place / source, report)
    elif report.kind == "transformers model" and index.is_file():
        weight_map = read_object(index)["weight_map"]
        shards = sorted(set(map(str, weight_map.values())))
        if not all(re.fullmatch(r"[^/\\]+\.bin", shard) for shard in shards):
            raise ValueError(
                f"{index.name} must map each tensor to the plain name of a *.bin file. Use an intact copy."
            )
        state = {name: value for shard in shards for name, value in read_pickle(place / shard, report).items()}
        if missing := sorted(weight_map.keys() - state.keys()):
            raise ValueError(f"{index.name} lists {missing[0]}, which is in none of its files. Use an intact copy.")
    else:
        others = ", ".join(path.name for path in _pickles(place)) or "no weights"
        raise ValueError(f"{report.source!r} has no {source}; it has {others}. Use the path of the file of weights.")
    save_file(state, folder / target, {"format": "pt"})
    report.copied = _copy(place, folder)


def _copy(place: Path, folder: Path) -> list[str]:
    """Copy configuration, tokenizer, processor, README and licence that are not written yet."""
    # The files of the Hub's cache are links from snapshots/REVISION to blobs.
    top = (place.parents[1] if place.resolve().parent.name == "snapshots" else place).resolve()
    copied = []
    for path in sorted({path for pattern in _COPIED for path in place.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json") and not (folder / path.name).exists():
            if not path.resolve().is_relative_to(top):
                raise ValueError(f"{path.name} in {place} is a link out of the folder. Use the file itself.")
            shutil.copyfile(path, folder / path.name)
            copied.append(path.name)
    return copied


def convert_checkpoint(options: ConvertOptions) -> None:
    """Convert, and print sizes and hashes."""
    values = {name: value for name, value in vars(options).items() if value is not None}
    report = convert(**{name: value for name, value in values.items() if name not in ("json", "traceback")})
    files = [("read ", one) for one in report.read] + [("wrote", one) for one in report.written]
    lines = [f"{verb}  {f['name']}  {f['bytes']:,} bytes  sha256 {f['sha256']}" for verb, f in files]
    lines += [f"copied {', '.join(report.copied)}", *report.notes, f"{report.output}: {report.kind}."]
    print(json.dumps(asdict(report)) if options.json else "\n".join(lines))
