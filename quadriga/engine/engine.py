"""TrainingEngine: forward passes over packed micro-batches, and one optimiser step per mini-batch.

World size 1 on a CPU and N GPUs run the same code; only `sharding.shard` differs. Every rank calls every method, with
its own rows. Nothing here knows about PPO: the loss is a function that the worker passes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation, count_tokens_and_sequences
from quadriga.config.schema_models import FSDPConfig, OptimConfig
from quadriga.engine.gradients import gradient_norm, scale_gradients
from quadriga.engine.micro_batch import RowSizes, plan_micro_batches
from quadriga.engine.nonfinite import NonFiniteGuard
from quadriga.engine.offload import Offload
from quadriga.engine.optimizer import Schedule, make_optimizer
from quadriga.engine.out_of_memory import TokenBudget, give_back_memory, is_out_of_memory
from quadriga.engine.sharding import (
    free_gathered_weights,
    max_over_ranks,
    shard,
    sum_over_ranks,
    synchronise_gradients,
    world_size,
)
from quadriga.engine.state import engine_state, load_engine_state
from quadriga.engine.weights import full_weights
from quadriga.errors import DataError, WorkerError
from quadriga.models.attention import takes_varlen
from quadriga.models.layout import to_device
from quadriga.models.packing import PackedRows, group_by_prompt, pack_rows
from quadriga.models.policy import PolicyModel
from quadriga.models.scalar_model import ScalarModel
from quadriga.models.token_model import TokenModel
from quadriga.protocol import DataProto

LossFunction = Callable[[dict[str, Tensor], dict[str, Tensor], "BatchCounts"], tuple[Tensor, dict[str, Tensor]]]
"""`(outputs, micro, counts) -> (loss, metrics)`.

