"""Keys that other supervised trainers have: a value that asks for what is done anyway is dropped, others are refused."""

from __future__ import annotations

from typing import Any

from quadriga.config.foreign_keys import PACKED, ForeignKey, fixed, no_matter, refused

_WHOLE = "a checkpoint always holds weights, optimiser, schedule and RNG, and a Hugging Face export"


def _part_of_a_checkpoint(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and set(given) <= {"model", "optimizer", "extra", "hf_model"}


FOREIGN: tuple[ForeignKey, ...] = (
    refused(
        "data.micro_batch_size", "rows of a single pass are counted per GPU here", "set data.micro_batch_size_per_gpu"
    ),
    refused("data.multiturn.*", "conversations have no tools here", "remove it"),
    fixed("data.use_dynamic_bsz", True, "micro-batches are filled by a token budget"),
    fixed("data.pad_mode", "no_padding", PACKED),
    fixed("data.balance_dp_token", (True, False), "tokens are always balanced over ranks"),
    fixed("data.use_shm", False, "models and data are read where they lie"),
    refused("data.custom_cls.*", "there is one dataset class", "remove it; prepare the rows as parquet or jsonl"),
    fixed("model.use_shm", False, "models and data are read where they lie"),
    fixed("model.strategy", ("fsdp", "fsdp2"), "Quadriga trains with FSDP2 only"),
    fixed("model.use_liger", False, "log-probs are computed in chunks by Quadriga itself"),
    fixed("model.lora_rank", 0, "a reward model trains all its weights"),
    refused("model.external_lib", "no code is imported by name before the model", "install it as a package"),
    refused("model.fsdp_config.*", "this part of the sharding is decided by Quadriga", "remove it"),
    fixed("use_remove_padding", (True, False), PACKED),
    fixed("ulysses_sequence_parallel_size", 1, "a sequence is not split over GPUs"),
    no_matter("trainer.n_gpus_per_node"),
    no_matter("trainer.nnodes"),
    refused("trainer.default_hdfs_dir", "runs are written to local folders", "set trainer.default_local_dir"),
    ForeignKey("trainer.checkpoint.save_contents", _part_of_a_checkpoint, _WHOLE),
    ForeignKey("trainer.checkpoint.load_contents", _part_of_a_checkpoint, _WHOLE),
    refused("trainer.checkpoint.*", _WHOLE),
)
