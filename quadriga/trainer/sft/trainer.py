"""The loop of supervised fine-tuning: next batch, one optimiser step, now and then a validation, an export at the end."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.config.schema_models import OptimConfig
from quadriga.config.sft_load import load_sft_config
from quadriga.config.sft_schema import SFTConfig
from quadriga.data.collate import collate_sft
from quadriga.data.factory import create_sft_dataset, pad_token_id
from quadriga.data.loader import BatchLoader, Dataset, file_order_batches
from quadriga.data.sampler import ResumableSampler
from quadriga.engine import BatchCounts, TrainingEngine
from quadriga.engine.micro_batch import balance_over_ranks
from quadriga.engine.sharding import rank, sum_over_ranks, world_size
from quadriga.errors import ConfigError
from quadriga.models.policy import PolicyModel
from quadriga.protocol import DataProto
from quadriga.tracking import RunDirectory, Tracking
from quadriga.trainer.sft.export import export_policy
from quadriga.trainer.sft.start_model import load_start_model


def sft_loss(
    outputs: dict[str, Tensor], micro: dict[str, Tensor], counts: BatchCounts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean of −log p over the target tokens of the whole batch, over all micro-batches and ranks."""
    return counts.aggregation("token-mean")(-outputs["log_probs"], micro["response_mask"]), {}


class FSDPSFTTrainer:
    """Trains on prompt-and-answer rows or conversations. Every process makes one, with the same arguments.

    Args:
        config: anything that `load_sft_config` reads.
        policy, tokenizer: what to train; by default what `config.model` says.
        train_dataset, val_dataset: like `SFTDataset`; by default what `config.data` says.
        device: where to compute.
    """

    def __init__(
        self,
        config: Any,
        *,
        policy: PolicyModel | None = None,
        tokenizer: Any = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config: SFTConfig = load_sft_config(config)
        _check_batch_size(self.config.data.train_batch_size, world_size())
        if policy is None or tokenizer is None:
            policy, tokenizer = load_start_model(self.config)
        self.tokenizer = tokenizer
        self.run_dir = Path(self.config.trainer.default_local_dir).expanduser()
        self._make_data(train_dataset, val_dataset)
        steps = self.config.trainer.total_training_steps
        self.total_steps = self.config.trainer.total_epochs * len(self.loader) if steps is None else steps
        self._make_engine(policy, device)
        self.step = 0

    def _make_data(self, train_dataset: Dataset | None, val_dataset: Dataset | None) -> None:
        data = self.config.data
        if train_dataset is None:
            train_dataset = create_sft_dataset(data.train_files, data, self.tokenizer, data.train_max_samples)  # type: ignore[arg-type]
        if val_dataset is None and data.val_files:
            val_dataset = create_sft_dataset(data.val_files, data, self.tokenizer, data.val_max_samples)
        self.val_dataset = val_dataset
        self.collate = partial(collate_sft, pad_token_id=pad_token_id(self.tokenizer))
        sampler = ResumableSampler(len(train_dataset), data.train_batch_size, data.shuffle, data.seed)
        self.loader = BatchLoader(train_dataset, sampler, data.train_batch_size, self.collate)

    def _make_engine(self, policy: PolicyModel, device: torch.device | str) -> None:
        optim = self.config.optim
        self.engine = TrainingEngine(
            policy,
            optim=OptimConfig(
                lr=optim.lr,
                betas=optim.betas,
                weight_decay=optim.weight_decay,
                lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
                lr_scheduler_type=optim.lr_scheduler,
                min_lr_ratio=optim.min_lr_ratio,
            ),
            fsdp=self.config.model.fsdp_config,
            grad_clip=optim.clip_grad,
            total_steps=self.total_steps,
            device=device,
            gradient_checkpointing=self.config.model.enable_gradient_checkpointing,
            dump_dir=self.run_dir / "dumps",
        )

    # ---- the run -----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train, validate, and write the model to `<run directory>/huggingface`. Returns the last step's metrics."""
        metrics: dict[str, float] = {}
        with self._tracking() as tracking:
            while self.step < self.total_steps:
                metrics = self.training_step()
                if self.val_dataset is not None and self._is_due(self.config.trainer.test_freq):
                    metrics["val/loss"] = self.validation_loss()
                if tracking is not None:
                    tracking.log(self.step, metrics)
                    self._print(metrics)
            self.export()
        return metrics

    def export(self) -> None:
        """Write the model as a Hugging Face folder."""
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.config.model.save_dtype]
        assert isinstance(self.engine.model, PolicyModel)
        export_policy(self.engine.model, self.tokenizer, self.model_dir, dtype)
        if rank() == 0:
            print(f"model written to {self.model_dir}", flush=True)

    @property
    def model_dir(self) -> Path:
        return self.run_dir / "huggingface"

    def training_step(self) -> dict[str, float]:
        """One optimiser step on the next `data.train_batch_size` rows, of which each rank takes its share."""
        start = time.perf_counter()
        epoch, batch = self.loader.next_batch()
        data = self.config.data
        share = _share_of_rank(with_response_mask(batch))
        done = self.engine.train_mini_batch(
            share, sft_loss, data.max_token_len_per_gpu, max_rows=data.micro_batch_size_per_gpu
        )
        self.engine.end_step()
        self.step += 1
        return {
            "train/loss": done["loss"],
            "train/grad_norm": done["grad_norm"],
            "train/lr": done["lr"],
            "train/skipped": done["skipped"],
            "train/epoch": float(epoch),
            "train/time_s": time.perf_counter() - start,
        }

    def validation_loss(self) -> float:
        """Mean of −log p over all target tokens of the validation set."""
        assert self.val_dataset is not None
        data = self.config.data
        total = torch.zeros(2, dtype=torch.float64)  # Σ −log p, target tokens
        for batch in file_order_batches(self.val_dataset, data.train_batch_size, self.collate):
            share, is_own = _validation_share(with_response_mask(batch))
            log_probs, _ = self.engine.log_probs(
                share, 1.0, data.max_token_len_per_gpu, max_rows=data.micro_batch_size_per_gpu
            )
            total[0] -= log_probs[is_own].double().sum()
            total[1] += share.batch["response_mask"][is_own].sum()
        total = sum_over_ranks(total.to(self.engine.device))
        return float(total[0] / total[1])

    def _is_due(self, frequency: int) -> bool:
        return self.step == self.total_steps or (frequency > 0 and self.step % frequency == 0)

    def _tracking(self) -> AbstractContextManager[Tracking | None]:
        """Metrics of the run; on rank 0 only."""
        if rank() != 0:
            return nullcontext()
        return Tracking(self.config, RunDirectory(self.run_dir))

    def _print(self, metrics: dict[str, float]) -> None:
        trainer = self.config.trainer
        if "console" in trainer.logger and (self._is_due(trainer.log_freq) or "val/loss" in metrics):
            shown = " ".join(f"{name}={value:.4g}" for name, value in metrics.items() if name != "train/skipped")
            print(f"step {self.step}/{self.total_steps}: {shown}", flush=True)


