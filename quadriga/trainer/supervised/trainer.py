"""The loop of supervised training: next batch, one optimiser step, now and then a validation and a checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.shards import load_engine, save_engine
from quadriga.checkpoint.store import CheckpointStore
from quadriga.config.schema_models import OptimConfig
from quadriga.data.factory import pad_token_id
from quadriga.data.loader import BatchLoader, file_order_batches
from quadriga.data.sampler import ResumableSampler
from quadriga.engine import BatchCounts, TrainingEngine
from quadriga.engine.sharding import rank, sum_over_ranks, world_size
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.tracking import RunDirectory, Tracking
from quadriga.trainer.supervised.objectives import objective_of
from quadriga.trainer.supervised.ranks import same_on_all_ranks, share_of_rank, validation_share, wait_for_all_ranks

ENGINE_PART, EXPORT_PART = "model", "huggingface"


class SupervisedTrainer:
    """Trains one model on labelled data. Every process makes one, with the same arguments.

    Args:
        config: a checked configuration; its type says what is learnt (see `objectives`).
        device: where to compute.
    """

    def __init__(self, config: Any, device: torch.device | str = "cpu") -> None:
        self.config = config
        _check_batch_size(config.data.train_batch_size, world_size())
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.store = CheckpointStore(self.run_dir / "checkpoints", config.trainer.max_ckpt_to_keep)
        self.objective = objective_of(config)
        self._make_data()
        steps = config.trainer.total_training_steps
        self.total_steps = config.trainer.total_epochs * len(self.loader) if steps is None else steps
        self._make_engine(device)
        self.step = 0
        self.resumed_step: int | None = None

    def _make_data(self) -> None:
        data, objective = self.config.data, self.objective
        self.collate = partial(objective.collate, pad_token_id=pad_token_id(objective.tokenizer))
        train = objective.dataset(data.train_files, data.train_max_samples)
        self.val_dataset = objective.dataset(data.val_files, data.val_max_samples) if data.val_files else None
        sampler = ResumableSampler(len(train), data.train_batch_size, data.shuffle, data.seed)
        self.loader = BatchLoader(train, sampler, data.train_batch_size, self.collate)

    def _make_engine(self, device: torch.device | str) -> None:
        model, optim = self.config.model, self.config.optim
        torch.manual_seed(self.config.trainer.seed)
        self.engine = TrainingEngine(
            self.objective.load_model(),
            optim=OptimConfig(
                lr=optim.lr,
                betas=optim.betas,
                weight_decay=optim.weight_decay,
                lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
                lr_scheduler_type=optim.lr_scheduler,
                min_lr_ratio=optim.min_lr_ratio,
            ),
            fsdp=model.fsdp_config,
            grad_clip=optim.clip_grad,
            total_steps=self.total_steps,
            device=device,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            dump_dir=self.run_dir / "dumps",
        )
        self.objective.prepare(self.engine)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train until the last step; the model is then in `<run directory>/huggingface`. Returns the last step's metrics."""
        self.resume()
        metrics: dict[str, float] = {}
        with self._tracking() as tracking:
            while self.step < self.total_steps:
                metrics = self.training_step()
                if self.val_dataset is not None and self._is_due(self.config.trainer.test_freq):
                    metrics |= self.validate()
                if self._is_due(self.config.trainer.save_freq):
                    self.save()
                if tracking is not None:
                    tracking.log(self.step, metrics)
                    self._print(metrics)
        if self.step == self.resumed_step and self.config.trainer.resume_mode == "resume_path":
            self.save()  # nothing was left to do, but this run directory has no checkpoint yet
        self._publish()
        wait_for_all_ranks()  # one that leaves early would take the others' connections with it
        return metrics

    def training_step(self) -> dict[str, float]:
        """One optimiser step on the next `data.train_batch_size` rows, of which each rank takes its share."""
        start = time.perf_counter()
        epoch, batch = self.loader.next_batch()
        tokens = int(batch.batch["attention_mask"].sum())
        rows = share_of_rank(_model_columns(batch), self.objective.rows_per_example)
        self.objective.add_columns(rows)
        done = self.engine.train_mini_batch(
            rows,
            self._loss,
            at_last_token=self.objective.output == "values",
            rows_together=self.objective.rows_per_example,
            **self._limits(),
        )
        self.engine.end_step()
        self.step += 1
        seconds = time.perf_counter() - start
        known = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "grad_norm", "lr", "skipped")
        return {f"train/{name}": done[name] for name in known if name in done} | {
            "train/epoch": float(epoch),
            "train/time_s": seconds,
            "train/tokens_per_s": tokens / seconds,
        }

    def validate(self) -> dict[str, float]:
        """The loss and the metrics of the objective over the whole validation set."""
        per_example, totals = self.objective.rows_per_example, dict[str, Tensor]()
        examples = torch.zeros((), dtype=torch.float64)
        for batch in file_order_batches(self.val_dataset, self.config.data.train_batch_size, self.collate):  # type: ignore[arg-type]
            rows, own = validation_share(_model_columns(batch), per_example)
            self.objective.add_columns(rows)
            output = self._infer(rows)[own]
            columns = {name: column[own] for name, column in rows.batch.items()}
            for name, value in self.objective.sums(output, columns).items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.double()
            mask = columns["response_mask"]
            examples += self.objective.examples(BatchCounts(int(mask.sum()), len(own), mask.shape[1]))
        summed = sum_over_ranks(torch.stack([examples, *totals.values()]).to(self.engine.device)).tolist()
        return {f"val/{name}": value / summed[0] for name, value in zip(totals, summed[1:], strict=True)}

    def _loss(self, outputs: dict[str, Tensor], micro: dict[str, Tensor], counts: BatchCounts) -> Any:
        """The objective's sums over this micro-batch, divided by the examples of the whole batch over all ranks."""
        sums, examples = self.objective.sums(outputs[self.objective.output], micro), self.objective.examples(counts)
        return sums.pop("loss") / examples, {name: value / examples for name, value in sums.items()}

    def _infer(self, rows: DataProto) -> Tensor:
        if self.objective.output == "values":
            return self.engine.scores(rows, **self._limits())
        return self.engine.log_probs(rows, 1.0, **self._limits())[0]

    def _limits(self) -> dict[str, Any]:
        data = self.config.data
        rows = data.micro_batch_size_per_gpu
        return {
            "max_tokens": data.max_token_len_per_gpu,
            "max_rows": None if rows is None else rows * self.objective.rows_per_example,
        }

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint: on every rank its part of the engine, on rank 0 the export, the cursor and the commit."""
        is_first = rank() == 0
        with self.store.writing(self.step) if is_first else nullcontext() as draft:
            parts = [str(draft.folder(p)) for p in (ENGINE_PART, EXPORT_PART)] if draft is not None else []
            engine_folder, export_folder = same_on_all_ranks(parts)
            save_engine(self.engine, engine_folder)
            self.export(Path(export_folder))
            wait_for_all_ranks()
            if draft is not None:
                state = {"step": self.step, "loader": self.loader.state_dict(), "config": asdict(self.config)}
                draft.write_state(state)
        wait_for_all_ranks()

    def resume(self) -> None:
        """Go on after the step of the checkpoint that `trainer.resume_mode` chooses, if there is one."""
        trainer = self.config.trainer
        found = self.store.find(trainer.resume_mode, trainer.resume_from_path) if rank() == 0 else None
        path = same_on_all_ranks(None if found is None else str(found.path))
        if path is None:
            return
        checkpoint = Checkpoint(Path(path))
        load_engine(self.engine, checkpoint.folder(ENGINE_PART))
        state = checkpoint.read_state()
        self.loader.load_state_dict(state["loader"])
        self.step = self.resumed_step = state["step"]
        self._say(f"resumed after step {self.step} of {self.total_steps} from {path}")
        from quadriga.config.changes import changed_keys

        if changed := changed_keys(state["config"], asdict(self.config)):
            self._say("with another configuration than before: " + ", ".join(changed))
        if self.step >= self.total_steps:
            self._say(
                "nothing is left to do; to train anew, set trainer.resume_mode=disable or another trainer.experiment_name"
            )

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.config.model.save_dtype]
        with self.engine.offload.weights_on_device():
            self.objective.export(self.engine.model, folder, dtype)

    @property
    def model_dir(self) -> Path:
        return self.run_dir / "huggingface"

    def _publish(self) -> None:
        """The last checkpoint's model under the run's own name; the files are shared with it, so they take no space."""
        if rank() != 0:
            return
        newest = self.store.checkpoints()[0]
        unfinished = self.model_dir.with_name(".huggingface.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(newest.folder(EXPORT_PART), unfinished, copy_function=_link_or_copy)
        shutil.rmtree(self.model_dir, ignore_errors=True)
        os.replace(unfinished, self.model_dir)
        self._say(f"model written to {self.model_dir}")

    # ---- telling -----------------------------------------------------------------------------------------------------

    def _is_due(self, frequency: int) -> bool:
        return self.step == self.total_steps or (frequency > 0 and self.step % frequency == 0)

    def _tracking(self) -> AbstractContextManager[Tracking | None]:
        """Metrics of the run; on rank 0 only."""
        if rank() != 0:
            return nullcontext()
        return Tracking(self.config, RunDirectory(self.run_dir), resumed_step=self.resumed_step)

    def _print(self, metrics: dict[str, float]) -> None:
        if self._is_due(self.config.trainer.log_freq) or "val/loss" in metrics:
            quiet = ("train/skipped", "train/epoch")
            shown = " ".join(f"{name}={value:.4g}" for name, value in metrics.items() if name not in quiet)
            self._say(f"step {self.step}/{self.total_steps}: {shown}")

    def _say(self, text: str) -> None:
        if rank() == 0 and "console" in self.config.trainer.logger:
            print(text, flush=True)


def _model_columns(batch: DataProto) -> DataProto:
    """The columns that the engine reads. `response_mask[b, t]` is about token t + 1: the first can be no target."""
    columns = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict(tensors={**columns, "response_mask": batch.batch["loss_mask"][:, 1:].contiguous()})


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)


def _check_batch_size(rows: int, ranks: int) -> None:
    if rows % ranks:
        near = [n for n in (rows - rows % ranks, rows - rows % ranks + ranks) if n > 0]
        raise ConfigError(
            f"data.train_batch_size={rows} rows cannot be dealt out evenly to {ranks} processes",
            f"set it to {' or '.join(map(str, near))}",
        )
