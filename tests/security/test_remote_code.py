"""Code beside weights, data and settings: it is never run, asked for or not."""

import json

import datasets
import pytest

from hf_captionrl.apps.experiments.arguments import parse_arguments
from hf_captionrl.apps.instruct.judges import LocalJudge
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.trainers import SelfRetrievalGRPOConfig, SmileConfig, SmileSFTConfig, SmileSFTTrainer

LOADERS = {
    "captioner": load_captioner,
    "scorer": load_scorer,
    "part of ClipCap": lambda name: assemble(name, name),
    "judge": LocalJudge.from_pretrained,
}


@pytest.fixture
def folder(tmp_path):
    """A model of a class of its own, whose import makes a file."""
    code = (
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Config: pass\nclass Model: pass\n"
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(code)
    names = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Model", None], "AutoProcessor": "code.Model"}
    names |= dict.fromkeys(("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"), "code.Model")
    (folder / "config.json").write_text(json.dumps({"model_type": "of-my-own", "auto_map": names}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": names}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"processor_class": "P", "auto_map": names}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    yield str(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_code_beside_weights(load, folder):
    with pytest.raises((ValueError, OSError)):
        load(folder)


@pytest.mark.parametrize("load", [load_captioner, load_scorer])
def test_asking_for_it_does_not_help(load, folder):
    with pytest.raises((ValueError, TypeError, OSError)):
        load(folder, trust_remote_code=True)


@pytest.mark.parametrize("config", [SmileSFTConfig, SelfRetrievalGRPOConfig])
@pytest.mark.parametrize(
    "asked",
    [
        {"trust_remote_code": True},
        {"model_init_kwargs": {"trust_remote_code": True}},
        {"model_init_kwargs": '{"trust_remote_code": true}'},
        {"trust_remote_code": True, "model_init_kwargs": {"trust_remote_code": False}},
    ],
)
def test_trainers_of_trl_are_not_asked_for_it(config, asked, tmp_path):
    with pytest.raises(ValueError, match=r"^trust_remote_code is set, but code from checkpoints is never run"):
        config(str(tmp_path), use_cpu=True, bf16=False, **asked)


def test_a_text_model_by_name_brings_none(folder, tmp_path):
    rows = datasets.Dataset.from_list([{"text": "a dog"}])
    config = SmileSFTConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[])
    with pytest.raises((ValueError, OSError), match="custom code"):
        SmileSFTTrainer(folder, config, train_dataset=rows)
    config.trust_remote_code = True
    with pytest.raises(ValueError, match=r"^trust_remote_code is set"):
        SmileSFTTrainer(folder, config, train_dataset=rows)


def test_code_of_the_folder_runs_with_trust_remote_code(folder, tmp_path):
    from transformers import AutoConfig

    with pytest.raises(Exception, match=r"."):
        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    (tmp_path / "ran").unlink()  # fails if the code did not run


def test_yaml_makes_no_objects(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        f"output_dir: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{tmp_path}/ran]]\n"
    )
    with pytest.raises(ValueError, match="is not valid YAML"):
        parse_arguments([SmileConfig], ["--config", str(path)])
    assert not (tmp_path / "ran").exists()
    path.write_text(f"output_dir: {tmp_path}/out\n")
    assert parse_arguments([SmileConfig], ["--config", str(path)])[0].output_dir == f"{tmp_path}/out"
