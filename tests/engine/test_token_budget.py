"""The token budget that picks itself."""

from __future__ import annotations

import pytest
import torch

from quadriga.engine.out_of_memory import AUTO, FIRST_AUTO, MAX_AUTO, TokenBudget


class Memory:
    """A GPU of so many bytes, on which a pass takes so many a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, per_token: int, tokens: int) -> None:
        held = 1 << 20
        figures = {
            "memory_allocated": held,
            "max_memory_allocated": held + per_token * tokens,
            "memory_reserved": held,
            "mem_get_info": (total - held, total),
            "reset_peak_memory_stats": None,
        }
        for name, value in figures.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def measured(monkeypatch: pytest.MonkeyPatch, total: int, tokens: int = FIRST_AUTO) -> TokenBudget:
    budget = TokenBudget()
    Memory(monkeypatch, total, per_token=1 << 20, tokens=tokens)
    with torch.enable_grad(), budget.measuring(AUTO, torch.device("cuda"), tokens):
        pass
    return budget


def test_auto_is_a_number_before_anything_was_measured() -> None:
    assert TokenBudget().of(AUTO) == FIRST_AUTO
    assert TokenBudget().of(500) == 500


def test_auto_fills_four_fifths_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, 50 << 30).of(AUTO) == pytest.approx(0.8 * 50 * 1024, abs=1024)
    assert measured(monkeypatch, 500 << 30).of(AUTO) == MAX_AUTO


def test_a_pass_too_small_to_tell_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not measured(monkeypatch, 50 << 30, tokens=100).measured


def test_a_cpu_and_a_budget_in_numbers_are_not_measured() -> None:
    budget = TokenBudget()
    for wanted, device in ((AUTO, "cpu"), (4096, "cuda")):
        with budget.measuring(wanted, torch.device(device), FIRST_AUTO):
            pass
    assert not budget.measured


def test_running_out_of_memory_halves_auto_too(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = measured(monkeypatch, 50 << 30)
    budget.halve(40_000, 600, "out of memory")
    assert budget.of(AUTO) == 20_000
