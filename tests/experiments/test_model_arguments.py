"""How recipes load the captioner: dtype, attention and the trainer's model_init_kwargs."""

import pytest
import torch

from hf_captionrl.apps.experiments.arguments import ModelArguments, describe
from recipes import smile_blip


def test_weights_are_fp32_unless_told_otherwise():
    assert {p.dtype for p in ModelArguments().load().model.parameters()} == {torch.float32}
    low = ModelArguments(dtype="bfloat16", tune="language").load()
    assert {p.dtype for p in low.model.parameters()} == {torch.bfloat16}
    assert ModelArguments(attn_implementation="eager").load().base_model.config._attn_implementation == "eager"


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="Use one of 'float32'"):
        ModelArguments(dtype="bf16")


def test_model_init_kwargs_of_the_command_line_and_of_yaml(tmp_path):
    line = ["--use_cpu", "--model_init_kwargs", '{"attn_implementation": "eager", "dtype": "float32"}']
    model_args, *_, config = smile_blip.parse_args(line)
    assert config.model_init_kwargs is None  # the recipe loads, not the trainer
    assert model_args.load().base_model.config._attn_implementation == "eager"
    assert describe([model_args])["ModelArguments"]["model_init_kwargs"]["attn_implementation"] == "eager"

    (tmp_path / "run.yaml").write_text("use_cpu: true\nmodel_init_kwargs:\n  attn_implementation: eager\n")
    model_args, *_ = smile_blip.parse_args(["--config", str(tmp_path / "run.yaml")])
    assert model_args.model_init_kwargs == {"attn_implementation": "eager"}


def test_a_fresh_language_model_keeps_only_the_vision_tower():
    shipped, fresh = (ModelArguments(fresh_language_model=f).load().base_model.state_dict() for f in (False, True))
    tower = {name for name in shipped if name.startswith("vision_model.")}
    assert tower
    assert all(torch.equal(shipped[name], fresh[name]) for name in tower)
    matrices = [n for n, weight in shipped.items() if n not in tower and weight.dim() == 2]
    assert matrices
    assert not any(torch.equal(shipped[name], fresh[name]) for name in matrices)
