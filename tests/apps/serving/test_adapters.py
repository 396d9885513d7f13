"""Adapters, called as the trainers call them: by their published signatures, and by the installed packages where there are any.

The packages do not share one environment with this library. Each test was run with verl 0.9.1, ms-swift 4.6.0 and openenv-core 0.3.0.
"""

import asyncio
import base64
import functools
import importlib.util
import io
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from pydantic import BaseModel, ConfigDict

from hf_captionrl.apps.serving import adapters
from hf_captionrl.apps.serving.adapters import openenv_scenes, scene_reward, swift_orm, verl_scores
from hf_captionrl.apps.serving.server import RewardServer, RewardService
from hf_captionrl.scenes import Facts, full_caption, render_scene, scene_stream
from tests.apps.serving.conftest import CAPTIONS


@pytest.fixture(scope="module")
def expected(service, ids):
    """Sums and parts of the fixed captions."""
    return service.score(CAPTIONS, list(dict.fromkeys(ids)), [0, 0, 1, 1, 2, 2])


def rows(expected, total):
    parts = [dict(zip(expected["parts"], row, strict=True)) for row in zip(*expected["parts"].values(), strict=True)]
    return [{total: number, **part} for number, part in zip(expected["rewards"], parts, strict=True)]


@pytest.mark.parametrize("package", ["published", "installed"])
def test_verl_batch(server, ids, expected, package):
    """As the reward manager `batch` calls it."""
    score = functools.partial(verl_scores, url=server.address)
    if package == "published":
        given = {"data_sources": ["x"] * 6, "solution_strs": CAPTIONS, "ground_truths": ids, "extra_infos": [{}] * 6}
        assert score(**given) == rows(expected, "score")
        return
    pytest.importorskip("verl", reason="verl is not installed")
    from verl import DataProto
    from verl.workers.reward_manager.batch import BatchRewardManager

    number = torch.arange(6)[:, None]
    tensors = {"prompts": number, "responses": number, "attention_mask": torch.ones(6, 2, dtype=torch.long)}
    truth = np.array([{"ground_truth": image_id} for image_id in ids], dtype=object)
    extras = {"reward_model": truth, "data_source": np.array(["x"] * 6, dtype=object)}
    tokenizer = types.SimpleNamespace(decode=lambda ids, **kwargs: CAPTIONS[int(ids[0])])
    found = BatchRewardManager(tokenizer, 0, score)(DataProto.from_dict(tensors, non_tensors=extras), return_dict=True)
    assert found["reward_tensor"][:, 0].tolist() == torch.tensor(expected["rewards"]).tolist()
    assert found["reward_extra_info"]["length"] == expected["parts"]["length"]


@pytest.mark.parametrize("package", ["published", "installed"])
def test_verl_one_caption(options, ids, package):
    """As the reward manager `naive` calls it, here found by verl's own `get_custom_reward_fn`."""
    made = RewardService(options(), ["self_retrieval:distractor_scope=bank,bank_size=20"])
    with RewardServer(made, options()) as running:
        if package == "published":
            found, settings = adapters.verl_score, {"url": running.address}
        else:
            pytest.importorskip("verl", reason="verl is not installed")
            from verl.trainer.ppo.reward import get_custom_reward_fn

            own = {
                "path": f"pkg://{adapters.__name__}",
                "name": "verl_score",
                "reward_kwargs": {"url": running.address},
            }
            found, settings = get_custom_reward_fn(types.SimpleNamespace(reward={"custom_reward_function": own})), {}
        scored = found(
            data_source="x", solution_str=CAPTIONS[0], ground_truth=ids[0], extra_info={"num_turns": 1}, **settings
        )
    reward = made.score(CAPTIONS[:1], ids[:1], [0])["rewards"][0]
    assert scored == {"score": reward, "self_retrieval": reward}


