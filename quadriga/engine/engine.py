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
from torch import Tensor, nn

from quadriga.algorithms.aggregate import Aggregation, count_tokens_and_sequences
from quadriga.config.parallel import SEQUENCE_KEY, heads_problem, no_routers
from quadriga.config.schema_models import FSDPConfig, OptimConfig
from quadriga.engine.gradients import NonFiniteGuard, gradient_norm, keep_narrow, scale_gradients
from quadriga.engine.micro_batch import RowSizes, plan_micro_batches
from quadriga.engine.offload import Offload
from quadriga.engine.optimizer import Schedule, make_optimizer
from quadriga.engine.out_of_memory import FIXED_AUTO, MAX_AUTO, TokenBudget, give_back_memory, is_out_of_memory
from quadriga.engine.sharding import (
    decoder_layers,
    free_gathered_weights,
    largest_over_ranks,
    max_over_ranks,
    shard,
    smallest_over_ranks,
    sum_over_ranks,
    synchronise_gradients,
    world_size,
)
from quadriga.engine.state import engine_state, load_engine_state
from quadriga.engine.weights import full_weights
from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.models.attention import shares_prompts
from quadriga.models.exact import is_exact
from quadriga.models.layout import to_device
from quadriga.models.packing import PackedRows, group_by_prompt, pack_rows
from quadriga.models.routing import RouterWatch
from quadriga.models.sequence_parallel import SequenceParallel
from quadriga.models.token_model import PolicyModel, ScalarModel, TokenModel
from quadriga.protocol import DataProto

