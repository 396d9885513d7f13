"""`captionrl convert`: write a checkpoint of pickles, or of published code, as safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import pickle  # for the name of its error # nosec B403
import re
import shutil
import subprocess  # nosec B404
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_captionrl.apps.convert.published import FileRecord, Report, write_published
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import hub_name, read_object
from hf_captionrl.utils.options import CommandOptions, option, positive

# --- Reads one pickle of tensors and writes it as safetensors. Pickles of weights are opened nowhere else ------------
# python -P -m hf_captionrl.apps.convert.convert SOURCE OUTPUT
#
# It runs in a separate process without the Hub's token, and torch reads only tensors (`weights_only=True`). The result is
# one JSON object on stdout.

_WRAPPERS = ("state_dict", "model", "model_state_dict", "module")
"""Keys under which published training code stores the weights."""

_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "OPENAI_API_KEY", "WANDB_API_KEY")


def read_pickle(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the tensors of a pickle without executing its code; also returns the names of other values."""
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. Use the name of a checkpoint's weights.")
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise ValueError(
                    f"{path.name} is a TorchScript archive, which contains code. Use a file with only its state dict. For OpenAI's "
                    "CLIP use its model on the Hub (openai/clip-vit-base-patch32) or 'open_clip:ViT-B-32@openai'."
                )
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{path.name} is not a plain file of tensors, and other pickles can execute code. Use a file with only the "
            "state dict, torch.save(model.state_dict(), ...)."
        ) from error
    others: list[str] = []
    for key in _WRAPPERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            others += [str(name) for name in loaded if name != key]
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(f"{path.name} has no state dict. Use a file of torch.save(model.state_dict(), ...).")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise ValueError(
                f"{path.name} contains {name!r}, a {type(value).__name__}, among its tensors. Use a file with only the state "
                "dict, torch.save(model.state_dict(), ...)."
            )
    if all(name.startswith("module.") for name in loaded):  # of DistributedDataParallel
        loaded = {name.removeprefix("module."): value for name, value in loaded.items()}
    return dict(loaded), others


def _write(source: Path, output: Path) -> dict[str, Any]:
    """Write the tensors of one file under their names; tensors that share memory are copied."""
    from safetensors.torch import save_file

    from hf_captionrl.apps.convert.published import FileRecord

    state, others = read_pickle(source)
    seen: set[int] = set()
    whole = {}
    for name, value in state.items():
        place = value.untyped_storage().data_ptr()
        fresh = place not in seen and value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        whole[name] = value.detach() if fresh else value.detach().clone().contiguous()
        seen.add(place)
    save_file(whole, output, metadata={"format": "pt"})
    record = FileRecord.of(source)
    return {"bytes": record.bytes, "sha256": record.sha256, "tensors": list(whole), "others": others}