def test_easyr1(server, ids, expected):
    """As `AutoRewardManager` loads and calls it: from the file, which says that it takes batches."""
    spec = importlib.util.spec_from_file_location("custom_reward_fn", adapters.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = [{"response": c, "response_length": 3, "ground_truth": i} for c, i in zip(CAPTIONS, ids, strict=True)]
    assert module.easyr1_score(given, url=server.address) == rows(expected, "overall")
    assert module.REWARD_TYPE == "batch"


class PublishedORM:
    def __init__(self, args=None, **kwargs):
        self.args = args


@pytest.mark.parametrize("package", ["published", "installed"])
def test_swift(server, ids, expected, package, monkeypatch):
    """The trainer makes `orms[name](args=args)` and calls it with the columns of the data."""
    if package == "published":
        monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
        module = types.ModuleType("swift.rewards")
        module.ORM, module.orms = PublishedORM, {}
        monkeypatch.setitem(sys.modules, "swift.rewards", module)
    else:
        pytest.importorskip("swift.rewards", reason="ms-swift is not installed")
    from swift.rewards import ORM, orms

    monkeypatch.setitem(orms, "captionrl", swift_orm(server.address))
    reward = orms["captionrl"](args=None)
    assert isinstance(reward, ORM)
    more = {"messages": [[]] * 6, "trainer_state": None, "solution": [None] * 6}
    assert reward(CAPTIONS, image_id=ids, **more) == expected["rewards"]
    some = swift_orm(server.address, rewards=["length"])(args=None)
    assert some(CAPTIONS, image_id=ids, **more) == expected["parts"]["length"]


FACTS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")


@pytest.mark.parametrize(
    ("caption", "recall", "hallucination"),
    [
        (full_caption(FACTS), 1, 0),
        ("", 0, 0),
        ("two pigs", 2 / 8, 0),
        ("two large pigs", 2 / 8, 1 / 3),
        ("a red car", 0, 1),
    ],
)
def test_the_reward_of_a_scene_is_exact(caption, recall, hallucination):
    found = scene_reward(caption, FACTS)
    assert found == pytest.approx(
        {"reward": recall - hallucination, "fact_recall": recall, "hallucination": hallucination}
    )


@pytest.fixture(params=["published", "installed"])
def openenv(request, monkeypatch):
    """The base classes of OpenEnv: with the published fields, or the installed ones."""
    if request.param == "installed":
        pytest.importorskip("openenv.core.env_server.interfaces", reason="openenv-core is not installed")
        return request.param

    class Action(BaseModel):
        model_config = ConfigDict(extra="forbid")

    class Observation(BaseModel):
        model_config = ConfigDict(extra="forbid")
        done: bool = False
        reward: bool | int | float | None = None
        metadata: dict = {}

    class State(BaseModel):
        episode_id: str | None = None
        step_count: int = 0

    class Environment:
        def __init__(self, transform=None, rubric=None):
            pass

    for name, values in {"interfaces": [Environment], "types": [Action, Observation, State]}.items():
        module = types.ModuleType(f"openenv.core.env_server.{name}")
        for value in values:
            setattr(module, value.__name__, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("openenv", "openenv.core", "openenv.core.env_server"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return request.param


def test_openenv_is_an_endless_task_with_exact_rewards(openenv):
    environment_cls, action_cls, observation_cls = openenv_scenes()
    environment, stream = environment_cls(), scene_stream(7)
    observation = environment.reset(seed=7, episode_id="e")
    for number in range(5):
        scene = next(stream)
        assert isinstance(observation, observation_cls)
        assert (observation.done, observation.reward, environment.state.step_count) == (False, None, 0)
        shown = Image.open(io.BytesIO(base64.b64decode(observation.image)))
        assert ImageChops.difference(shown.convert("RGB"), render_scene(scene).convert("RGB")).getbbox() is None
        caption = full_caption(scene.facts) if number % 2 else "a purple unicorn on a yellow background"
        result = environment.step(action_cls(caption=caption))
        assert result.done
        assert result.reward == result.metadata["reward"] == scene_reward(caption, scene.facts)["reward"]
        assert (result.reward == 1) == bool(number % 2)
        assert environment.state.step_count == 1
        observation = environment.reset()
    assert environment_cls(seed=1).reset().image == environment_cls(seed=1).reset().image
    assert environment_cls().reset().image != environment_cls().reset().image
    with pytest.raises(ValueError, match="caption"):
        action_cls(text="a pig")
    if openenv == "installed":
        again = asyncio.run(environment.reset_async(seed=7))
        assert again.image == environment_cls(seed=7).reset().image
