"""`captionrl convert`: write a checkpoint of pickles, or of published code, as safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_captionrl.apps.convert.options import ConvertOptions
from hf_captionrl.apps.convert.published import FileRecord, Report, export_code, write_published
from hf_captionrl.utils.io import temporary_path, write_json
from hf_captionrl.utils.model_files import hub_name, read_object

# --- Reads one pickle of tensors (`weights_only=True`). Pickles of weights are opened nowhere else --------------------


def read_pickle(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the tensors of a pickle without executing its code; also returns the names of other values."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use the name of a checkpoint's weights.")
    is_zip = _is_archive(path)
    try:
        wrong = _archive_fault(path) if is_zip else ""
        loaded = None if wrong else torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (
        Exception
    ) as error:  # damaged bytes raise any of a dozen types, in zipfile, torch and the restricted unpickler
        raise ValueError(
            f"{path.name} is not a plain file of tensors ({type(error).__name__}), and other pickles can execute code. Use an "
            "intact file with only the state dict, torch.save(model.state_dict(), ...)."
        ) from error
    if wrong:
        raise ValueError(f"{path.name} {wrong}")
    others: list[str] = []
    for key in ("state_dict", "model", "model_state_dict", "module"):  # of published training code
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            others += [str(name) for name in loaded if name != key]
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(f"{path.name} has no state dict. Use a file of torch.save(model.state_dict(), ...).")
    for name, value in loaded.items():
        plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        if not isinstance(name, str) or not plain or value.is_quantized:
            raise ValueError(
                f"{path.name} contains {name!r}, a {type(value).__name__}, among its tensors. Use a file with only the state "
                "dict, torch.save(model.state_dict(), ...)."
            )
    # A tensor may repeat its bytes (stride 0), and tensors may share them: a small file can describe terabytes.
    if (claimed := sum(value.nbytes for value in loaded.values())) > 16 * path.stat().st_size:
        raise ValueError(
            f"{path.name} has {path.stat().st_size:,} bytes, but describes tensors of {claimed:,}. Use a file of tensors that "
            "were copied (tensor.clone()) before torch.save."
        )
    if all(name.startswith("module.") for name in loaded):  # of DistributedDataParallel
        loaded = {name.removeprefix("module."): value for name, value in loaded.items()}
    return dict(loaded), others


def _is_archive(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"  # as torch.load decides


def _archive_fault(path: Path) -> str:
    """What is wrong with an archive, or nothing. torch does not compare the checksums."""
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            return (
                "is a TorchScript archive, which contains code. Use a file with only its state dict. For OpenAI's CLIP use its "
                "model on the Hub (openai/clip-vit-base-patch32) or 'open_clip:ViT-B-32@openai'."
            )
        if packed := [part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]:
            return (
                f"contains {packed[0]} in compressed form, which torch.save does not write. Use a file of torch.save."
            )
        damaged = archive.testzip()
        return f"is damaged: {damaged} differs from its checksum. Use an intact copy." if damaged else ""


def _unpickle(place: Path, output: Path, report: Report) -> list[str]:
    """Write the tensors of one file under their names, and return these; tensors that share memory are copied."""
    state, others = read_pickle(place)
    seen: set[int] = set()
    whole = {}
    for name, value in state.items():
        numbers = value.float() if value.is_floating_point() and value.element_size() == 1 else value  # fp8
        if not torch.isfinite(numbers).all():
            raise ValueError(
                f"{place.name} has NaN or infinite numbers in {name}. Use an intact copy of the checkpoint."
            )
        memory = value.untyped_storage()
        fresh = memory.data_ptr() not in seen and value.is_contiguous() and memory.nbytes() == value.nbytes
        whole[name] = value.detach() if fresh else value.detach().clone().contiguous()
        seen.add(memory.data_ptr())
    save_file(whole, output, metadata={"format": "pt"})
    report.read.append(FileRecord.of(place))
    report.dtypes = sorted({*report.dtypes, *(str(value.dtype).removeprefix("torch.") for value in whole.values())})
    if not _is_archive(place):
        report.notes.append(
            f"{place.name} has no checksums (a file of torch before 1.6), so damage is not detected. Compare its SHA-256."
        )
    if others:
        report.notes.append(f"{place.name}: omitted {', '.join(others)}, which are not weights.")
    return list(whole)


# --- Converts a checkpoint of pickles, or of published code, to a folder for `load_captioner` and `load_scorer` ------

# Configuration, tokenizer, processor, README and licence; never code or weights of another format.
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README*", "LICENSE*", "NOTICE*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Pickles of a Trainer, which are not weights.
_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\S*)\.(bin|pt|pth)")
# Kind of a folder, and names of its pickle and of the new file, by its configuration.
_CONFIGS = {
    "adapter_config.json": ("adapter", "adapter_model.bin", "adapter_model.safetensors"),
    "open_clip_config.json": ("open_clip model", "open_clip_pytorch_model.bin", "open_clip_model.safetensors"),
    "config.json": ("transformers model", "pytorch_model.bin", "model.safetensors"),
}


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    revision: str | None = None,
    config: str | None = None,
    image_size: int | None = None,
    with_code: bool = False,
    **clipcap: Any,
) -> Report:
    """Convert a checkpoint to safetensors."""
    source, output = os.fspath(source), Path(output)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"{str(output)!r} exists. Use another output, or remove it first.")
    place = Path(source) if os.path.exists(source) else _downloaded(source, revision, with_weights=True)
    if place.is_dir() and not any((place / name).is_file() for name in _CONFIGS):
        found = _pickles(place)
        if len(found) != 1:
            raise ValueError(
                f"{source!r} has no config.json, and its checkpoints are: {', '.join(path.name for path in found) or 'none'}. Use the "
                "path of one file, or a folder written by save_pretrained."
            )
        place = found[0]
    report = Report("tensors", source, str(output))
    is_file = output.suffix == ".safetensors"  # the tensors of one file under their names
    if is_file and not place.is_file():
        raise ValueError(f"{str(output)!r} is a file, but {source!r} is a folder. Use a folder as output.")
    with temporary_path(output.parent, is_folder=True) as scratch:
        new = scratch / output.name  # gets its place when it is complete
        if is_file:
            _unpickle(place, new, report)
        else:
            new.mkdir()
            if place.is_dir():
                _write_folder(place, new, report, with_code)
            else:
                _write_checkpoint(place, new, report, config, image_size, clipcap)
            if with_code:
                export_code(new)
                report.notes.append(
                    "The folder contains ClipCap's code, which transformers loads with trust_remote_code=True."
                )
        report.written = [FileRecord.of(path) for path in ([new] if is_file else sorted(new.glob("*.safetensors")))]
        if output.is_dir():
            output.rmdir()
        new.rename(output)
    return report


def _write_checkpoint(
    place: Path, folder: Path, report: Report, config: str | None, image_size: int | None, clipcap: dict[str, Any]
) -> None:
    """A file of published code: tensors renamed, with a configuration."""
    like = None
    if config is not None:
        like = Path(config) if os.path.isdir(config) else _downloaded(config, None, with_weights=False)
    safe = folder.parent / "tensors.safetensors"
    _unpickle(place, safe, report)
    try:
        write_published(load_file(safe), folder, report, like=like, image_size=image_size, clipcap=clipcap)
    except (
        LookupError,
        ArithmeticError,
        RuntimeError,
        TypeError,
    ) as error:  # a tensor is missing, or has no such dimension
        raise ValueError(
            f"{place.name} does not have the tensors of a {report.kind} ({type(error).__name__}: {' '.join(str(error).split())[:100]}). "
            "Use a checkpoint as it was released."
        ) from error
    if like is not None and report.kind != "ClipCap captioner":
        report.copied = _copy(like, folder)
    if not (folder / "tokenizer_config.json").is_file():
        report.notes.append("The folder has no tokenizer. Use --config with a folder or name that has one.")


def _downloaded(name: str, revision: str | None, *, with_weights: bool) -> Path:
    """A repository on the Hub as a folder, with its pickles if `with_weights`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import httpx

    if hub_name(name) is None or name.startswith((".", "~")):
        raise FileNotFoundError(
            f"There is no file or folder {name!r}. Use an existing path, or a name on the Hub (owner/name)."
        )
    patterns = [*_COPIED, *(_PICKLES if with_weights else ())]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        said = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{name!r} is neither a file, a folder, nor a reachable repository on the Hub ({said[:200]}). Check the name; "
            "offline, use a repository in the cache."
        ) from error