def unpickle(source: Path, output: Path) -> dict[str, Any]:
    """Write the tensors of a pickle as safetensors, in a separate process.

    Returns `bytes` and `sha256` of the source, names of its `tensors`, and names of the omitted `others`.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _SECRETS} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-m", __name__, str(source.resolve()), str(output.resolve())]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # nosec B603
    try:
        answer = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        said = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        raise ValueError(
            f"The process that reads {source.name} ended early ({said[0]}). Use a machine with more memory, or an intact file."
        ) from error
    if "error" in answer:
        raise (FileNotFoundError if answer["missing"] else ValueError)(answer["error"])
    return answer


def main(argv: list[str]) -> None:
    """Convert one file, and print what was read."""
    try:
        answer = _write(Path(argv[0]), Path(argv[1]))
    except (OSError, ValueError) as error:
        answer = {"error": str(error), "missing": isinstance(error, FileNotFoundError)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])


# --- Converts a checkpoint of pickles, or of published code, to a folder for `load_captioner` and `load_scorer` ------
# Only `unpickling.py` opens pickles, in another process. This file reads safetensors.

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "README*", "LICENSE*", "NOTICE*")
"""Configuration, tokenizer, processor, README and licence; never code or weights of another format."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\S*)\.(bin|pt|pth)")
"""Pickles of a Trainer, which are not weights."""
_SHARD = re.compile(r"[^/\\]+\.bin")


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
    if place.is_dir() and not any(
        (place / name).is_file() for name in ("config.json", "adapter_config.json", "open_clip_config.json")
    ):
        place = _only_file(place, source)
    report = Report("tensors", source, str(output))
    if output.suffix == ".safetensors":
        _write_file(place, output, report)
        return report
    with _new_folder(output) as folder:
        if place.is_dir():
            _write_folder(place, folder, report, with_code)
        else:
            _write_checkpoint(place, folder, report, config, image_size, clipcap)
        if with_code:
            from hf_captionrl.apps.convert.published import export_code

            export_code(folder)
            report.notes.append(
                "The folder contains ClipCap's code, which transformers loads with trust_remote_code=True."
            )
        if not report.written:
            report.written = [FileRecord.of(path) for path in sorted(folder.glob("*.safetensors"))]
    return report


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder that gets its name when it is complete, and is removed on an error."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())
        if output.is_dir():
            output.rmdir()
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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


def _only_file(folder: Path, source: str) -> Path:
    """The one checkpoint in a folder without a configuration."""
    found = [path for path in _pickles(folder) if path.is_file()]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{source!r} has no config.json, and its checkpoints are: {names}. Use the path of one file, or a folder "
            "written by save_pretrained."
        )
    return found[0]


def _pickles(folder: Path) -> list[Path]:
    return sorted(p for pattern in _PICKLES for p in folder.glob(pattern) if not _STATE.fullmatch(p.name))


