"""Self-retrieval in one file: BLIP writes captions, and is rewarded if a frozen CLIP finds the image of each caption.

Dessi et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning" (DiscriTune). Read it from top to bottom. It runs
on the embedded world, without a network, in less than a minute on a CPU core:

    python examples/self_retrieval_in_one_file.py

`SelfRetrievalTrainer` takes the same steps (tests/examples/test_one_file.py compares the gradients), with any model family, several
processes, bags of similar images, other rewards, a guard against hacked rewards, and exact resume.

Shapes: B images of a step, one caption each, T tokens, V vocabulary, M image tokens, D features.
"""

import random

import torch
import torch.nn.functional as F
from transformers import BertTokenizer, BlipForConditionalGeneration, BlipImageProcessor, CLIPImageProcessor, CLIPModel

from hf_captionrl import load_scenes, load_scorer
from hf_captionrl.losses import policy_gradient_loss
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.rewards import RunningMeanBaseline, retrieval_rewards
from hf_captionrl.utils.model_files import model_path

# --- Settings: those of the paper (Section 4) are in brackets ----------------------------------------------------------

MODEL = model_path("scenes:blip-mle")  # a captioner trained by maximum likelihood [ClipCap and BLIP]
SCORER = model_path("scenes:clip-reward")  # the frozen listener [CLIP ViT-B/32]
HELD_OUT = "scenes:siglip-held-out"  # evaluates only: the listener cannot tell that it is being fooled
STEPS = 100
BATCH_SIZE = 100  # images of a step, all of them distractors of each other [100]
LEARNING_RATE = 1e-4  # a tiny model wants a larger step [1e-7]
DO_SAMPLE = True  # [False: greedy captions, which teach a tiny model little]
MAX_TOKENS = 20
SEED = 0


# --- Models --------------------------------------------------------------------------------------------------------------


def load(name):
    """BLIP, its tokenizer and its image processor. The vision tower is frozen, so that each image is encoded once."""
    model = BlipForConditionalGeneration.from_pretrained(name, use_safetensors=True)
    model.vision_model.requires_grad_(False)
    return model, BertTokenizer.from_pretrained(name), BlipImageProcessor.from_pretrained(name)


class Listener:
    """CLIP: captions and images as unit vectors."""

    def __init__(self, name):
        self.clip = CLIPModel.from_pretrained(name, use_safetensors=True, dtype=torch.float32).requires_grad_(False)
        self.tokenizer, self.processor = BertTokenizer.from_pretrained(name), CLIPImageProcessor.from_pretrained(name)
        self.scale = float(self.clip.logit_scale.exp())

    def texts(self, captions):
        inputs = self.tokenizer(captions, padding=True, truncation=True, return_tensors="pt")
        hidden = self.clip.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
        return F.normalize(hidden, dim=-1)  # (B, D)

    def images(self, images):
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        return F.normalize(self.clip.get_image_features(pixels).pooler_output, dim=-1)  # (B, D)


# --- A step: captions, rewards, advantages, loss -------------------------------------------------------------------------


@torch.no_grad()
def write(model, features, do_sample):
    """Captions of the policy itself (top_k=0: of the whole distribution): ids after the start token, and their mask."""
    config = model.config.text_config
    start = torch.full((len(features), 1), config.bos_token_id)  # (B, 1)
    ids = model.text_decoder.generate(
        input_ids=start,
        encoder_hidden_states=features,
        eos_token_id=config.sep_token_id,
        pad_token_id=config.pad_token_id,
        max_new_tokens=MAX_TOKENS,
        do_sample=do_sample,
        top_k=0 if do_sample else None,
    )[:, 1:]  # (B, T)
    return ids, ids != config.pad_token_id


def rewards_of(listener, captions, images):
    """Section 3, the reward: log softmax of the similarities of a caption with all images of the step, at the target."""
    similarity = listener.texts(captions) @ images.T  # (B, B)
    return retrieval_rewards(similarity, torch.arange(len(images)), "log_prob", listener.scale)  # (B,) nats


def log_probs_of(model, features, ids):
    """Log-probability of each token of the captions under the policy."""
    start = torch.full((len(ids), 1), model.config.text_config.bos_token_id)
    inputs = torch.cat([start, ids[:, :-1]], dim=1)  # (B, T): position t predicts ids[:, t]
    logits = model.text_decoder(input_ids=inputs, encoder_hidden_states=features).logits  # (B, T, V)
    return logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]  # (B, T)


def loss_of(model, features, ids, mask, rewards, baseline):
    """REINFORCE, Eq. 1 and Appendix B: -(R - b) log p(caption), with b the running mean of past rewards, log p the mean over tokens."""
    advantages = baseline(rewards)  # (B,)
    baseline.update(float(rewards.mean()))
    return policy_gradient_loss(log_probs_of(model, features, ids), advantages, mask, loss_type="grpo")["loss"]


# --- The loop ------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    random.seed(SEED)
    torch.manual_seed(SEED)
    model, tokenizer, processor = load(MODEL)
    listener, baseline, held_out = Listener(SCORER), RunningMeanBaseline(), load_scorer(HELD_OUT)
    data = load_scenes(num_train=1280, num_validation=0, num_test=300)
    splits = [data[name]["image"][:] for name in ("train", "test")]
    with torch.no_grad():
        pixels = [processor(images=split, return_tensors="pt")["pixel_values"] for split in splits]  # (N, 3, H, W)
        train, test = (model.vision_model(each).last_hidden_state for each in pixels)  # (N, M, D)
        seen = listener.images(splits[0])  # (N, D), each image once

    def show(name):
        """R@1 by the held-out scorer among all test images, of greedy captions."""
        captions = tokenizer.batch_decode(write(model, test, do_sample=False)[0], skip_special_tokens=True)
        found = self_retrieval(held_out.text_features(captions), held_out.image_features(splits[1]))
        low, high = found["recall_at_1_ci"]
        print(f"{name:6} R@1 {found['recall_at_1']:.2f} [{low:.2f}, {high:.2f}]: {captions[0]}")

    show("before")
    optimizer = torch.optim.AdamW(
        [w for w in model.parameters() if w.requires_grad], lr=LEARNING_RATE, weight_decay=0.0
    )
    for step in range(STEPS):
        rows = random.sample(range(len(train)), BATCH_SIZE)
        ids, mask = write(model, train[rows], DO_SAMPLE)
        rewards = rewards_of(listener, tokenizer.batch_decode(ids, skip_special_tokens=True), seen[rows])
        loss = loss_of(model, train[rows], ids, mask, rewards, baseline)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  reward {rewards.mean():.3f}")
    show("after")
