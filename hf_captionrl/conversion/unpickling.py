"""Reads one pickle of tensors and writes it as safetensors. Pickles of weights are opened nowhere else.

    python -P -m hf_captionrl.conversion.unpickling SOURCE OUTPUT

It runs in a separate process without the Hub's token, and torch reads only tensors (`weights_only=True`). The result is
one JSON object on stdout.
"""

from __future__ import annotations

import json
import os
import pickle  # for the name of its error # nosec B403
import subprocess  # nosec B404
import sys
import zipfile
from pathlib import Path
from typing import Any

__all__ = ["read_pickle", "unpickle"]

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

    from hf_captionrl.conversion.report import FileRecord

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