def _write_file(place: Path, output: Path, report: Report) -> None:
    """The tensors of one file under their names."""
    if not place.is_file():
        raise ValueError(f"{str(output)!r} is a file, but {report.source!r} is a folder. Use a folder as output.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        _unpickle(place, Path(scratch) / output.name, report)
        (Path(scratch) / output.name).rename(output)
    report.written = [FileRecord.of(output)]


def _unpickle(place: Path, output: Path, report: Report) -> list[str]:
    """One pickle to safetensors; names of its tensors."""
    found = unpickle(place, output)
    report.read.append(FileRecord(place.name, found["bytes"], found["sha256"]))
    if found["others"]:
        report.notes.append(f"{place.name}: omitted {', '.join(found['others'])}, which are not weights.")
    return list(found["tensors"])


def _write_folder(place: Path, folder: Path, report: Report, with_code: bool) -> None:
    """A folder of transformers, PEFT or open_clip: the same files, with weights as safetensors."""
    if (place / "adapter_config.json").is_file():
        report.kind, source, target = "adapter", "adapter_model.bin", "adapter_model.safetensors"
    elif (place / "open_clip_config.json").is_file():
        report.kind, source, target = "open_clip model", "open_clip_pytorch_model.bin", "open_clip_model.safetensors"
    else:
        report.kind, source, target = "transformers model", "pytorch_model.bin", "model.safetensors"
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
    report.copied = _copy(place, folder)


def _write_shards(index: Path, folder: Path, report: Report) -> None:
    """Weights in several files, one after the other."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(f, str) and _SHARD.fullmatch(f) for f in weight_map.values()
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
            shutil.copyfile(path, folder / path.name)
            copied.append(path.name)
    return copied


def _write_checkpoint(
    place: Path, folder: Path, report: Report, config: str | None, image_size: int | None, clipcap: dict[str, Any]
) -> None:
    """A file of published code: tensors renamed, with a configuration."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        safe = Path(scratch) / "tensors.safetensors"
        _unpickle(place, safe, report)
        like = None
        if config is not None:
            like = Path(config) if os.path.isdir(config) else _downloaded(config, None, with_weights=False)
        write_published(load_file(safe), folder, report, like=like, image_size=image_size, clipcap=clipcap)
        if like is not None and report.kind != "ClipCap captioner":
            report.copied = _copy(like, folder)
        if not (folder / "tokenizer_config.json").is_file():
            report.notes.append("The folder has no tokenizer. Use --config with a folder or name that has one.")


# --- `captionrl convert`: write a checkpoint of pickles, or of published code, as safetensors ------------------------


@dataclass
class ConvertOptions(CommandOptions):
    """Write a checkpoint as safetensors, which every command loads.

    SOURCE is a folder or a name on the Hub with pickles (pytorch_model.bin, in one file or several; adapter_model.bin;
    open_clip_pytorch_model.bin), or a file of the published code of BLIP (captioners), OpenAI's CLIP (state dicts) or
    ClipCap. A separate process opens the pickles, only for tensors (weights_only) and without the Hub's token. The command
    prints size and SHA-256 of every file that it read and wrote. It copies configuration, tokenizer and processor, and no
    code.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl convert Salesforce/blip-image-captioning-base blip-base
          captionrl convert outputs/old_adapter outputs/adapter
          captionrl convert model_large_caption.pth blip-large --config Salesforce/blip-image-captioning-large
          captionrl convert model_base_capfilt_large.pth blip-pretrained --image_size 384 \\
              --config Salesforce/blip-image-captioning-base
          captionrl convert clip.pth clip --config openai/clip-vit-base-patch32
          captionrl convert coco_weights.pt clipcap-coco
          captionrl convert transformer_weights.pt clipcap-transformer --normalize_image_embeds
          captionrl convert outputs/clipcap clipcap-with-code --with_code
          captionrl convert open_clip_weights.pt open_clip_weights.safetensors
    """

    source: str = option(positional=True, metavar="SOURCE", help="a folder, a name on the Hub, or a file")
    output: str = option(
        positional=True,
        metavar="OUT",
        help="folder to write; NAME.safetensors: the tensors of one file under their names",
    )
    revision: str | None = option(None, metavar="REV", help="branch, tag or commit on the Hub")
    config: str | None = option(
        None,
        metavar="MODEL",
        help="folder or name with the configuration (attention heads, activation), tokenizer and processor for a file of BLIP or "
        "CLIP; without it sizes come from the shapes, and heads are 64 wide",
    )
    image_size: int | None = option(
        None,
        parse=positive,
        metavar="PIXELS",
        help="image size for which the positions of a file of BLIP are interpolated, as BLIP's code does; its pretrained "
        "checkpoints have 224, its captioners 384 (default: the checkpoint's)",
    )
    vision_model: str | None = option(
        None,
        group="ClipCap",
        metavar="MODEL",
        help="vision tower of the ClipCap (default: openai/clip-vit-base-patch32)",
    )
    language_model: str | None = option(
        None,
        group="ClipCap",
        metavar="MODEL",
        help="language model, with its tokenizer (default: openai-community/gpt2)",
    )
    normalize_image_embeds: bool = option(False, group="ClipCap", help="the model was trained with --normalize_prefix")
    num_mapper_heads: int | None = option(
        None,
        parse=positive,
        group="ClipCap",
        metavar="N",
        help="number of attention heads of a transformer mapper (default: 8)",
    )
    stop_at_period: bool = option(True, group="ClipCap", help="captions end at a full stop")
    with_code: bool = option(
        False, group="ClipCap", help="add ClipCap's code to the folder, for users without this package"
    )


def convert_checkpoint(options: ConvertOptions) -> None:
    """Convert, and print sizes and hashes."""

    names = ("vision_model", "language_model", "num_mapper_heads")
    clipcap: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    report = convert(
        options.source,
        options.output,
        revision=options.revision,
        config=options.config,
        image_size=options.image_size,
        with_code=options.with_code,
        normalize_image_embeds=options.normalize_image_embeds,
        stop_at_period=options.stop_at_period,
        **clipcap,
    )
    print(json.dumps(report.to_dict()) if options.json else "\n".join(report.lines()))
