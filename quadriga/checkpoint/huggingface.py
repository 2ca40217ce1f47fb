"""A trained model as a Hugging Face folder, the part of a checkpoint that other programs read. There is no other way out.

`ModelExport` knows everything but the weights before training begins, so `rehearse` can write and read back all the rest then:
what would stop a save shows before the first step, not after the last.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.checkpoint.manifest import MANIFEST
from quadriga.checkpoint.store import locate
from quadriga.errors import CheckpointError
from quadriga.models.token_model import PolicyModel, ScalarModel

PART = "huggingface"
"""The folder's name in a checkpoint."""
_READABLE = 0o644
_SAMPLE = "What is 12 + 7? \n\tThe \u201canswer\u201d is \\boxed{19}, w1 w2 ab \u00e9\u6f22"
_LOG = logging.getLogger(__name__)


class ModelExport:
    """Writes a model's folder for `from_pretrained`: config, generation config, tokenizer, its own code if it has any, weights.

    Args:
        blank: the Hugging Face model without weights, on the meta device, in the dtype to be written.
        tokenizer: the model's.
        generation_config: written as it is, valid or not in the eyes of transformers: readers differ in what they make of it.
        renamed: prefix of a trained weight's name → prefix that the folder's readers know.
    """

    def __init__(
        self, blank: Any, tokenizer: Any, generation_config: Any = None, renamed: dict[str, str] | None = None
    ) -> None:
        self._blank, self._tokenizer, self._generation_config = blank, tokenizer, generation_config
        self._renamed = renamed or {"": ""}
        if generation_config is not None:
            from transformers import GenerationConfig

            blank.generation_config = (
                GenerationConfig()
            )  # which `save_pretrained` accepts; the real one is written over it

    @property
    def bytes(self) -> int:
        """Of the weights, as they will be written."""
        return sum(p.numel() * p.element_size() for p in self._blank.parameters())

    def rehearse(self, near: Path, trust_remote_code: bool = False) -> None:
        """Write everything but the weights beside `near`, read it back, and leave no trace.

        Raises:
            CheckpointError: the model or its tokenizer cannot be saved, or what was saved cannot be read.
        """
        with readable_disk_errors("write to", near):
            near.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".rehearsal-", dir=near))
        try:
            self.write(folder, {})
            _read_description(folder, self._tokenizer, trust_remote_code)
        except CheckpointError:
            raise
        except Exception as error:  # whatever stops it now would stop every checkpoint
            raise CheckpointError(
                f"no checkpoint of this model could be written: {type(error).__name__}: {error}",
                "correct its config.json, generation_config.json or tokenizer files; nothing has been trained yet",
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def part(self, weights: dict[str, Tensor]) -> ModelPart:
        """The folder with these weights, to be written later."""
        return ModelPart(self, weights)

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the whole folder. CheckpointError where the disk does not take it."""
        from safetensors import SafetensorError

        named = {
            new + name.removeprefix(old): weight.contiguous()
            for name, weight in weights.items()
            for old, new in self._renamed.items()
            if name.startswith(old)
        }
        with readable_disk_errors("write the model into", folder):
            try:
                self._blank.save_pretrained(folder, state_dict=named)
            except SafetensorError as error:
                raise CheckpointError(f"Cannot write {folder}: {error}", "free some space on that disk") from error
            if self._generation_config is not None:
                self._generation_config.to_json_file(folder / "generation_config.json", use_diff=True)
            self._tokenizer.save_pretrained(folder)
            for file in folder.glob("*.safetensors"):
                file.chmod(_READABLE)  # safetensors makes files that only their owner can read


@dataclass(frozen=True)
class ModelPart:
    """Whole weights in host memory, an adapter merged into them, on their way into a checkpoint."""

    export: ModelExport
    weights: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights.values())

    def write(self, folder: str) -> None:
        self.export.write(Path(folder), self.weights)


def policy_export(policy: PolicyModel, tokenizer: Any, dtype: torch.dtype = torch.float32) -> ModelExport:
    """A causal language model; its weights come with an adapter added to them, see `engine.weights`."""
    module = policy.huggingface
    with torch.device("meta"):
        blank = type(module)._from_config(copy.deepcopy(module.config), dtype=dtype)
    if (conversions := getattr(module, "_weight_conversions", None)) is not None:
        blank._weight_conversions = conversions  # how names and shapes on disk differ from those in memory
    return ModelExport(blank, tokenizer, module.generation_config)


def reward_model_export(scorer: ScalarModel, tokenizer: Any, dtype: torch.dtype = torch.float32) -> ModelExport:
    """A sequence classifier with one label, as `load_reward_model` and transformers load it."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(scorer.trunk.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id  # with which a classifier finds the last token of a padded row
    with torch.device("meta"):
        blank = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    return ModelExport(blank, tokenizer, renamed={"trunk.": f"{blank.base_model_prefix}.", "head.": "score."})


@dataclass(frozen=True)
class Loaded:
    """What a folder was found to hold."""

    parameters: int
    dtype: str


def load_exported(folder: Path, target: Path) -> Loaded:
    """Load model and tokenizer with transformers, never from a pickle, never with code from the folder.

    Raises:
        CheckpointError: it does not load, its weights do not fit its config.json, or are not finite. Named as `target`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scores = str(config.get("architectures")).endswith("ForSequenceClassification']")  # a reward model
    auto_class: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    trust: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        AutoTokenizer.from_pretrained(folder, **trust)
        loaded: Any = auto_class.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **trust
        )
        model, info = loaded
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointError(
            f"transformers cannot load the policy for {target}: {type(error).__name__}: {error}",
            "export another checkpoint, or check that this version of transformers knows the model",
        ) from error
    wrong = {kind: sorted(map(str, info[kind])) for kind in info if kind.endswith("_keys") and info[kind]}
    if wrong:
        raise CheckpointError(
            f"the policy for {target} does not fit its config.json: {wrong}", "export another checkpoint"
        )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckpointError(
                f"the policy for {target} has numbers in {name} that are not finite",
                "export an earlier checkpoint, or another --dtype if float16 is too narrow for it",
            )
    return Loaded(sum(p.numel() for p in model.parameters()), str(model.dtype).removeprefix("torch."))


def _read_description(folder: Path, tokenizer: Any, trust_remote_code: bool) -> None:
    """Read back all that `rehearse` wrote, as others will."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    trust: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    AutoConfig.from_pretrained(folder, **trust)
    if (folder / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(folder, local_files_only=True)
    read = AutoTokenizer.from_pretrained(folder, **trust)
    # transformers chooses the class by config.json too: beside some models it makes another tokenizer of the same files.
    change = (
        f"a {type(tokenizer).__name__} with {len(tokenizer)} tokens becomes a {type(read).__name__} with {len(read)}"
    )
    if read.get_vocab() != tokenizer.get_vocab():
        raise CheckpointError(
            f"the tokenizer is another one after it is saved beside this model and loaded again: {change}",
            "give the model's own tokenizer, or one of a class that transformers keeps for this kind of model",
        )
    if read.encode(_SAMPLE) != tokenizer.encode(_SAMPLE):
        _LOG.warning("saved beside this model, the tokenizer will read text differently: %s", change)


def model_path(path: str) -> str:
    """The Hugging Face folder in a checkpoint or in a run directory (its newest good checkpoint); else `path` as it is.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or holds no model.
    """
    folder = Path(os.path.expandvars(path)).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return path
    is_checkpoint = (folder / MANIFEST).exists() or folder.name.startswith("global_step_")
    if is_checkpoint or (folder / "checkpoints").is_dir() or any(folder.glob("global_step_*")):
        return str(locate(folder).folder(PART))
    return path
