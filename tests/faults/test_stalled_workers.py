"""A worker that stops without dying is noticed, told of and replaced."""

from __future__ import annotations

import pytest
from mortal_workers import MortalRunner, write_plan
from test_worker_death import configuration, ray_session, restarts  # noqa: F401  (a fixture)
from user_run import assert_same_run

from quadriga.trainer.main_ppo import run_ppo


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["generate", "update_actor"])
def test_a_stopped_worker_is_replaced_and_the_run_is_the_same(ray_session, task, tmp_path, capsys, method):  # noqa: F811
    deadlines = {"watchdog": {"soft_s": 2.0, "hard_s": 5.0}}
    write_plan(tmp_path / "whole", [])
    run_ppo(configuration(task, tmp_path / "whole", "grpo", 2), MortalRunner)
    fault = {"method": method, "step": 6, "rank": 1, "after_ms": 0, "signal": "SIGSTOP"}
    write_plan(tmp_path / "stalled", [fault])
    run_ppo(configuration(task, tmp_path / "stalled", "grpo", 2, **deadlines), MortalRunner)
    told = capsys.readouterr().out
    phase = {"generate": "gen", "update_actor": "update_actor"}[method]
    assert f"step 6: step/{phase} has been running for" in told
    assert "actor_rollout rank 1 of 2" in told
    assert "no answer" in told
    stacks = (tmp_path / "stalled" / "stalls" / f"step_00000006_{phase}.txt").read_text()
    if phase == "gen":
        assert "waits for the samples 1:" in told
        assert "generates" in told
    else:
        assert f"actor_rollout.{method} for" in told, "the other rank waits for it in a collective"
        assert f"in {method}" in stacks
    assert restarts(tmp_path / "stalled") == 1
    assert_same_run(tmp_path / "whole", tmp_path / "stalled")
