"""Rewards of `captionrl serve-rewards` for verl, EasyR1 and ms-swift, and the embedded world as an environment of OpenEnv.

The data of a trainer name the image of a row by its id in the server's data: verl and EasyR1 in the ground truth, ms-swift in a
column `image_id`. docs/rewards.md shows each configuration.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hf_captionrl.apps.serving.client import RemoteReward, rollout_of
from hf_captionrl.scenes import Facts, check, render_scene, scene_stream

_remote = functools.cache(RemoteReward)


def _scored(url: str, captions: Sequence[str], image_ids: Sequence[Any], total: str) -> list[dict[str, float]]:
    """The weighted sum of each caption, under the name `total`, and its rewards by name."""
    found = _remote(url).score(*rollout_of(captions, {"image_id": image_ids}, "image_id"))
    parts = [dict(zip(found["parts"], row, strict=True)) for row in zip(*found["parts"].values(), strict=True)]
    return [{total: number, **part} for number, part in zip(found["rewards"], parts, strict=True)]


def verl_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, *, url: str, **kwargs: Any
) -> dict[str, float]:
    """verl's `custom_reward_function` for one caption; the server needs a reward of single images, such as that of a bank."""
    return _scored(url, [solution_str], [ground_truth], "score")[0]


def verl_scores(
    data_sources: Any,
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Any = None,
    *,
    url: str,
    **kwargs: Any,
) -> list[dict[str, float]]:
    """The same for verl's reward manager `batch`: the images of a batch are distractors of each other."""
    return _scored(url, solution_strs, ground_truths, "score")


REWARD_NAME, REWARD_TYPE = "captionrl", "batch"  # read by EasyR1


def easyr1_score(reward_inputs: Sequence[Mapping[str, Any]], *, url: str) -> list[dict[str, float]]:
    """EasyR1's reward function of type `batch`."""
    captions, ids = ([row[key] for row in reward_inputs] for key in ("response", "ground_truth"))
    return _scored(url, captions, ids, "overall")


def swift_orm(url: str, **settings: Any) -> type[Any]:
    """A class for ms-swift's registry `orms`; `settings` are those of [`RemoteReward`]."""
    from swift.rewards import ORM

    class CaptionReward(ORM):  # type: ignore[misc]
        def __init__(self, args: Any = None, **kwargs: Any) -> None:
            self.args, self.reward = args, RemoteReward(url, **settings)

        def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
            return self.reward(completions, **columns)

    return CaptionReward


def scene_reward(caption: str, facts: Facts) -> dict[str, float]:
    """`fact_recall` and `hallucination` of a caption of a scene, in [0, 1], and their difference `reward`; exact, 1 is best."""
    result = check(caption, facts)
    recall = len(result.recalled) / max(len(result.recalled) + len(result.missed), 1)
    hallucination = len(result.wrong) / max(len(result.right) + len(result.wrong), 1)
    return {"reward": recall - hallucination, "fact_recall": recall, "hallucination": hallucination}


def openenv_scenes() -> tuple[type[Any], type[Any], type[Any]]:
    """Environment, action and observation of an endless task for OpenEnv's `create_app`: caption a scene, get its `scene_reward`.

    `reset(seed=...)` starts the stream of scenes of a seed, `reset()` takes its next scene; an episode is one caption.
    """
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class CaptionAction(Action):  # type: ignore[misc]
        caption: str

    class SceneObservation(Observation):  # type: ignore[misc]
        prompt: str = "Describe the image in one sentence."
        image: str = ""  # PNG in base64

    class SceneEnvironment(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self, seed: int | None = None) -> None:
            super().__init__()
            self._scenes, self._state = scene_stream(seed), State()  # type: ignore[arg-type]  # None: fresh entropy

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            if seed is not None:
                self._scenes = scene_stream(seed)
            self._scene, self._state = next(self._scenes), State(episode_id=episode_id)
            buffer = io.BytesIO()
            render_scene(self._scene).save(buffer, "PNG")
            return SceneObservation(image=base64.b64encode(buffer.getvalue()).decode("ascii"))

        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            self._state.step_count += 1
            found = scene_reward(action.caption, self._scene.facts)
            return SceneObservation(done=True, reward=found["reward"], metadata=found)

        @property
        def state(self) -> Any:
            return self._state

    return SceneEnvironment, CaptionAction, SceneObservation
