"""Small names of verl's that its users' code leans on: scorers, schemas of tools, dicts, dispatch, whole configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import quadriga.compat.verl
from quadriga.rewards.sandbox import can_isolate

os.environ.pop(quadriga.compat.verl.VARIABLE, None)  # other tests start processes too


# ---- scorers


def test_answers_after_a_mark_or_in_a_box_are_scored_by_one_and_minus_one() -> None:
    from verl.utils.reward_score import default_compute_score, math_dapo

    right = math_dapo.compute_score(solution_str="so \\boxed{3}", ground_truth="3")
    assert (right["score"], right["acc"], right["pred"]) == (1.0, True, "3")
    assert math_dapo.compute_score("so \\boxed{4}", "3")["score"] == -1.0
    assert math_dapo.verify("\\boxed{3}", "3") == (True, "3")
    assert math_dapo.verify("Thus\nAnswer: 3", "3") == (True, "3")
    assert math_dapo.verify("Thus\nAnswer: 3", "3", strict_box_verify=True) == (False, None)
    for source in ("math_dapo", "aime2024", "aime_2025", "math"):
        told = default_compute_score(source, "thus \\boxed{3}", "3")
        assert isinstance(told, dict)
        assert told["score"] == 1.0


def test_scorers_take_verls_arguments() -> None:
    from verl.utils.reward_score import default_compute_score, geo3k, math_verify, search_r1_like_qa_em
    from verl.utils.reward_score.math_batch import compute_score_batched
    from verl.utils.reward_score.prime_math import compute_score as prime

    assert math_verify.compute_score(model_output="\\boxed{3}", ground_truth="3") == 1.0
    assert compute_score_batched(["m"] * 2, ["\\boxed{3}", "\\boxed{4}"], ["3", "3"], [{}, {}]) == [1.0, 0.0]
    assert prime("\\boxed{3}", "3") == (True, True, "3")
    assert default_compute_score("numina_olympiads", "\\boxed{3}", "3") == 1.0
    assert geo3k.compute_score("<think>x</think> \\boxed{3}", "3") == pytest.approx(1.0)
    assert geo3k.compute_score("\\boxed{3}", "3") == pytest.approx(0.9)
    assert geo3k.compute_score("<think>x</think> \\boxed{4}", "3") == pytest.approx(0.1)
    answer = search_r1_like_qa_em.compute_score
    assert answer("a <answer>x</answer> b <answer>The Paris.</answer>", {"target": ["Rome", "paris"]}) == 1.0
    assert answer("<answer>Oslo</answer>", {"target": "Paris"}, format_score=0.1) == 0.1
    assert answer("Paris", {"target": ["Paris"]}) == 0.0
    with pytest.raises(NotImplementedError, match="no reward function"):
        default_compute_score("nobody/knows", "", "")


# ---- tools


def test_schemas_of_tools_come_from_plain_values_and_go_back() -> None:
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    plain = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "where"}},
                "required": ["place"],
            },
        },
    }
    schema = OpenAIFunctionToolSchema.model_validate(plain)
    assert schema.function.parameters.properties["place"].type == "string"
    assert schema.model_dump(exclude_unset=True) == plain
    assert schema.model_dump()["function"]["strict"] is False
    with pytest.raises(ValueError, match="lacks function"):
        OpenAIFunctionToolSchema(type="function")

    class Look(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(text=parameters["place"]), 0.0, {}

    assert Look({}, plain).name == Look({}, schema).name == "look"


def test_the_tool_of_verls_examples_says_whether_an_answer_is_right() -> None:
    import asyncio

    from verl.tools.gsm8k_tool import Gsm8kTool

    tool = Gsm8kTool({}, {"type": "function", "function": {"name": "calc_gsm8k_reward"}})

    async def use() -> list[float]:
        name, _ = await tool.create(ground_truth="72")
        told = [await tool.execute(name, {"answer": text}) for text in ("71", "72")]
        rewards = [reward for _, reward, _ in told]
        return [*rewards, await tool.calc_reward(name)]

    assert asyncio.run(use()) == [-0.05, 0.0, 1.0]


@pytest.mark.skipif(not can_isolate(), reason="this machine cannot shut programs in")
def test_a_subclass_of_the_sandbox_tool_runs_programs_here() -> None:
    import asyncio

    from verl.tools.sandbox_fusion_tools import SandboxFusionTool

    class Shown(SandboxFusionTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            code = f"print({parameters['code']})"
            told = (instance_id, code, self.default_timeout, self.default_language)
            if parameters.get("pool"):
                return await self.execution_pool.execute.remote(self.execute_code, *told), None, None
            async with self._async_semaphore:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(None, self.execute_code, *told), None, None

    schema = {"type": "function", "function": {"name": "run"}}
    plain, shown = SandboxFusionTool({}, schema), Shown({"default_timeout": 5}, schema)

    def printed(tool: Any, **parameters: Any) -> str:
        return asyncio.run(tool.execute("0", parameters))[0].text

    assert printed(plain, code="print(6 * 7)").strip() == "42"
    assert "ZeroDivisionError" in printed(plain, code="1 / 0")
    assert "in time" in printed(plain, code="while True: pass", timeout=1)
    assert "only python" in printed(plain, code="echo", language="bash")
    assert [printed(shown, code="6 * 7", pool=pool).strip() for pool in (True, False)] == ["42", "42"]


# ---- small things


def test_dicts_and_groups() -> None:
    from verl.utils import as_torch_index, group_mean_std
    from verl.utils.py_functional import convert_to_regular_types, rename_dict, union_two_dict

    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(AssertionError):
        union_two_dict({"a": 1}, {"a": 2})
    assert rename_dict({"a": {"b": 1}}, "x/") == {"x/a.b": 1}
    assert convert_to_regular_types(OmegaConf.create({"a": [1, {"b": "c"}]})) == {"a": [1, {"b": "c"}]}
    index = as_torch_index(np.array(["q", "p", "q"], dtype=object))
    assert index.tolist() == [0, 1, 0]
    mean, deviation, size = group_mean_std(torch.tensor([1.0, 5.0, 3.0]), index)
    assert (mean.tolist(), size.tolist()) == ([2.0, 0.0], [2.0, 1.0])
    assert deviation.tolist() == pytest.approx([2**0.5, 1.0])


def test_registries_and_dispatch_look_like_verls() -> None:
    from types import SimpleNamespace

    from verl.single_controller.base.decorator import DISPATCH_MODE_FN_REGISTRY, Dispatch, dispatch_one_to_all
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    group = SimpleNamespace(world_size=2, share=lambda value: value)
    args, kwargs, *_ = dispatch_one_to_all(group, 1, b=2)
    assert ([list(a) for a in args], {k: list(v) for k, v in kwargs.items()}) == ([[1, 1]], {"b": [2, 2]})
    assert set(DISPATCH_MODE_FN_REGISTRY[Dispatch.DP_COMPUTE_PROTO]) == {"dispatch_fn", "collect_fn"}
    assert "grpo" in ADV_ESTIMATOR_REGISTRY
    assert callable(POLICY_LOSS_REGISTRY["gspo"])
    assert "nothing" not in POLICY_LOSS_REGISTRY
    assert {"token_k1", "seq_max_k3"} <= SUPPORTED_ROLLOUT_RS_OPTIONS


def test_geo_mean_is_averaged_over_rows_as_in_verl() -> None:
    from verl.trainer.ppo.core_algos import compute_policy_loss_geo_mean
    from verl.workers.config import ActorConfig

    new = torch.tensor([[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, 0.0, 0.0]])
    config = ActorConfig(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    loss, _ = compute_policy_loss_geo_mean(new - 0.1, new, advantages, mask, "token-mean", config)
    assert loss.item() == pytest.approx((-1 + 2) * np.exp(0.1) / 2, abs=1e-5)


# ---- whole configurations


def test_a_whole_configuration_is_read_as_what_differs_from_verls_defaults() -> None:
    from quadriga.compat.verl.whole_config import completed, differences

    given = {"actor_rollout_ref": {"rollout": {"n": 4}, "actor": {"ppo_epochs": 2}}, "data": {"max_prompt_length": 77}}
    whole = completed(given)
    assert whole.actor_rollout_ref.rollout.prompt_length == 77
    assert (whole.critic.ppo_epochs, whole.actor_rollout_ref.actor.strategy) == (2, "fsdp")
    wanted = {"actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_epochs": 2, "data.max_prompt_length": 77}
    names = {f"trainer.{name}" for name in ("project_name", "experiment_name", "default_local_dir")}
    for form in (whole, OmegaConf.create(OmegaConf.to_container(whole, resolve=True))):
        told = differences(form)
        assert {key: value for key, value in told.items() if key not in names} == wanted
    assert differences({"critic": {"ppo_epochs": 3}}) == {"critic.ppo_epochs": 3}


def test_new_and_old_spellings_in_a_whole_configuration_do_not_hide_each_other() -> None:
    from quadriga.compat.verl.configs import understood
    from quadriga.compat.verl.whole_config import completed

    new = completed({"reward": {"reward_manager": {"name": "dapo"}}})
    old = completed({"reward_model": {"reward_manager": "dapo"}})
    assert understood(new) == understood(old)
    assert understood(new)["reward_model"]["reward_manager"] == "dapo"


def test_bounds_are_turned_once_however_often_a_configuration_is_read() -> None:
    from quadriga.compat.verl.configs import as_checked
    from quadriga.compat.verl.whole_config import completed

    rs = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_4.0"}
    config = completed(
        {"algorithm": {"rollout_correction": rs, "adv_estimator": "grpo"}, "actor_rollout_ref": {"rollout": {"n": 2}}}
    )
    checked = as_checked(config)
    assert checked.algorithm.rollout_correction.rollout_rs_threshold == "0.25_2.0"
    assert as_checked(checked) is checked
    assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.5_4.0", "verl's code reads verl's bounds"


def test_hydra_finds_verls_configuration_in_its_package(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir

    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 16}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("mine", ["actor_rollout_ref.rollout.n=3"])
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (16, 3)
    assert config.actor_rollout_ref.actor.strategy == "fsdp"
