"""The command `quadriga export SOURCE --output FOLDER`: the policy of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from quadriga.checkpoint.export import DTYPES, export_policy_of
from quadriga.checkpoint.store import locate


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises CheckpointError where it cannot."""
    options = command_parser().parse_args(argv)
    if (shards := _shards_of_verl(options.source)) is not None:
        from quadriga.compat.verl_checkpoint import convert

        exported = convert(shards, options.output, options.dtype, options.overwrite)
        print(f"{exported.folder}: {exported.parameters:,} parameters in {exported.dtype}, from verl's shards")
        return 0
    checkpoint = locate(options.source)
    exported = export_policy_of(
        checkpoint, options.output, dtype=options.dtype, overwrite=options.overwrite, lora=options.lora
    )
    print(f"{exported.folder}: {exported.parameters:,} parameters in {exported.dtype}, step {checkpoint.step}")
    return 0


def _shards_of_verl(source: str) -> Path | None:
    """The folder of verl's shards at `source`, looked for without loading torch."""
    folder = Path(source).expanduser()
    return next((f for f in (folder, folder / "actor") if any(f.glob("model_world_size_*_rank_*.pt"))), None)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga export",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write the policy of a checkpoint as a Hugging Face folder, and prove that transformers loads it.",
        epilog="""examples:
  quadriga export outputs/quadriga/my_run --output my_policy
  quadriga export outputs/quadriga/my_run/checkpoints/global_step_20 --output my_policy --dtype bfloat16
  quadriga export outputs/quadriga/my_run --output my_adapter --lora apart
  quadriga export checkpoints/verl_examples/gsm8k/global_step_100 --output my_policy    # FSDP shards of verl's""",
    )
    parser.add_argument(
        "source",
        help="a checkpoint folder (…/global_step_20, also of verl's FSDP engine), or a run directory: its newest good one",
    )
    parser.add_argument("--output", required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights (default: as they were trained, float32)")
    parser.add_argument(
        "--lora",
        choices=("merged", "apart"),
        default="merged",
        help="a LoRA adapter: added to the weights (default), or alone in a folder for PeftModel.from_pretrained",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing Hugging Face folder")
    return parser
