"""Python, packages, torch and its devices, CPU number formats: bad situations are named and come with a fix."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from quadriga.commands.doctor import Finding
from quadriga.commands.doctor.packages import Installed, audit, judge_packages, judge_python, quadriga_requirements
from quadriga.commands.doctor.probe import ProbeResult, run_command
from quadriga.commands.doctor.torch_checks import judge_devices, judge_dtype


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "warn")]
)
def test_python_version_is_judged(version: tuple[int, int], status: str) -> None:
    assert judge_python(version, "Python").status == status


SHELF = {
    "torch": Installed("2.13.0+cpu", ("sympy>=1.13", "triton>=3; extra == 'gpu'")),
    "ray": Installed("2.40.0", ("click", "aiohttp>=3; extra == 'default'")),
    "sympy": Installed("1.12", ()),
    "click": Installed("8.0", ()),
    "numpy": Installed("2.4.6", ()),
    "chicken": Installed("1.0", ("egg",)),
    "egg": Installed("1.0", ("chicken>=1.0",)),
}


def package_findings(*requirements: str) -> list[Finding]:
    return judge_packages(*audit(requirements, SHELF.get))


def test_met_requirements_are_one_ok_line_and_inapplicable_ones_are_skipped() -> None:
    findings = package_findings("numpy>=1.26", "wandb; extra == 'wandb'", "colorama; sys_platform == 'nowhere'")
    assert findings == [Finding("packages", "ok", "1 packages, all requirements hold")]


def test_packages_that_need_each_other_do_not_loop() -> None:
    assert audit(["chicken"], SHELF.get) == (2, [])


def test_missing_and_old_packages_fail_with_the_command_that_installs_them() -> None:
    missing, old = package_findings("peft>=0.17", "sympy>=1.13")
    assert missing.status == old.status == "fail"
    assert missing.what == "quadriga needs peft>=0.17, but it is not installed"
    assert old.what == "quadriga needs sympy>=1.13, but 1.12 is installed"
    assert old.fix == 'pip install "sympy>=1.13"'


def test_conflict_between_other_packages_is_a_warning_that_names_both() -> None:
    (finding,) = package_findings("torch>=2.11")
    assert finding.status == "warn"
    assert finding.what == "torch needs sympy>=1.13, but 1.12 is installed"


def test_extra_of_a_requirement_is_checked_only_when_asked_for() -> None:
    assert not any("aiohttp" in finding.what for finding in package_findings("ray>=2.0"))
    assert any("aiohttp" in finding.what for finding in package_findings("ray[default]>=2.0"))
    (old_ray,) = [finding for finding in package_findings("ray[default]>=2.41") if finding.status == "fail"]
    assert old_ray.fix == 'pip install "ray[default]>=2.41"'


def test_own_requirements_are_found() -> None:
    names = " ".join(quadriga_requirements())
    assert "torch" in names
    assert "ray[default]" in names


def torch_facts(**changes: Any) -> dict[str, Any]:
    return {"version": "2.13.0", "built_for": None, "threads": 2, "devices": [], "accelerator_error": None, **changes}


def cuda(**changes: Any) -> dict[str, Any]:
    gib = 2**30
    device = {"device": "cuda:0", "name": "H200", "free_bytes": 130 * gib, "total_bytes": 139 * gib, "error": None}
    return device | changes


DRIVER = ["NVIDIA H200, 580.1"]


@pytest.mark.parametrize(
    ("torch", "driver", "env", "status", "said"),
    [
        (torch_facts(), None, {}, "ok", "CPU"),
        (torch_facts(), DRIVER, {}, "warn", "built for the CPU only"),
        (torch_facts(built_for="CUDA 13.0"), DRIVER, {"CUDA_VISIBLE_DEVICES": ""}, "warn", "hides them all"),
        (
            torch_facts(built_for="CUDA 13.0", accelerator_error="driver too old (found version 12020)"),
            DRIVER,
            {},
            "fail",
            "found version 12020",
        ),
        (torch_facts(devices=[cuda()]), DRIVER, {}, "ok", "130 of 139 GiB free"),
        (torch_facts(devices=[cuda(free_bytes=0)]), DRIVER, {}, "warn", "0 of 139 GiB free"),
        (torch_facts(devices=[cuda(error="no kernel image")]), DRIVER, {}, "fail", "no kernel image"),
    ],
)
def test_devices_are_compared_with_the_driver(
    torch: dict[str, Any], driver: list[str] | None, env: dict[str, str], status: str, said: str
) -> None:
    (finding,) = judge_devices(torch, driver, ascend=False, env=env)
    assert finding.status == status
    assert said in finding.what


def test_npu_without_its_torch_package_is_named() -> None:
    (finding,) = judge_devices(torch_facts(), None, ascend=True, env={})
    assert finding.status == "warn"
    assert "torch_npu" in finding.fix


def test_device_that_hangs_the_probe_is_a_failure() -> None:
    (finding,) = judge_devices({"version": "2.13.0"}, DRIVER, ascend=False, env={}, interrupted="no answer within 15 s")
    assert finding.status == "fail"


def dies_unless(*cures: str) -> Any:
    """A matmul probe whose real process is killed by SIGILL unless ONEDNN_MAX_CPU_ISA has one of the values."""
    code = (
        "import os, signal, sys\n"
        "if os.environ.get('ONEDNN_MAX_CPU_ISA') not in sys.argv[1:]: os.kill(os.getpid(), signal.SIGILL)"
    )

    def probe(dtype: str, extra_env: dict[str, str]) -> ProbeResult:
        env = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
        return run_command([sys.executable, "-c", code, *cures], env={**env, **extra_env}, deadline_s=20)

    return probe


def test_bf16_that_kills_the_process_is_a_warning_with_the_limit_that_was_tried() -> None:
    finding = judge_dtype("bfloat16", dies_unless("AVX512_CORE_BF16", "AVX2"))
    assert finding.status == "warn"
    assert "SIGILL" in finding.what
    assert finding.fix.startswith("export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16")


def test_weaker_limits_are_tried_in_turn() -> None:
    assert "ONEDNN_MAX_CPU_ISA=AVX2 " in judge_dtype("bfloat16", dies_unless("AVX2")).fix


def test_incurable_bf16_is_a_warning_to_keep_fp32_and_incurable_fp32_a_failure() -> None:
    incurable = judge_dtype("bfloat16", dies_unless())
    assert incurable.status == "warn"
    assert "float32" in incurable.fix
    assert judge_dtype("float32", dies_unless()).status == "fail"