def with_response_mask(batch: DataProto) -> DataProto:
    """The columns that the engine reads. `response_mask[b, t]` is about token t + 1: the first can be no target."""
    columns = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict(tensors={**columns, "response_mask": batch.batch["loss_mask"][:, 1:].contiguous()})


def _share_of_rank(batch: DataProto) -> DataProto:
    """This rank's rows, such that all ranks have about equally many tokens."""
    ranks = world_size()
    if ranks == 1:
        return batch
    order = balance_over_ranks(batch.batch["attention_mask"].sum(-1).tolist(), ranks)
    rows = len(order) // ranks
    return batch[order[rank() * rows : (rank() + 1) * rows]]


def _validation_share(batch: DataProto) -> tuple[DataProto, list[int]]:
    """This rank's rows, at least one on every rank, and the positions of those that no other rank counts."""
    own = list(range(rank(), len(batch), world_size()))
    return batch[own or [0]], list(range(len(own)))


def _check_batch_size(rows: int, ranks: int) -> None:
    if rows % ranks:
        near = [n for n in (rows - rows % ranks, rows - rows % ranks + ranks) if n > 0]
        raise ConfigError(
            f"data.train_batch_size={rows} rows cannot be dealt out evenly to {ranks} processes",
            f"set it to {' or '.join(map(str, near))}",
        )
