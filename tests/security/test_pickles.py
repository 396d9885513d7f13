"""Pickles and code of a checkpoint are never executed."""

import contextlib
import json
import pickle
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from hf_captionrl.apps.convert.convert import convert
from hf_captionrl.apps.experiments.arguments import parse_arguments
from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.clipcap.assembly import assemble
from hf_captionrl.captioners.language_model_clients import TransformersTextBackend
from hf_captionrl.data import load_captions
from hf_captionrl.data.benchmarks import load_hard_pool
from hf_captionrl.retrieval import FeatureCache, load_bags, load_scorer
from hf_captionrl.scenes import load_scenes
from hf_captionrl.trainers import SelfRetrievalGRPOConfig, SmileConfig, SmileSFTConfig, SmileSFTTrainer
from hf_captionrl.utils.model_files import model_path
from tests.tiny import tiny_captioner
from tests.tiny.chat import tiny_chat
from tests.trainers.grpo_worker import make_trainer
from tests.trainers.one_step import train


class Trap:
    """What an attacker would put into a pickle: unpickled, it makes a file."""

    def __init__(self, path):
        self.path = Path(path)

    def __reduce__(self):
        return Path.touch, (self.path,)


def raw(sprung):
    """As `pickle.dump` writes it."""
    return pickle.dumps({"weight": Trap(sprung)})


def zipped(sprung, folder):
    """As `torch.save` writes it."""
    torch.save({"weight": Trap(sprung), "state": {}}, folder / "trap.pt")
    return (folder / "trap.pt").read_bytes()


FORMS = {"pickle": lambda sprung, folder: raw(sprung), "torch": zipped}


@pytest.fixture(params=FORMS)
def trap(request, tmp_path):
    """Bytes of the pickle; whatever the test did, it must not have sprung."""
    (tmp_path / "made").mkdir()
    sprung = tmp_path / "sprung"
    yield FORMS[request.param](sprung, tmp_path / "made")
    assert not sprung.exists()


def test_the_trap_springs(tmp_path):
    for number, form in enumerate(FORMS.values()):
        sprung = tmp_path / f"sprung-{number}"
        data = form(sprung, tmp_path)
        (tmp_path / "trap").write_bytes(data)
        if data[:2] == b"PK":
            torch.load(tmp_path / "trap", weights_only=False)
        else:
            pickle.loads(data)
        assert sprung.exists()


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    """A folder of a small captioner."""
    folder = tmp_path_factory.mktemp("blip")
    tiny_captioner("blip").save_pretrained(folder)
    return folder


def without_weights(folder, into, trap, *names):
    """A copy of a model's folder where the weights are pickles."""
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in names or ("pytorch_model.bin", "model.pt", "model.pkl"):
        (into / name).write_bytes(trap)
    return into


@pytest.mark.parametrize(
    ("load", "shipped"),
    [
        (load_captioner, "blip-mle"),
        (load_scorer, "siglip-held-out"),
        (lambda name: TransformersTextBackend(str(name)), "gpt2-perplexity"),
    ],
    ids=["captioner", "scorer", "judge"],
)
def test_pickled_weights_are_not_opened(load, shipped, trap, tmp_path):
    bad = without_weights(model_path(f"scenes:{shipped}"), tmp_path / "m", trap)
    with pytest.raises(FileNotFoundError, match=r"no weights in safetensors.*Use `captionrl convert \S+ OUT`"):
        load(bad)


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (load_bags, ["f.json"]),
        (lambda path: load_captions(str(path)), ["f.pkl", "f.parquet", "f.arrow", "f.jsonl", "f.csv"]),
        (load_hard_pool, ["f.pkl", "f.json"]),
    ],
    ids=["bags", "data", "pool"],
)
def test_pickled_files_are_not_opened(load, names, trap, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(trap)
        with pytest.raises(ValueError, match=r"bags|f\."):
            load(tmp_path / name)


def test_pickled_adapter_is_not_opened(blip, trap, tmp_path):
    captioner = load_captioner(blip)
    captioner.add_lora("language", r=2)
    captioner.model.save_pretrained(tmp_path / "good")
    load_captioner(tmp_path / "good", base_model=str(blip))
    bad = without_weights(tmp_path / "good", tmp_path / "bad", trap, "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no adapter_model\.safetensors.*execute code"):
        load_captioner(bad, base_model=str(blip))


def test_open_clip_scorer(trap, tmp_path):
    (tmp_path / "w.pt").write_bytes(trap)
    (tmp_path / "open_clip_pytorch_model.bin").write_bytes(trap)
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"w\.pt' cannot be loaded because they are not in safetensors"):
        load_scorer("open_clip:ViT-B-32", pretrained=str(tmp_path / "w.pt"))
    with pytest.raises(ValueError, match="are not in safetensors"):
        load_scorer(f"open_clip:{tmp_path}")


