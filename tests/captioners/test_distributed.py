"""Run in two processes: compares gradients under DDP and FSDP2 with one process, and writes a JSON file."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_captionrl.captioners import HeadInputs
from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, linear_log_probs
from tests.captioners.models import captioner_of
from tests.processes import run_in_processes
from tests.tiny import FAMILIES, tiny_captions, tiny_images
from tests.tolerances import resolution

CASES = (
    *((family, "fsdp2") for family in FAMILIES),
    ("vit-gpt2", "ddp"),
    ("git", "ddp-lora"),
    ("blip", "fsdp2-lora"),
    ("vit-gpt2", "fsdp2-lora"),
    # Only GIT's head is not tied to the embeddings; FSDP2 cannot shard only one of two tied modules.
    ("git", "fsdp2-head-alone"),
    ("blip", "fsdp2-generate-first"),
    ("llava", "ddp"),
    ("llava", "fsdp2"),
    ("llava", "fsdp2-lora"),
    ("blip2-opt", "fsdp2"),
)
FAULT = ("git", "ddp-unscaled")  # forgets that DDP averages


def smile_sum(head: HeadInputs) -> dict[str, torch.Tensor]:
    """SMILE, which computes its gradient in the forward pass, plus log-probabilities, which do so in the backward pass."""
    smile = fused_smile_loss(head.hidden, head.weight, head.labels, bias=head.bias, reduction="sum")
    log_probs = linear_log_probs(head.hidden, head.weight, head.labels, bias=head.bias)
    return {"loss": smile - 0.5 * log_probs.sum(), "log_probs": log_probs}


def build(family: str, lora: bool) -> Any:
    captioner = captioner_of(family, prompt="a ")
    if lora:
        torch.manual_seed(0)
        captioner.add_lora("both", r=4)
        with torch.no_grad():
            for name, parameter in captioner.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.2)
    return captioner


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard(captioner: Any, head_alone: bool) -> None:
    base = captioner.base_model
    if head_alone:
        fully_shard(captioner.output_head(base))
    for module in base.modules():
        if type(module).__name__.endswith(("Layer", "Block")):
            fully_shard(module)
    fully_shard(captioner.model)


def case(family: str, wrapper: str) -> dict[str, Any]:
    rank = dist.get_rank()
    lora = wrapper.endswith("lora")
    single, captioner = build(family, lora), build(family, lora)
    batch = single.collate(tiny_images(4), tiny_captions(4))
    tokens = int((batch["labels"] != IGNORE_INDEX).sum())
    single.model.train()
    expected_loss = single.model(**batch, head_objective=smile_sum).loss / tokens
    expected_loss.backward()
    expected_captions = single.generate(pixel_values=batch["pixel_values"], max_new_tokens=4).captions
    expected = {name: p.grad for name, p in single.model.named_parameters() if p.grad is not None}

    captioner.model.train()
    model = captioner.model
    if wrapper.startswith("ddp"):
        unused = sorted(name for name, p in single.model.named_parameters() if p.requires_grad and p.grad is None)
        model = DistributedDataParallel(model, find_unused_parameters=bool(unused))
    else:
        if wrapper == "fsdp2-generate-first":
            shard(captioner, head_alone=False)
            captions = captioner.generate(pixel_values=batch["pixel_values"], max_new_tokens=4).captions
            assert captions == expected_captions
        else:
            shard(captioner, head_alone=wrapper == "fsdp2-head-alone")
        model = captioner.model
    mine = {name: value[rank * 2 : rank * 2 + 2] for name, value in batch.items()}
    # Each process computes its part of the mean over all tokens; DDP and FSDP average the gradients.
    loss = model(**mine, head_objective=smile_sum).loss / tokens
    loss = loss if wrapper.endswith("unscaled") else loss * dist.get_world_size()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    error, names = 0.0, set()
    for name, parameter in captioner.model.named_parameters():
        if parameter.grad is not None:
            names.add(name)
            error = max(error, float((full(parameter.grad) - expected[name]).abs().max()))
    captions = captioner.generate(pixel_values=batch["pixel_values"], max_new_tokens=4).captions
    return {
        "gradient_error": error,
        "same_names": names == set(expected),
        "loss_error": abs(float(total / dist.get_world_size() - expected_loss.detach())),
        "same_captions": captions == expected_captions,
    }


def compare(file: str) -> None:
    """Run every case in each process of a gloo group."""
    results: dict[str, Any] = {}
    for family, wrapper in (*CASES, FAULT):
        try:
            results[f"{family} {wrapper}"] = case(family, wrapper)
        except Exception:
            results[f"{family} {wrapper}"] = {"traceback": traceback.format_exc()}
    if dist.get_rank() == 0:
        with open(file, "w") as stream:
            json.dump(results, stream)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("distributed")
    run_in_processes(2, compare, str(folder / "results.json"), folder=folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_gradient_loss_and_captions_equal_one_process(results, case):
    result = results[" ".join(case)]
    assert "traceback" not in result, result["traceback"]
    assert result["gradient_error"] < resolution(1, ulps=64)
    assert result["loss_error"] < resolution(5)
    assert result["same_names"]
    assert result["same_captions"]


def test_planted_fault_is_detected(results):
    assert results[" ".join(FAULT)]["gradient_error"] > 1e-3