def _pickles(folder: Path) -> list[Path]:
    found = (path for pattern in _PICKLES for path in folder.glob(pattern))
    return sorted(path for path in found if path.is_file() and not _STATE.fullmatch(path.name))


def _write_folder(place: Path, folder: Path, report: Report, with_code: bool) -> None:
    """A folder of transformers, PEFT or open_clip: the same files, with weights as safetensors."""
    report.kind, source, target = next(names for name, names in _CONFIGS.items() if (place / name).is_file())
    index = place / "pytorch_model.bin.index.json"
    safe = sorted(place.glob("*.safetensors"))
    if safe and with_code:
        for path in safe:
            shutil.copyfile(path, folder / path.name)
    elif safe:
        raise ValueError(f"{report.source!r} already has {safe[0].name}. Use it without conversion.")
    elif (place / source).is_file():
        _unpickle(place / source, folder / target, report)
    elif report.kind == "transformers model" and index.is_file():
        _write_shards(index, folder, report)
    else:
        others = ", ".join(path.name for path in _pickles(place)) or "no weights"
        raise ValueError(
            f"{report.source!r} has no {source}; it has {others}. Use the path of the file with its weights."
        )
    config = read_object(place / "config.json") if report.kind == "transformers model" else {}
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    stored = [getattr(torch, dtype) for dtype in report.dtypes]
    if isinstance(named, torch.dtype) and any(d.is_floating_point and d.itemsize > named.itemsize for d in stored):
        report.notes.append(
            f"config.json names {named}, to which loading rounds the weights. Use --dtype to keep them."
        )
    report.copied = _copy(place, folder)


