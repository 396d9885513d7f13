"""SmileSFTTrainer against plain loops over documents, sentences and windows, and against TRL."""

from __future__ import annotations

import copy

import datasets
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.trainers import SmileSFTConfig, SmileSFTTrainer
from hf_captionrl.trainers.trl_smile_sft import document_ids, find_segments, logit_factors, sentence_ends
from tests.tolerances import assert_close
from tests.trainers.conftest import ROWS
from tests.trainers.one_step import bits, different


def make(parts, folder, *, cls=SmileSFTTrainer, config=SmileSFTConfig, rows=ROWS, peft=None, **settings):
    model, tokenizer = parts
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 5,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_length": 128,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        **settings,
    }
    return cls(
        copy.deepcopy(model),
        config(**arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=copy.deepcopy(tokenizer),
        peft_config=peft,
    )


def batch_of(trainer) -> dict[str, Tensor]:
    return next(iter(trainer.get_train_dataloader()))


def loss_eval(trainer) -> float:
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, batch_of(trainer)))


def sentence_of(ids, tokenizer) -> list[int]:
    number, ended, found = 0, False, []
    for token in ids:
        text = tokenizer.decode([token])
        ends = token in tokenizer.all_special_ids or "\n" in text or text.rstrip("\"') ").endswith((".", "!", "?"))
        number += ended and not ends
        found.append(number)
        ended = ends
    return found


def looped(trainer, scope, *, window=4, mle_weight=0.0, first_token="mle", model=None) -> float:
    """Mean loss over the whole data set, document by document, from full logits of each document alone."""
    model = model or trainer.model
    tokenizer = trainer.processing_class
    total, number = 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = tokenizer(row["prompt"] + row["completion"] + "</s>")["input_ids"]
        start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].double()
        answer = ids[start:]
        if scope == "document":
            group = [0] * len(answer)
        elif scope == "sentence":
            group = sentence_of(answer, tokenizer)
        else:
            group = [i // window for i in range(len(answer))]
            if len(group) > 1 and group[-1] != group[-2]:
                group[-1] = group[-2]
        for i, token in enumerate(answer):
            scores = logits[start + i - 1]
            words = sorted({answer[j] for j in range(len(answer)) if group[j] == group[i]})
            whole = float(scores.logsumexp(0) - scores[token])
            subset = float(scores[words].logsumexp(0) - scores[token])
            if first_token == "mle" and (i == 0 or group[i] != group[i - 1]):
                subset = whole
            total += mle_weight * whole + (1 - mle_weight) * subset
            number += 1
    return total / number


def loss_of(trainer) -> float:
    trainer.model.train()
    batch = batch_of(trainer)
    number = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
    return float(trainer.compute_loss(trainer.model, batch, num_items_in_batch=number).detach())


@pytest.mark.parametrize(
    ("packed", "scope", "mle_weight", "first_token"),
    [
        (False, "document", 0.0, "mle"),
        (True, "document", 0.3, "mle"),
        (False, "sentence", 0.0, "smile"),
        (True, "sentence", 0.0, "mle"),
        (False, "window", 0.3, "mle"),
        (True, "window", 0.0, "smile"),
    ],
)
def test_equals_a_loop_over_documents(parts, tmp_path, packed, scope, mle_weight, first_token):
    settings = {"subset_scope": scope, "window_tokens": 4, "mle_weight": mle_weight, "first_token": first_token}
    if packed:
        settings |= {"packing": True, "max_length": 96}
    trainer = make(parts, tmp_path, **settings)
    if packed:
        assert len(trainer.train_dataset) < len(ROWS)  # rows contain several documents
        assert "position_ids" in batch_of(trainer)
        # Eager attention on a CPU ignores cu_seq_lens; only position ids separate documents.
    expected = looped(trainer, scope, mle_weight=mle_weight, first_token=first_token)
    assert loss_of(trainer) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("packing", "lora"), [(True, False), (False, True)], ids=["bfd", "lora"])
