"""The command `quadriga plan key=value …`: what a configuration amounts to, as tables. Nothing is started."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quadriga.config.command_line import compose_from_arguments
from quadriga.config.devices import gpu_memory
from quadriga.config.load import load_config, screen_overrides
from quadriga.config.memory import PHASES, UPDATE_CRITIC, USABLE, WorkerMemory
from quadriga.config.plan import Plan, UpdatePlan, format_bytes, make_plan
from quadriga.config.schema import Config
from quadriga.tracking.sinks import sink_problems


def main(arguments: list[str]) -> int:
    """`quadriga plan [--gpu NAME] [--config FILE] key=value …`, and what this machine lacks for it besides files, which may be elsewhere.

    Raises:
        ConfigError: the configuration cannot run.
    """
    gpu, arguments = _take_gpu(arguments)
    composed = compose_from_arguments(screen_overrides(arguments, also_check=_problems_here))
    show_plan(make_plan(load_config(composed, also_check=_problems_here), gpu))
    return 0


def _take_gpu(arguments: list[str]) -> tuple[str | None, list[str]]:
    """`--gpu NAME` or `--gpu=NAME`, and the other arguments."""
    rest, gpu = list[str](), None
    queue = iter(arguments)
    for argument in queue:
        flag, equals, value = argument.partition("=")
        if flag == "--gpu":
            gpu = value if equals else next(queue, "")
            gpu_memory(gpu)  # a name that is not known is told at once
        else:
            rest.append(argument)
    return gpu, rest


def _problems_here(config: Config) -> Iterator[tuple[str, str]]:
    return sink_problems(config.trainer.logger)


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print all tables of `plan`, and what is doubtful about it."""
    console = console or Console()
    console.print(_step_table(plan))
    console.print(_update_table(plan))
    console.print(_pool_table(plan))
    if (sets := _sets_table(plan)) is not None:
        console.print(sets)
    for memory in plan.memory:
        if memory.items:
            console.print(_memory_table(memory, plan))
        for line in memory.unknown:
            console.print(f"memory of the {escape(line)}", highlight=False)
    if any(item.saves for item in plan.host):
        console.print(_host_table(plan))
    for line in _verdict(plan):
        console.print(line, highlight=False)
    for warning in plan.warnings():
        console.print(f"[bold yellow]warning:[/] {escape(warning)}", highlight=False)


def _verdict(plan: Plan) -> Iterator[str]:
    """Whether the run fits the GPU that was asked for, and what would make it."""
    if plan.capacity is None:
        return
    size = f"{plan.gpu} ({format_bytes(plan.capacity)}, of which {USABLE:.0%} can hold tensors)"
    if plan.fits is None:
        yield f"whether it fits {size} is unknown: the size of a model is"
        return
    peak = max((memory.peak for memory in plan.memory), key=lambda pair: pair[1])
    needs = f"{format_bytes(peak[1])} in the phase '{peak[0]}'"
    if plan.fits:
        yield f"[bold green]fits[/] {size}: a worker needs {needs}"
    else:
        yield f"[bold red]does not fit[/] {size}: a worker needs {needs}"
        savings = plan.savings
        if savings.keys:
            then = f"{format_bytes(savings.peak[1])} in the phase '{savings.peak[0]}'"
            outcome = f"with them it fits: {then}" if savings.fits else f"even with them it needs {then}"
            yield "these keys help: " + escape(" ".join(savings.keys)) + f"; {outcome}"
        if savings.nodes:
            yield f"with trainer.nnodes={savings.nodes} it fits without them"


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


def _sets_table(plan: Plan) -> Table | None:
    """Which workers generate together; None where each does alone."""
    for name, pool in plan.pools.items():
        if pool.set_size > 1:
            table = _table(
                f"Engines in {name} (actor_rollout_ref.rollout.tensor_model_parallel_size={pool.set_size})",
                "node",
                "workers of each engine; the first of them leads",
            )
            for node, sets in enumerate(pool.sets):
                table.add_row(str(node), ", ".join(f"{first}-{last}" for first, last in sets))
            return table
    return None


def _host_table(plan: Plan) -> Table:
    title = "Host memory of a worker (at least; what is pinned may take up to twice as much)"
    table = _table(title, "", "each worker", "the first one, besides", "pinned")
    for item in plan.host:
        first = format_bytes(item.first) if item.first else ""
        table.add_row(f"{item.role}: {item.what}", format_bytes(item.each), first, "yes" if item.pinned else "")
    return table


def _memory_table(memory: WorkerMemory, plan: Plan) -> Table:
    where = "host memory" if plan.device == "cpu" else "device memory"
    phases = [phase for phase in PHASES if phase != UPDATE_CRITIC or plan.critic]
    title = f"Memory of a worker in {memory.pool} ({where}, an estimate; framework and allocator come on top)"
    table = _table(title, "", *phases)
    for item in memory.items:
        if item.size:
            cells = [format_bytes(item.size) if phase in item.phases else "" for phase in phases]
            table.add_row(f"{item.role}: {item.what}" + (f" ({item.note})" if item.note else ""), *cells)
    table.add_section()
    peak_phase, _ = memory.peak
    totals = [(phase, format_bytes(memory.in_phase(phase))) for phase in phases]
    table.add_row("[bold]sum", *[f"[bold]{text}" if phase == peak_phase else text for phase, text in totals])
    return table