def test_conversion_refuses_code_in_a_pickle(blip, trap, tmp_path):
    folder = without_weights(blip, tmp_path / "folder", trap, "pytorch_model.bin")
    (tmp_path / "c.pt").write_bytes(trap)
    for source in (folder, tmp_path / "c.pt"):
        with pytest.raises(ValueError, match="not a plain file of tensors"):
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_feature_cache(trap, tmp_path):
    def cache():
        return FeatureCache(tmp_path / "cache", model_id="m", revision="r")

    keys = [f"{n:032x}" for n in range(4)]
    cache().put(keys, np.eye(4, dtype=np.float32))
    for path in [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]:
        good = path.read_bytes()
        path.write_bytes(trap)
        with contextlib.suppress(KeyError, ValueError):  # rows are bytes, and nothing is unpickled
            np.asarray(cache().get(keys))
        path.write_bytes(good)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A run that was stopped after one of two steps."""
    folder = tmp_path_factory.mktemp("run")
    rows = load_scenes(num_train=4, num_validation=0, num_test=0)["train"]
    train(folder, rows, captioner=tiny_captioner("blip"), save_strategy="steps", per_device_train_batch_size=2)
    return folder / "checkpoint-1", rows


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_resume_refuses_code_in_the_trainers_state(name, checkpoint, trap, tmp_path):
    # A Trainer keeps its state as pickles: they are opened for tensors and numbers alone.
    folder, rows = checkpoint
    copy = tmp_path / "run" / folder.name
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(trap)
    settings = {"max_steps": 2, "per_device_train_batch_size": 2}
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        train(tmp_path / "run", rows, captioner=tiny_captioner("blip"), resume=str(copy), **settings)


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "adapter/adapter_model.bin"])
def test_resume_takes_no_weights_from_pickles_harmless_or_not(name, checkpoint, tmp_path):
    folder, rows = checkpoint
    copy = tmp_path / "run" / folder.name
    shutil.copytree(folder, copy)
    (copy / name).parent.mkdir(exist_ok=True)
    torch.save(load_file(copy / "model.safetensors"), copy / name)
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"{name}' is a pickle; weights are"):
        train(tmp_path / "run", rows, captioner=tiny_captioner("blip"), resume=str(copy), max_steps=2)


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Folders of a text model and of a chat model that sees, and how a trainer loads each by its name."""
    text, chat = (tmp_path_factory.mktemp(kind) for kind in ("text", "chat"))
    for part in tiny_llama(["a dog", "a cat"], vocab_size=300, width=32, layers=1):
        part.save_pretrained(text)
    for part in tiny_chat("llava"):
        part.save_pretrained(chat)

    def sft(folder):
        settings = {"use_cpu": True, "bf16": False, "report_to": [], "max_length": 32}
        rows = datasets.Dataset.from_list([{"text": "a dog"}])
        return SmileSFTTrainer(
            str(folder), SmileSFTConfig(str(tmp_path_factory.mktemp("out")), **settings), train_dataset=rows
        )

    def grpo(folder):
        return make_trainer(str(tmp_path_factory.mktemp("out")), model=str(folder), per_device_train_batch_size=16)

    return {"sft": (text, sft), "grpo": (chat, grpo)}


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_models_that_trl_loads_by_name(kind, named, tmp_path):
    folder, make = named[kind]
    assert make(folder).model is not None
    copy = without_weights(folder, tmp_path / "copy", b"", "unused")
    torch.save(load_file(folder / "model.safetensors"), copy / "pytorch_model.bin")  # one without any harm in it
    with pytest.raises(OSError, match=r"safetensors"):
        make(copy)


LOADERS = {
    "captioner": load_captioner,
    "scorer": load_scorer,
    "part of ClipCap": lambda name: assemble(name, name),
    "judge": TransformersTextBackend,
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


def test_asking_for_it_does_not_help(folder, tmp_path):
    with pytest.raises((ValueError, TypeError, OSError)):
        load_captioner(folder, trust_remote_code=True)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(AttributeError):  # the control: transformers runs the code, which has no model
        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    (tmp_path / "ran").unlink()


def test_code_of_tokenizer_and_processor_beside_known_weights(blip, folder, tmp_path):
    known = tmp_path / "known"
    shutil.copytree(blip, known)
    shutil.copy(f"{folder}/code.py", known)

    def bring(name, **code):
        path = known / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, **code}))

    bring("tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Model", None]}, tokenizer_class="Mine")
    load_captioner(known)  # as a tokenizer of transformers
    code = {"auto_map": dict.fromkeys(("AutoImageProcessor", "AutoProcessor"), "code.Model")}
    code |= {"image_processor_type": "Mine", "processor_class": "Mine"}
    bring("preprocessor_config.json", **code)
    bring("processor_config.json", **code, image_processor=code)
    with pytest.raises(ValueError, match="custom code"):
        load_captioner(known)


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (SmileSFTConfig, {"trust_remote_code": True, "model_init_kwargs": {"trust_remote_code": False}}),
        (SmileSFTConfig, {"model_init_kwargs": '{"trust_remote_code": true}'}),
        (SelfRetrievalGRPOConfig, {"trust_remote_code": True}),
        (SelfRetrievalGRPOConfig, {"model_init_kwargs": {"trust_remote_code": True}}),
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