def test_lambda_1_equals_trl(parts, tmp_path, packing, lora):
    """Same weights after two accumulated steps, same logs, bit-exactly."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "max_length": 64}
    kinds: list[dict] = [{"mle_weight": 1.0}, {"cls": SFTTrainer, "config": SFTConfig}]
    trainers = []
    for number, kind in enumerate(kinds):
        torch.manual_seed(0)  # of the adapter
        peft = LoraConfig(**LORA) if lora else None
        trainers.append(make(parts, tmp_path / str(number), peft=peft, packing=packing, **kind, **settings))
        trainers[-1].train()
    ours, theirs = trainers
    for mine, reference in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, reference)
    keys = {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"}
    logs = [[{k: e[k] for k in keys} for e in t.state.log_history if "loss" in e] for t in (ours, theirs)]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 2


def test_mixture_near_lambda_1_approaches_trl(parts, tmp_path):
    """The package's code has TRL's loss and gradients just below lambda = 1."""
    ours = make(parts, tmp_path / "a", mle_weight=1 - 1e-9)
    theirs = make(parts, tmp_path / "b", cls=SFTTrainer, config=SFTConfig)
    losses = []
    for trainer in (ours, theirs):
        batch = batch_of(trainer)
        loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(50))
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for mine, reference in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert_close(mine.grad, reference.grad, ulps=64, magnitude=0.01)


def test_accumulation_does_not_change_the_step(parts, tmp_path):
    settings = {"subset_scope": "window", "optim": "sgd", "max_steps": 1}
    together = make(parts, tmp_path / "a", per_device_train_batch_size=4, **settings)
    split = make(parts, tmp_path / "b", per_device_train_batch_size=1, gradient_accumulation_steps=4, **settings)
    for trainer in (together, split):
        trainer.train()
    for a, b in zip(together.model.parameters(), split.model.parameters(), strict=True):
        assert_close(a, b, magnitude=1)


def test_no_full_logits_at_lambda_0(parts, tmp_path):
    """No tensor has as many entries as tokens times vocabulary."""
    trainer = make(parts, tmp_path, subset_scope="document")
    batch = batch_of(trainer)
    limit = batch["labels"].numel() * trainer.model.config.vocab_size

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, Tensor) and tensor.dim() > 1 and trainer.model.config.vocab_size in tensor.shape:
                    Largest.seen = max(Largest.seen, tensor.numel())
            return result

    with Largest():
        trainer.compute_loss(trainer.model, batch).backward()
    assert 0 < Largest.seen < limit / 4
    assert Largest.seen <= max(5, 32) * trainer.model.config.vocab_size  # one row per document, the weight itself


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("mle_weight", [0.0, 1.0])
def test_lora_of_the_head_moves_and_the_base_stays(parts, tmp_path, mle_weight):
    targets = [*LORA["target_modules"], "lm_head"]
    settings = {"gradient_checkpointing": True, "max_steps": 2, "mle_weight": mle_weight}
    trainer = make(parts, tmp_path, peft=LoraConfig(**{**LORA, "target_modules": targets}), **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(before[name], parameter) != ("lora_" in name), name
    assert any("lm_head" in name for name in before if "lora_B" in name)
    # The loss uses the trained head.
    trainer.model.eval()
    assert loss_eval(trainer) == pytest.approx(looped(trainer, "document", mle_weight=mle_weight), rel=2e-5)


def test_bf16_and_checkpointing(parts, tmp_path):
    trainer = make(parts, tmp_path, bf16=True, gradient_checkpointing=True, peft=LoraConfig(**LORA), max_steps=2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(looped(make(parts, tmp_path), "document"), rel=0.02)
    assert all("entropy" not in e and "mean_token_accuracy" not in e for e in trainer.state.log_history)


def test_resume_is_exact(parts, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "subset_scope": "sentence", "seed": 5}
    settings |= {"per_device_train_batch_size": 1, "lr_scheduler_type": "linear"}
    whole = make(parts, tmp_path / "a", peft=LoraConfig(**LORA, lora_dropout=0.1), **settings)
    whole.train()
    again = make(parts, tmp_path / "b", peft=LoraConfig(**LORA, lora_dropout=0.1), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert different(bits(whole), bits(again)) == []


def test_evaluation_and_a_model_by_name(parts, tmp_path):
    model, _ = parts
    for part in parts:
        part.save_pretrained(tmp_path / "base")
    settings = {"output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False, "max_length": 96, "report_to": []}
    rows = datasets.Dataset.from_list(ROWS)
    for packing in (False, True):
        trainer = SmileSFTTrainer(
            str(tmp_path / "base"),
            SmileSFTConfig(**settings, packing=packing, subset_scope="window", window_tokens=4),
            train_dataset=rows,
            eval_dataset=rows,
        )
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(looped(trainer, "window", model=model), rel=1e-4)
        assert "eval_entropy" not in found


def test_assistant_turns_share_a_document_but_no_sentence():
    """Labels of a conversation, in which the user's turns are not supervised."""
    labels = torch.tensor([[-100, 5, 6, -100, -100, 7, 5, 1]])
    documents = document_ids(labels, None)
    ends = torch.zeros(10, dtype=torch.bool)
    ends[1] = True
    assert find_segments(labels, documents, "document").segment.tolist() == [0] * 5
    assert find_segments(labels, documents, "sentence", ends=ends).segment.tolist() == [0, 0, 1, 1, 1]
    assert find_segments(labels, documents, "window", window_tokens=2).segment.tolist() == [0, 0, 1, 1, 1]


