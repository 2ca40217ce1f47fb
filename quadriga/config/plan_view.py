"""The plan as tables."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quadriga.config.memory import PHASES, UPDATE_CRITIC, WorkerMemory
from quadriga.config.plan import Plan, UpdatePlan, format_bytes


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print all tables of `plan`, and what is doubtful about it."""
    console = console or Console()
    console.print(_step_table(plan))
    console.print(_update_table(plan))
    console.print(_pool_table(plan))
    for memory in plan.memory:
        if memory.items:
            console.print(_memory_table(memory, plan))
        for line in memory.unknown:
            console.print(f"memory of the {escape(line)}", highlight=False)
    for warning in plan.warnings():
        console.print(f"[bold yellow]warning:[/] {escape(warning)}", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _step_table(plan: Plan) -> Table:
    table = Table(title="One step", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    per_row = plan.prompt_tokens + plan.response_tokens
    table.add_row("prompts", f"{plan.prompts:,}", "data.train_batch_size")
    table.add_row("responses per prompt", f"{plan.responses_per_prompt:,}", "actor_rollout_ref.rollout.n")
    table.add_row("rows", f"{plan.rows:,}", f"{plan.rows // plan.workers:,} for each of {plan.workers} workers")
    table.add_row("new tokens, at most", f"{plan.rows * plan.response_tokens:,}", f"{plan.response_tokens:,} per row")
    table.add_row("tokens, at most", f"{plan.tokens:,}", f"{per_row:,} per row")
    old = "skipped: strictly on-policy" if plan.strictly_on_policy else "computed before the update"
    table.add_row("old log-probs", "", old)
    if plan.steps_per_epoch is None:
        table.add_row("steps per epoch", "unknown", escape(plan.train_rows_unknown_because))
    else:
        table.add_row("steps per epoch", f"{plan.steps_per_epoch:,}", f"{plan.train_rows:,} training rows")
    decides = f"{plan.epochs} epochs" + (f", at most {plan.max_steps:,} steps" if plan.max_steps else "")
    table.add_row("steps in all", "unknown" if plan.total_steps is None else f"{plan.total_steps:,}", decides)
    return table


def _update_table(plan: Plan) -> Table:
    updates = [plan.actor] + ([plan.critic] if plan.critic else [])
    table = _table("Update", "", *[update.role for update in updates])
    table.add_row("prompts per mini-batch", *[f"{u.mini_batch_prompts:,}" for u in updates])
    table.add_row("rows per mini-batch", *[f"{u.mini_batch_rows:,}" for u in updates])
    table.add_row("mini-batches x epochs", *[f"{u.mini_batches:,} x {u.epochs}" for u in updates])
    table.add_row("optimiser steps", *[f"{u.optimiser_steps:,}" for u in updates])
    table.add_row("rows per worker and mini-batch", *[f"{u.rows_per_worker:,}" for u in updates])
    table.add_row("a micro-batch", *map(_micro_batch, updates))
    table.add_row("micro-batches per mini-batch", *[_at_most(u) for u in updates])
    return table


def _micro_batch(update: UpdatePlan) -> str:
    if update.token_budget is None:
        return f"{update.micro_batch_rows:,} rows"
    return f"up to {update.token_budget:,} tokens"


def _at_most(update: UpdatePlan) -> str:
    return f"{'at most ' if update.token_budget is not None else ''}{update.micro_batches:,}"


def _pool_table(plan: Plan) -> Table:
    table = _table(f"Pools (device: {plan.device})", "pool", "slots per node", "needs per node", "roles in each slot")
    for name, pool in plan.pools.items():
        most = max(pool.slots_per_node)
        needs = f"{most * plan.cpus_per_slot:g} CPU" + ("" if plan.device == "cpu" else f", {most} {plan.device}")
        table.add_row(name, escape(str(pool.slots_per_node)), needs, ", ".join(pool.roles))
    return table


def _memory_table(memory: WorkerMemory, plan: Plan) -> Table:
    where = "host memory" if plan.device == "cpu" else "device memory"
    phases = [phase for phase in PHASES if phase != UPDATE_CRITIC or plan.critic]
    title = f"Memory of a worker in {memory.pool} ({where}, an estimate; framework and allocator come on top)"
    table = _table(title, "", *phases)
    for item in memory.items:
        if item.size:
            cells = [format_bytes(item.size) if phase in item.phases else "" for phase in phases]
            table.add_row(f"{item.role}: {item.what}", *cells)
    table.add_section()
    peak_phase, _ = memory.peak
    totals = [(phase, format_bytes(memory.in_phase(phase))) for phase in phases]
    table.add_row("[bold]sum", *[f"[bold]{text}" if phase == peak_phase else text for phase, text in totals])
    return table