LossFunction = Callable[[dict[str, Tensor], dict[str, Tensor], "BatchCounts"], tuple[Tensor, dict[str, Tensor]]]
"""`(outputs, micro, counts) -> (loss, metrics)`.

outputs: `log_probs` (and `entropy`), or `values`, `[b, R]` with gradient, 0 where response_mask is 0; `values` `[b]` with
`at_last_token`; `other_log_probs` and `top_ids` `[b, R, K]` with `other_ids`.
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
        sequence_parallel: so many neighbouring ranks share their rows and split each sequence among them.
        router_aux_loss_coef: weight of the loss that evens the load of the experts of a policy that has some.
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
        sequence_parallel: int = 1,
        router_aux_loss_coef: float = 0.0,
        max_nonfinite_steps: int = 3,
        dump_dir: str | Path = "outputs/dumps",
    ) -> None:
        self.fsdp = FSDPConfig() if fsdp is None else fsdp
        self.device = torch.device(device)
        self.grad_clip = grad_clip
        self.sequence = _sequence_parallel(model, sequence_parallel)
        self.router_aux_loss_coef = router_aux_loss_coef
        self.routers = RouterWatch(model if optim is not None and isinstance(model, PolicyModel) else nn.Module())
        if router_aux_loss_coef and optim is not None and not self.routers.routers:
            raise ConfigError(*no_routers(type(model.huggingface).__name__))
        if gradient_checkpointing:
            model.huggingface.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model: TokenModel = shard(model, self.device, self.fsdp)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Schedule | None = None
        if optim is not None:
            layers = decoder_layers(self.model) if optim.name == "muon" else []
            matrices = [p for layer in layers for p in layer.parameters()]
            self.optimizer = make_optimizer(self.model.named_parameters(), optim, matrices)
            self.schedule = Schedule(self.optimizer, optim, total_steps)
        self.offload = Offload(self.model, self.optimizer, self.device, self.fsdp)
        self.shares_prompts = self.device.type == "cpu" or shares_prompts(self.model.huggingface.config)
        self.optimizer_steps = 0
        on_cuda = self.device.type == "cuda"
        self.budget = TokenBudget(fixed=True, auto=FIXED_AUTO) if is_exact() and on_cuda else TokenBudget()
        # Nothing is kept for a backward pass, so the largest useful micro-batch fits; if not, it is halved.
        self.inference_budget = TokenBudget(auto=MAX_AUTO) if on_cuda else self.budget
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
        outputs = self.token_statistics(data, temperature, max_tokens, max_rows=max_rows, with_entropy=with_entropy)
        return outputs["log_probs"], outputs.get("entropy")

    def token_statistics(
        self, data: DataProto, temperature: float, max_tokens: int | str, *, max_rows: int | None = None, **asked: Any
    ) -> dict[str, Tensor]:
        """What `PolicyModel.forward` tells of the tokens with response_mask 1, by name: `log_probs` `[B, R]`, and what is asked
        for by its arguments (`with_entropy`, `with_sum_pi_squared`, `top_k`). On the host, 0 elsewhere."""
        return self._infer(data, max_tokens, max_rows, {"temperature": temperature, **asked})

    def values(self, data: DataProto, max_tokens: int | str, *, max_rows: int | None = None) -> Tensor:
        """The critic's value before each token with response_mask 1: `[B, R]`, on the host, 0 elsewhere."""
        return self._infer(data, max_tokens, max_rows, {})["values"]

    def scores(self, data: DataProto, max_tokens: int | str, *, max_rows: int | None = None) -> Tensor:
        """The reward model's score of each whole row: `[B]`, on the host."""
        return self._infer(data, max_tokens, max_rows, {"at_last_token": True})["values"]

    def _infer(
        self, data: DataProto, max_tokens: int | str, max_rows: int | None, model_arguments: dict[str, Any]
    ) -> dict[str, Tensor]:
        data, own = self._shared_rows(data)
        sizes = self._row_sizes(data)

        def run(parts: list[list[int]]) -> dict[str, Tensor]:
            pieces: list[tuple[str, list[int], Tensor]] = []
            for rows in parts:
                packed = self._pack(data, rows, sizes)
                for name, values in self.model(packed, **model_arguments).items():
                    if rows:
                        unpacked = self._unpack(packed, values, model_arguments)
                        pieces.append((name, rows, unpacked.float() if values.is_floating_point() else unpacked))
            free_gathered_weights(self.model)
            # Read when all is under way: the host packs a micro-batch while the device computes the one before.
            results: dict[str, Tensor] = {}
            for name, rows, piece in pieces:
                if name not in results:
                    results[name] = torch.zeros(len(data), *piece.shape[1:], dtype=piece.dtype)
                results[name][rows] = piece.cpu()
            return results

        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.offload.weights_on_device():
                results = self._with_budget(run, sizes, max_tokens, max_rows, self.inference_budget)
                return results if self.sequence is None else {name: rows[own] for name, rows in results.items()}
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
        other_ids: str | None = None,
    ) -> dict[str, float]:
        """One optimiser step on this rank's rows of a mini-batch, in micro-batches of at most `max_tokens` tokens.

        A scalar model's outputs are values before each response token, or one score a row (`at_last_token`). With
        `rows_together`, so many consecutive rows are in the same call of `loss_fn`, in order: pairs that it compares. The
        column `other_ids` `[B, R, K]` names tokens whose log-probs the loss wants beside those of the response.

        The gradient is that of the whole mini-batch over all ranks, however it is cut. Returns the mini-batch's `loss`,
        what `loss_fn` reports, `grad_norm` (before clipping), `lr`, `skipped` (1: the gradient was not finite and the
        weights are unchanged), `micro_batches` and `token_budget`. The same on every rank.
        """
        optimizer, _ = self._require_optimizer()
        counts = self.count(data)
        arguments: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if other_ids is not None:
            arguments |= {"other_ids": other_ids, "top_k": data.batch[other_ids].shape[-1]}
        if isinstance(self.model, ScalarModel):
            arguments = {"at_last_token": at_last_token}
        data, _ = self._shared_rows(data)
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
                    totals[name] = _combined(name)(totals[name], value) if name in totals else value
            return totals

        self.model.train()
        with self.offload.weights_on_device():
            if self.offload.narrow_gradients:
                keep_narrow(self.parameters)
            totals = self._with_budget(run, sizes, max_tokens, max_rows, self.budget)
            metrics = self._sum_metrics(totals)
            metrics |= self._apply_gradients(data)
        return metrics | {
            "micro_batches": float(parts_used),
            "token_budget": float(self._agreed(self.budget.of(max_tokens))),
        }

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
        named = arguments.get("other_ids")
        if named is not None:
            ids = data.batch[named][rows or [0]].flatten(0, 1)[packed.cells.cpu()].long()
            arguments = arguments | {"other_ids": to_device(ids, self.device)}
        with self.routers.watching():
            outputs = self.model(packed, **arguments)
        if not rows:  # other ranks have a micro-batch more: take part in the collectives, add nothing
            return sum(values.sum() for values in outputs.values()) * 0.0, {}
        micro = {
            name: to_device(column[rows], self.device)
            for name, column in data.batch.items()
            if name not in _PACKED_COLUMNS
        }
        unpacked = {name: self._unpack(packed, values, arguments) for name, values in outputs.items()}
        result = loss_fn(unpacked, micro, counts)
        if not (isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "ndim", None) == 0):
            raise DataError("the loss function did not return a scalar tensor and metrics", "return (loss, metrics)")
        if not self.routers.routers:
            return result
        share = micro["response_mask"].sum() / max(1, counts.num_tokens)
        return self._with_routers(*result, share, packed.input_ids.shape[1] - packed.filler)

    def _with_routers(
        self, loss: Tensor, metrics: dict[str, Tensor], share: Tensor, tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with that of the experts' load, and the routers' figures: `share` by the tokens that are learnt from."""
        balance, figures = self.routers.balance(tokens, self.sequence)
        if self.router_aux_loss_coef:
            loss = loss + self.router_aux_loss_coef * share * balance
        figures = {name: value if name.endswith("_max") else share * value for name, value in figures.items()}
        return loss, metrics | figures | {"router_aux_loss": share * balance.detach()}

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
            self.offload.step()
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
        over_ranks = {torch.add: sum_over_ranks, torch.maximum: largest_over_ranks, torch.minimum: smallest_over_ranks}
        metrics: dict[str, float] = {}
        for combine, over in over_ranks.items():
            names = [name for name in totals if _combined(name) is combine]
            if names:
                values = torch.stack([totals[name] for name in names])
                if self.sequence is not None and self.sequence.rank > 0 and combine is torch.add:
                    values = torch.zeros_like(values)  # the ranks that share rows say the same of them
                values = over(values)
                metrics |= dict(zip(names, values.tolist(), strict=True))
        return {name: metrics[name] for name in totals}

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

    def _shared_rows(self, data: DataProto) -> tuple[DataProto, slice]:
        """The rows of the ranks that share sequences with this one, and which are its own; without such ranks, just those."""
        if self.sequence is None or data.batch is None:
            return data, slice(None)
        columns, own = self.sequence.rows_of_all(dict(data.batch.items()), self.device)
        return DataProto.from_dict(tensors=columns, meta_info=data.meta_info), own

    def _pack(self, data: DataProto, rows: list[int], sizes: RowSizes) -> PackedRows:
        packed = self._pack_on_host(data, rows, sizes)
        return (packed if self.sequence is None else self.sequence.part(packed)).to(self.device)

    def _pack_on_host(self, data: DataProto, rows: list[int], sizes: RowSizes) -> PackedRows:
        if not rows:
            one = torch.ones(1, 2, dtype=torch.long)
            return pack_rows(torch.zeros_like(one), one, one[:, 1:])
        ids, mask, response_mask = (data.batch[name][rows] for name in ("input_ids", "attention_mask", "response_mask"))
        same_prompt = None if sizes.same_prompt is None else [sizes.same_prompt[row] for row in rows]
        return pack_rows(ids, mask, response_mask, same_prompt)

    def _unpack(self, packed: PackedRows, values: Tensor, arguments: dict[str, Any]) -> Tensor:
        """See the function; of all ranks that share the rows."""
        unpacked = _unpack(packed, values, arguments)
        return unpacked if self.sequence is None else self.sequence.whole(unpacked)

    def _agreed(self, budget: int) -> int:
        """Ranks that share rows must cut them alike, but each finds `auto` by the memory of its own device: the smallest counts."""
        if self.sequence is None:
            return budget
        return int(smallest_over_ranks(torch.tensor(budget, device=self.device)))

    def _with_budget(
        self,
        run: Callable[[list[list[int]]], dict[str, Tensor]],
        sizes: RowSizes,
        max_tokens: int | str,
        max_rows: int | None,
        limit: TokenBudget,
    ) -> dict[str, Tensor]:
        """`run` on the rows' micro-batches; from the start again with half the token budget if memory runs out.

        From the start, because a backward pass that failed half-way has left part of its gradients behind.
        """
        while True:
            shared_by = 1 if self.sequence is None else self.sequence.size
            budget = self._agreed(limit.of(max_tokens)) * shared_by
            own = plan_micro_batches(sizes, budget, max_rows)
            parts = plan_micro_batches(sizes, budget, max_rows, at_least=max_over_ranks(len(own), self.device))
            try:
                with limit.measuring(max_tokens, self.device, max(map(sizes.total, parts)) // shared_by):
                    return run(parts)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                if world_size() > 1:
                    raise WorkerError(
                        f"out of memory in a micro-batch of at most {budget} tokens: {reason}",
                        f"set ppo_max_token_len_per_gpu to {budget // shared_by // 2}; only a single rank can shrink it by itself",
                    ) from error
            # Outside the handler: the error's traceback holds the tensors of the failed pass.
            give_back_memory()
            limit.halve(max(map(sizes.total, parts)), max(map(sizes.total, sizes.units())), reason)


def _sequence_parallel(model: TokenModel, size: int) -> SequenceParallel | None:
    if size == 1:
        return None
    config = model.huggingface.config.get_text_config()
    if heads := heads_problem(size, config.num_attention_heads, _key_heads(config)):
        raise ConfigError(f"{SEQUENCE_KEY}={size} {heads[0]}", heads[1])
    if world_size() % size:
        raise ConfigError(
            f"{SEQUENCE_KEY}={size} does not divide {world_size()} workers",
            "set it to a divisor of their number, 1 for a single one",
        )
    return SequenceParallel(size)


def _key_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _combined(metric: str) -> Callable[[Tensor, Tensor], Tensor]:
    """How a metric's values of micro-batches and ranks become one: they are shares of a sum, unless the name says otherwise."""
    if metric.endswith("_max"):
        return torch.maximum
    return torch.minimum if metric.endswith("_min") else torch.add


def _unpack(packed: PackedRows, values: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What the model says of tokens as `[B, R]`, or of whole rows (`at_last_token`) as `[B]`; 0 where there is none."""
    if arguments.get("at_last_token"):
        return values.new_zeros(packed.shape[0]).index_copy(0, packed.nonempty_rows, values)
    return packed.unpack(values)