def _write_shards(index: Path, folder: Path, report: Report) -> None:
    """Weights in several files, one after the other."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(f, str) and re.fullmatch(r"[^/\\]+\.bin", f) for f in weight_map.values()
    ):
        raise ValueError(
            f"{index.name} must map every tensor to the plain name of a *.bin file in its folder. Use an intact copy."
        )
    where: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        target = re.sub(r"^pytorch_model", "model", shard).removesuffix(".bin") + ".safetensors"
        where |= dict.fromkeys(_unpickle(index.parent / shard, folder / target, report), target)
    if missing := sorted(weight_map.keys() - where.keys()):
        raise ValueError(
            f"{index.name} lists {missing[0]}, which is in none of its files. Use an intact copy of the checkpoint."
        )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def _copy(place: Path, folder: Path) -> list[str]:
    """Copy configuration, tokenizer, processor, README and licence that are not written yet."""
    copied = []
    for path in sorted({path for pattern in _COPIED for path in place.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json") and not (folder / path.name).exists():
            # The files of the Hub's cache are links from snapshots/REVISION to blobs.
            tops = [place, place.parents[1] / "blobs"] if place.parent.name == "snapshots" else [place]
            if not any(path.resolve().is_relative_to(top.resolve()) for top in tops):
                raise ValueError(
                    f"{path.name} in {place} is a link to a place outside the folder. Replace it with the file."
                )
            shutil.copyfile(path, folder / path.name)
            copied.append(path.name)
    return copied


def convert_checkpoint(options: ConvertOptions) -> None:
    """Convert, and print sizes and hashes."""
    values = {name: value for name, value in vars(options).items() if value is not None}
    report = convert(**{name: value for name, value in values.items() if name not in ("json", "traceback")})
    print(json.dumps(asdict(report)) if options.json else "\n".join(report.lines()))