def test_sentence_ends(parts):
    _, tokenizer = parts
    ends = sentence_ends(tokenizer, len(tokenizer) + 3)
    by_text = {tokenizer.decode([i]): bool(ends[i]) for i in range(len(tokenizer))}
    assert [by_text[text] for text in (".", "!", "\n", "</s>", "a", ",")] == [True] * 4 + [False] * 2
    assert not ends[-3:].any()  # rows of the head beyond the tokenizer


def test_wrong_types_are_refused(parts, tmp_path):
    with pytest.raises(TypeError, match="SmileSFTConfig"):
        make(parts, tmp_path, config=SFTConfig)
    prompt_tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trainer = make(parts, tmp_path, peft=prompt_tuning, packing=True, max_length=64)
    with pytest.raises(ValueError, match="position_ids"):
        trainer.compute_loss(trainer.model, batch_of(trainer))


def test_training_arguments_are_converted(parts, tmp_path):
    model, tokenizer = parts
    args = TrainingArguments(str(tmp_path), learning_rate=3e-4, hub_token="secret", use_cpu=True, report_to=[])
    rows = datasets.Dataset.from_list(ROWS)
    trainer = SmileSFTTrainer(copy.deepcopy(model), args, train_dataset=rows, processing_class=tokenizer)
    assert type(trainer.args) is SmileSFTConfig
    assert (trainer.args.learning_rate, trainer.args.hub_token, trainer.args.mle_weight) == (3e-4, "secret", 0.0)


def test_router_losses_are_refused_before_training(parts, tmp_path):
    _, tokenizer = parts
    sizes = dict.fromkeys(["hidden_size", "intermediate_size", "moe_intermediate_size"], 8)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), num_experts_per_tok=2, **sizes))
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        make((model, tokenizer), tmp_path)


def test_logit_factors_are_those_of_trl(parts, tmp_path):
    model, tokenizer = parts
    assert logit_factors(model.config) == (1.0, None)
    for name, value, expected in (("logit_scale", 0.25, 0.25), ("logits_scaling", 8.0, 0.125)):
        scaled = copy.deepcopy(model)
        setattr(scaled.config, name, value)
        assert logit_factors(scaled.config)[0] == expected
        ours = make((scaled, tokenizer), tmp_path, mle_weight=1 - 1e-9)
        theirs = make((scaled, tokenizer), tmp_path, cls=SFTTrainer, config=SFTConfig)
        assert loss_eval(ours) == pytest.approx(loss_eval(theirs), rel=1e-5)
