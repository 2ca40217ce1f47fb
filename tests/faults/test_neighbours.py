"""What a fault test that is cut off leaves running does not fail the tests after it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray
from mortal_workers import free_slots, start_ray
from user_run import UserRun, end_all_runs


@pytest.mark.slow
def test_slots_that_are_never_given_back_are_made_free():
    @ray.remote(num_cpus=1)
    class Stuck:
        def wait(self) -> None:
            """Keep its slot."""

    start_ray(num_cpus=1)
    stuck = Stuck.options(lifetime="detached", name="stuck").remote()
    ray.get(stuck.wait.remote())
    free_slots(wait_s=0.5)
    assert ray.available_resources()["CPU"] == 1
    ray.shutdown()


def test_runs_that_nobody_waited_for_are_ended(tmp_path):
    run = UserRun({"trainer": {"default_local_dir": str(tmp_path)}})
    run.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    end_all_runs()
    assert run.process.poll() == -9