outputs: `log_probs` (and `entropy`), or `values`, `[b, R]` with gradient, 0 where response_mask is 0; `values` `[b]` with
`at_last_token`.
micro: the other tensor columns of the micro-batch's rows, on the device.
loss, metrics: this micro-batch's share; shares add up over micro-batches and ranks to the mini-batch's value.
"""

_PACKED_COLUMNS = frozenset({"input_ids", "attention_mask", "position_ids", "prompts", "responses"})
"""Columns that go into the model, not into the loss."""

MIN_SHARED_TOKENS = 0.05
"""Prompts are shared when that saves at least this part of the tokens; attention over shared prompts costs a little."""
MAX_SHARED_LENGTH = 2048
"""On a CPU no sharing with longer rows: attention to a shared prompt needs a mask of `[response, row]`."""


@dataclass(frozen=True)
class BatchCounts:
    """Size of a mini-batch over all ranks: what its loss is normalised by."""

    num_tokens: int
    num_sequences: int
    response_length: int

    def aggregation(self, mode: str, loss_scale_factor: float | None = None) -> Aggregation:
        return Aggregation(mode, self.num_tokens, self.num_sequences, loss_scale_factor, self.response_length)


class TrainingEngine:
    """A model, and an optimiser if `optim` is given.

    Args:
        model: `PolicyModel` or `ScalarModel`, on the CPU in float32; it is moved and sharded in place.
        optim: optimiser and schedule; None for a model that is only evaluated.
        fsdp: sharding and offloading.
        grad_clip: largest norm of the gradient; None: no clipping.
        total_steps: trainer steps of the whole run, for schedules that end.
        device: where to compute.
        gradient_checkpointing: recompute activations in the backward pass.
        max_nonfinite_steps: stop after so many optimiser steps in a row with a non-finite gradient.
        dump_dir: where the evidence of that goes.
    """

    def __init__(
        self,
        model: TokenModel,
        *,
        optim: OptimConfig | None = None,
        fsdp: FSDPConfig | None = None,
        grad_clip: float | None = 1.0,
        total_steps: int | None = None,
        device: torch.device | str = "cpu",
        gradient_checkpointing: bool = False,
        max_nonfinite_steps: int = 3,
        dump_dir: str | Path = "outputs/dumps",
    ) -> None:
        self.fsdp = FSDPConfig() if fsdp is None else fsdp
        self.device = torch.device(device)
        self.grad_clip = grad_clip
        if gradient_checkpointing:
            model.huggingface.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model: TokenModel = shard(model, self.device, self.fsdp.reshard_after_forward)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Schedule | None = None
        if optim is not None:
            self.optimizer = make_optimizer(self.model.named_parameters(), optim)
            self.schedule = Schedule(self.optimizer, optim, total_steps)
        self.offload = Offload(self.model, self.optimizer, self.device, self.fsdp)
        self.shares_prompts = self.device.type == "cpu" or takes_varlen(self.model.huggingface.config)
        self.optimizer_steps = 0
        self.budget = TokenBudget()
        self.nonfinite = NonFiniteGuard(max_nonfinite_steps, dump_dir)

    # ---- without gradient --------------------------------------------------------------------------------------------

    def log_probs(
        self,
        data: DataProto,
        temperature: float,
        max_tokens: int | str,
        *,
        with_entropy: bool = False,
        max_rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob, and the entropy if asked for, of the tokens with response_mask 1: `[B, R]`, on the host, 0 elsewhere."""
        outputs = self._infer(data, max_tokens, max_rows, {"temperature": temperature, "with_entropy": with_entropy})
        return outputs["log_probs"], outputs.get("entropy")

    def values(self, data: DataProto, max_tokens: int | str, *, max_rows: int | None = None) -> Tensor:
        """The critic's value before each token with response_mask 1: `[B, R]`, on the host, 0 elsewhere."""
        return self._infer(data, max_tokens, max_rows, {})["values"]

    def scores(self, data: DataProto, max_tokens: int | str, *, max_rows: int | None = None) -> Tensor:
        """The reward model's score of each whole row: `[B]`, on the host."""
        return self._infer(data, max_tokens, max_rows, {"at_last_token": True})["values"]

    def _infer(
        self, data: DataProto, max_tokens: int | str, max_rows: int | None, model_arguments: dict[str, Any]
    ) -> dict[str, Tensor]:
        sizes = self._row_sizes(data)

        def run(parts: list[list[int]]) -> dict[str, Tensor]:
            results: dict[str, Tensor] = {}
            for rows in parts:
                packed = self._pack(data, rows, sizes)
                for name, values in self.model(packed, **model_arguments).items():
                    if not rows:
                        continue
                    unpacked = _unpack(packed, values, model_arguments)
                    if name not in results:
                        results[name] = torch.zeros(len(data), *unpacked.shape[1:])
                    results[name][rows] = unpacked.float().cpu()
            free_gathered_weights(self.model)
            return results

        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.offload.weights_on_device():
                return self._with_budget(run, sizes, max_tokens, max_rows)
        finally:
            self.model.train(was_training)

    # ---- with gradient -----------------------------------------------------------------------------------------------

    def train_mini_batch(
        self,
        data: DataProto,
        loss_fn: LossFunction,
        max_tokens: int | str,
        *,
        max_rows: int | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        at_last_token: bool = False,
        rows_together: int = 1,
    ) -> dict[str, float]:
        """One optimiser step on this rank's rows of a mini-batch, in micro-batches of at most `max_tokens` tokens.

        A scalar model's outputs are values before each response token, or one score a row (`at_last_token`). With
        `rows_together`, so many consecutive rows are in the same call of `loss_fn`, in order: pairs that it compares.

        The gradient is that of the whole mini-batch over all ranks, however it is cut. Returns the mini-batch's `loss`,
        what `loss_fn` reports, `grad_norm` (before clipping), `lr`, `skipped` (1: the gradient was not finite and the
        weights are unchanged), `micro_batches` and `token_budget`. The same on every rank.
        """
        optimizer, _ = self._require_optimizer()
        counts = self.count(data)
        arguments: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if isinstance(self.model, ScalarModel):
            arguments = {"at_last_token": at_last_token}
        parts_used, sizes = 0, replace(self._row_sizes(data), together=rows_together)

        def run(parts: list[list[int]]) -> dict[str, Tensor]:
            nonlocal parts_used
            parts_used = len(parts)
            optimizer.zero_grad(set_to_none=True)
            totals: dict[str, Tensor] = {}
            for number, rows in enumerate(parts):
                synchronise_gradients(self.model, self.fsdp.reshard_after_forward or number == len(parts) - 1)
                loss, metrics = self._micro_batch_loss(data, rows, sizes, loss_fn, counts, arguments)
                loss.backward()
                for name, value in {"loss": loss.detach(), **metrics}.items():
                    value = torch.as_tensor(value, device=self.device).detach().float()
                    totals[name] = totals[name] + value if name in totals else value
            return totals

        self.model.train()
        with self.offload.weights_on_device():
            totals = self._with_budget(run, sizes, max_tokens, max_rows)
            metrics = self._sum_metrics(totals)
            with self.offload.optimizer_on_device():
                metrics |= self._apply_gradients(data)
        return metrics | {"micro_batches": float(parts_used), "token_budget": float(self.budget.of(max_tokens))}

    def end_step(self) -> float:
        """Advance the learning-rate schedule: once per trainer step, whatever the number of mini-batches in it."""
        self._require_optimizer()[1].advance()
        return self.learning_rate

    @property
    def learning_rate(self) -> float:
        return 0.0 if self.schedule is None else self.schedule.learning_rate

    def count(self, data: DataProto) -> BatchCounts:
        """Tokens and sequences of a mini-batch, added up over ranks."""
        tokens, sequences = count_tokens_and_sequences(data.batch["response_mask"])
        total = sum_over_ranks(torch.tensor([tokens, sequences], device=self.device))
        width = max_over_ranks(data.batch["response_mask"].shape[1], self.device)
        return BatchCounts(int(total[0]), int(total[1]), width)

    def _micro_batch_loss(
        self,
        data: DataProto,
        rows: list[int],
        sizes: RowSizes,
        loss_fn: LossFunction,
        counts: BatchCounts,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        packed = self._pack(data, rows, sizes)
        outputs = self.model(packed, **arguments)
        if not rows:  # other ranks have a micro-batch more: take part in the collectives, add nothing
            return sum(values.sum() for values in outputs.values()) * 0.0, {}
        micro = {
            name: to_device(column[rows], self.device)
            for name, column in data.batch.items()
            if name not in _PACKED_COLUMNS
        }
        unpacked = {name: _unpack(packed, values, arguments) for name, values in outputs.items()}
        result = loss_fn(unpacked, micro, counts)
        if not (isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "ndim", None) == 0):
            raise DataError("the loss function did not return a scalar tensor and metrics", "return (loss, metrics)")
        return result

    def _require_optimizer(self) -> tuple[torch.optim.Optimizer, Schedule]:
        if self.optimizer is None or self.schedule is None:
            raise WorkerError("this engine has no optimiser", "make it with optim=OptimConfig(...)")
        return self.optimizer, self.schedule

    def _apply_gradients(self, data: DataProto) -> dict[str, float]:
        optimizer, _ = self._require_optimizer()
        norm = gradient_norm(self.parameters)
        finite = bool(torch.isfinite(norm))
        self.optimizer_steps += 1
        if finite:
            if self.grad_clip is not None and norm > self.grad_clip:
                scale_gradients(self.parameters, self.grad_clip / (norm + 1e-6))
            optimizer.step()
            self.nonfinite.saw_finite()
        optimizer.zero_grad(set_to_none=True)
        if not finite:
            self.nonfinite.saw_non_finite(float(norm), data, self.optimizer_steps)
        return {
            "grad_norm": float(norm),
            "lr": self.learning_rate,
            "skipped": float(not finite),
            "nonfinite_steps": float(self.nonfinite.total),
        }

    def _sum_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        if not totals:
            return {}
        summed = sum_over_ranks(torch.stack(list(totals.values())))
        return dict(zip(totals, summed.tolist(), strict=True))

    # ---- weights and state -------------------------------------------------------------------------------------------

    def adapter_off(self) -> AbstractContextManager[None]:
        """Inside it, the policy is the one it started from (LoRA): the reference needs no weights of its own."""
        if not isinstance(self.model, PolicyModel):
            raise WorkerError("only a policy has an adapter", "use adapter_off with a LoRA policy")
        return self.model.adapter_off()

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `weights.full_weights`."""
        with self.offload.weights_on_device():
            yield from full_weights(self.model, dtype)

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: see `state.py`."""
        return engine_state(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_engine_state(self, state)

    # ---- micro-batches -----------------------------------------------------------------------------------------------

    def _row_sizes(self, data: DataProto) -> RowSizes:
        """Lengths, and which rows share a prompt where that saves enough tokens to be worth it."""
        if data.batch is None or "attention_mask" not in data.batch.keys():  # noqa: SIM118  (a TensorDict is no dict)
            raise DataError("the batch has no attention_mask", "give input_ids, attention_mask and response_mask")
        ids, mask, response_mask = (data.batch[name] for name in ("input_ids", "attention_mask", "response_mask"))
        lengths = mask.sum(-1).tolist()
        if not self.shares_prompts or (self.device.type == "cpu" and max(lengths, default=0) > MAX_SHARED_LENGTH):
            return RowSizes(lengths)
        same_prompt, prompts = group_by_prompt(ids, mask, ids.shape[1] - response_mask.shape[1])
        sharing = RowSizes(lengths, same_prompt, prompts)
        saves = sharing.total(sharing.order()) <= (1 - MIN_SHARED_TOKENS) * sum(lengths)
        return sharing if saves else RowSizes(lengths)

    def _pack(self, data: DataProto, rows: list[int], sizes: RowSizes) -> PackedRows:
        if not rows:
            one = torch.ones(1, 2, dtype=torch.long)
            return pack_rows(torch.zeros_like(one), one, one[:, 1:]).to(self.device)
        ids, mask, response_mask = (data.batch[name][rows] for name in ("input_ids", "attention_mask", "response_mask"))
        same_prompt = None if sizes.same_prompt is None else [sizes.same_prompt[row] for row in rows]
        return pack_rows(ids, mask, response_mask, same_prompt).to(self.device)

    def _with_budget(
        self,
        run: Callable[[list[list[int]]], dict[str, Tensor]],
        sizes: RowSizes,
        max_tokens: int | str,
        max_rows: int | None,
    ) -> dict[str, Tensor]:
        """`run` on the rows' micro-batches; from the start again with half the token budget if memory runs out.

        From the start, because a backward pass that failed half-way has left part of its gradients behind.
        """
        while True:
            budget = self.budget.of(max_tokens)
            own = plan_micro_batches(sizes, budget, max_rows)
            parts = plan_micro_batches(sizes, budget, max_rows, at_least=max_over_ranks(len(own), self.device))
            try:
                with self.budget.measuring(max_tokens, self.device, max(map(sizes.total, parts))):
                    return run(parts)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                if world_size() > 1:
                    raise WorkerError(
                        f"out of memory in a micro-batch of at most {budget} tokens: {reason}",
                        f"set ppo_max_token_len_per_gpu to {budget // 2}; only a single rank can shrink it by itself",
                    ) from error
            # Outside the handler: the error's traceback holds the tensors of the failed pass.
            give_back_memory()
            self.budget.halve(max(map(sizes.total, parts)), max(map(sizes.total, sizes.units())), reason)


def _unpack(packed: PackedRows, values: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What the model says of tokens as `[B, R]`, or of whole rows (`at_last_token`) as `[B]`; 0 where there is none."""
    if arguments.get("at_last_token"):
        return values.new_zeros(packed.shape[0]).index_copy(0, packed.nonempty_rows, values)
    return packed.unpack(values)
