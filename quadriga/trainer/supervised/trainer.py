"""The loop of supervised training: next batch, one optimiser step, now and then a validation and a checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.disk import require_room
from quadriga.checkpoint.huggingface import PART
from quadriga.checkpoint.shards import expected_bytes, load_engine, save_engine
from quadriga.checkpoint.store import CheckpointStore
from quadriga.config.run_name import nothing_left, refuse_another_task
from quadriga.config.schema_models import OptimConfig
from quadriga.config.typed import changed_keys
from quadriga.data.factory import pad_token_id
from quadriga.data.loader import BatchLoader, file_order_batches
from quadriga.data.sampler import ResumableSampler
from quadriga.engine import BatchCounts, TrainingEngine
from quadriga.engine.sharding import is_sharded, rank, sum_over_ranks, world_size
from quadriga.engine.weights import host_state_dict
from quadriga.errors import ConfigError, RunStopped
from quadriga.protocol import DataProto
from quadriga.tracking import RunDirectory
from quadriga.trainer.supervised.journal import Journal, NoJournal
from quadriga.trainer.supervised.objectives import KEPT_EXAMPLES, objective_of
from quadriga.trainer.supervised.ranks import (
    same_on_all_ranks,
    share_of_rank,
    together,
    validation_share,
    wait_for_all_ranks,
)

ENGINE_PART = "model"
SAME_TASK = ("model.partial_pretrain", "model.from_config", "data.train_files")
"""Keys that must not differ when a run goes on by itself: else it is another run in the same directory."""


class SupervisedTrainer:
    """Trains one model on labelled data. Every process makes one, with the same arguments.

    Args:
        config: a checked configuration; its type says what is learnt (see `objectives`).
        device: where to compute.
        directory: of the run, on rank 0; None: made here.
    """

    def __init__(self, config: Any, device: torch.device | str = "cpu", directory: RunDirectory | None = None) -> None:
        self.config = config
        together(lambda: _check_batch_size(config.data.train_batch_size, world_size()))
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.directory = directory or RunDirectory(self.run_dir) if rank() == 0 else None
        self.store = CheckpointStore(self.run_dir / "checkpoints", config.trainer.max_ckpt_to_keep)
        self.objective = together(lambda: objective_of(config))
        together(self._make_data)
        steps = config.trainer.total_training_steps
        self.total_steps = config.trainer.total_epochs * len(self.loader) if steps is None else steps
        self._make_engine(device)
        self.journal: Journal | NoJournal = NoJournal(config)
        self.step = 0
        self.stop_requested = False
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
        start = together(lambda: self.objective.load_model(is_sharded(device)))
        self.save_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.save_dtype]
        self.exporter = self.objective.export(start, self.save_dtype)
        self.optim = OptimConfig(
            name=optim.name,
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            lr_warmup_steps=optim.lr_warmup_steps,
            lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
            lr_scheduler_type=optim.lr_scheduler,
            min_lr_ratio=optim.min_lr_ratio,
        )
        self.engine = TrainingEngine(
            start,
            optim=self.optim,
            fsdp=model.fsdp_config,
            grad_clip=optim.clip_grad,
            total_steps=self.total_steps,
            device=device,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            sequence_parallel=model.ulysses_sequence_parallel_size,
            dump_dir=self.run_dir / "dumps",
        )
        self.objective.prepare(self.engine)
        parts = sum_over_ranks(torch.tensor(expected_bytes(self.engine, optim.name), device=device))
        together(partial(self._rehearse, int(parts) + self.exporter.bytes))

    def _rehearse(self, need_bytes: int) -> None:
        """What would stop a checkpoint shows before the first step."""
        if rank() == 0:
            self.exporter.rehearse(self.store.folder, self.config.model.trust_remote_code)
            require_room(self.store.folder, need_bytes)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Train until the last step; the model is then in `<run directory>/huggingface`. Returns the last step's metrics."""
        if self.resume():
            return {}
        metrics: dict[str, float] = {}
        with self._journal() as journal:
            self.journal, steering = journal, journal.steering
            if self.resumed_step is not None:
                steering.go_on_after(self)
            while self.step < self.total_steps and not self.stop_requested:
                journal.begin_step(self.step + 1)
                with journal.phase("step"):
                    metrics = self.training_step()
                steering.obey(self)
                if steering.takes("validate") or self._is_due(self.config.trainer.test_freq):
                    with journal.phase("testing"):
                        metrics |= self.validate() if self.val_dataset is not None else self.look_at_training()
                journal.log(self.step, metrics)
                if steering.takes("save") or self._is_due(self.config.trainer.save_freq) or self.stop_requested:
                    with journal.phase("save_checkpoint"):
                        journal.sync()  # a checkpoint never knows more than the metrics
                        self.save()
            if self.step < self.total_steps:
                raise RunStopped(
                    f"stopped after step {self.step} of {self.total_steps}, as asked",
                    "the same command goes on from there",
                )
        self._publish()
        journal.conclude(self.model_dir)
        wait_for_all_ranks()  # one that leaves early would take the others' connections with it
        return metrics

    def training_step(self) -> dict[str, float]:
        """One optimiser step on the next `data.train_batch_size` rows, of which each rank takes its share."""
        start = time.perf_counter()
        epoch, batch = self.loader.next_batch()
        tokens = int(batch.batch["attention_mask"].sum())
        rows = self._newest_rows = share_of_rank(_model_columns(batch), self.objective.rows_per_example)
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
        samples: list[dict[str, Any]] = []
        for batch in file_order_batches(self.val_dataset, self.config.data.train_batch_size, self.collate):  # type: ignore[arg-type]
            rows, own = validation_share(_model_columns(batch), per_example)
            self.objective.add_columns(rows)
            output = self._infer(rows)[own]
            columns = {name: column[own] for name, column in rows.batch.items()}
            if self.journal.keeps_samples and len(samples) < KEPT_EXAMPLES:
                samples += self._samples(output, columns, KEPT_EXAMPLES - len(samples))
            for name, value in self.objective.sums(output, columns).items():
                totals[name] = totals.get(name, torch.zeros((), dtype=torch.float64)) + value.double()
            mask = columns["response_mask"]
            examples += self.objective.examples(BatchCounts(int(mask.sum()), len(own), mask.shape[1]))
        self.journal.samples(self.step, samples, "val")
        summed = sum_over_ranks(torch.stack([examples, *totals.values()]).to(self.engine.device)).tolist()
        return {f"val/{name}": value / summed[0] for name, value in zip(totals, summed[1:], strict=True)}

    def look_at_training(self) -> dict[str, float]:
        """Without a validation set: keep what the model says of some examples of the newest step. No figures."""
        per_example = self.objective.rows_per_example
        rows = self._newest_rows[: KEPT_EXAMPLES * per_example // 4]
        self.objective.add_columns(rows)
        output = self._infer(rows)
        if self.journal.keeps_samples:
            columns = {name: column[: len(output)] for name, column in rows.batch.items()}
            self.journal.samples(self.step, self._samples(output, columns, KEPT_EXAMPLES), "train")
        return {}

    def _samples(self, output: Tensor, columns: dict[str, Tensor], most: int) -> list[dict[str, Any]]:
        rows = most * self.objective.rows_per_example
        return self.objective.samples(output[:rows].cpu(), {name: c[:rows].cpu() for name, c in columns.items()})

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
            parts = [str(draft.folder(p)) for p in (ENGINE_PART, PART)] if draft is not None else []
            engine_folder, export_folder = same_on_all_ranks(parts)
            save_engine(self.engine, engine_folder)
            self.export(Path(export_folder))
            wait_for_all_ranks()
            if draft is not None:
                state = {"step": self.step, "loader": self.loader.state_dict(), "config": asdict(self.config)}
                draft.write_state(state)
        wait_for_all_ranks()

    def resume(self) -> bool:
        """Go on after the step of the checkpoint that `trainer.resume_mode` chooses, if there is one. True: it was the last."""
        trainer = self.config.trainer
        newest = self.store.find(trainer.resume_mode, trainer.resume_from_path) if rank() == 0 else None
        path = same_on_all_ranks(None if newest is None else str(newest.path))
        if path is None:
            return False
        checkpoint = Checkpoint(Path(path))
        state = together(checkpoint.read_state)
        if trainer.resume_mode == "auto":
            before, now = state["config"], asdict(self.config)
            together(lambda: refuse_another_task(before, now, SAME_TASK, self.run_dir))
        if state["step"] >= self.total_steps:
            self._say(nothing_left(checkpoint.path, state["step"], self.total_steps))
            if checkpoint.path.parent == self.store.folder and not self.model_dir.exists():
                self._publish()  # the run before this one was ended between the checkpoint and this
            return True
        load_engine(self.engine, checkpoint.folder(ENGINE_PART))
        self.loader.load_state_dict(state["loader"])
        self.step = self.resumed_step = state["step"]
        self._say(f"resumed after step {self.step} of {self.total_steps} from {path}")
        if changed := changed_keys(state["config"], asdict(self.config)):
            self._say("with another configuration than before: " + ", ".join(changed))
        return False

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        with self.engine.offload.weights_on_device():
            weights = host_state_dict(self.engine.model, self.save_dtype)  # all ranks take part
        if rank() == 0:
            self.exporter.write(folder, weights)

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
        shutil.copytree(newest.folder(PART), unfinished, copy_function=_link_or_copy)
        shutil.rmtree(self.model_dir, ignore_errors=True)
        os.replace(unfinished, self.model_dir)
        self._say(f"model written to {self.model_dir}")

    # ---- telling -----------------------------------------------------------------------------------------------------

    def _is_due(self, frequency: int) -> bool:
        return self.step == self.total_steps or (frequency > 0 and self.step % frequency == 0)

    def _journal(self) -> Journal | NoJournal:
        """What is written and shown; on rank 0 only."""
        if self.directory is None:
            return NoJournal(self.config)
        return Journal(self.config, self.directory, self.step, self.total_steps, self.resumed_step)

    def set_key(self, key: str, value: Any) -> str:
        """Another value of a key for those who read it, from the next step on: of the learning rate, for the engine."""
        if key == "optim.lr":
            self.optim.lr = value
            if (schedule := self.engine.schedule) is not None:
                schedule.move_to(schedule.step)  # its factor of this step, of the new learning rate
        return ""

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
