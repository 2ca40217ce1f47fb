"""Load tokenizers, policies, value models and reward models. Weights are float32: they are what the optimiser updates.

A model that one process will hold whole is loaded by transformers. One that is sharded over ranks (`shards=True`) is an outline
without memory, with a reader that fills each rank's part when the model has been sharded (`quadriga.engine.sharding`).
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from quadriga.config.load import require_adapter
from quadriga.config.schema_models import ModelConfig, OtherModelConfig
from quadriga.errors import ConfigError, DataError
from quadriga.models.attention import register_packed_attention
from quadriga.models.outline import outline_of, sample_of, with_stand_ins
from quadriga.models.probe import check_packing
from quadriga.models.source import fetch_model, readable_load_errors, resolve_model_path
from quadriga.models.token_model import PolicyModel, ScalarModel, new_scalar_head
from quadriga.models.weight_files import check_fit, check_weight_files, check_weights
from quadriga.models.weight_reader import WeightReader


def load_tokenizer(path: str | os.PathLike, trust_remote_code: bool = False) -> Any:
    """The tokenizer; without a padding token it pads with its end-of-sequence token."""
    from transformers import AutoTokenizer

    source = resolve_model_path(path, tokenizer_only=True)
    with readable_load_errors(source, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer of {source} has neither a padding nor an end-of-sequence token",
                "set pad_token and eos_token in its tokenizer_config.json",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_token_ids(module: nn.Module, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's, and those of the model's generation config. The two often differ: a chat model
    is told to end its turn with a token of its own, which its tokenizer does not call the end of the sequence."""
    config = getattr(module, "generation_config", None)
    ends = None if config is None else config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})


def generation_end_tokens(path: str, tokenizer: Any) -> list[int]:
    """`end_token_ids` of the model of that name or folder, without loading it."""
    from transformers import GenerationConfig

    source = resolve_model_path(path)
    try:
        generation_config = GenerationConfig.from_pretrained(source)
    except OSError:  # it has none
        generation_config = None
    return end_token_ids(SimpleNamespace(generation_config=generation_config), tokenizer)  # type: ignore[arg-type]


def model_vocabulary(path: str, trust_remote_code: bool) -> int:
    """How many ids the model of that name or folder has a logit for, from its configuration alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolve_model_path(path), trust_remote_code=trust_remote_code)
    return int(config.get_text_config().vocab_size)


def load_policy(
    config: ModelConfig, tokenizer: Any = None, trainable: bool = True, shards: bool = False
) -> PolicyModel:
    """The policy of `config`, on the CPU in float32 or as an outline, with a LoRA adapter where `lora_rank` > 0.

    Dropout is 0 unless `override_config` sets it: a log-prob must not change between two calls.

    Raises:
        DataError: no such model, not a causal LM, weights that do not fit it, its vocabulary is smaller than the
            tokenizer's, or an architecture whose packed log-probs differ from its own.
    """
    from transformers import AutoModelForCausalLM

    loaded = _load(AutoModelForCausalLM, "a causal language model", config, shards)
    loaded.check()
    check_vocabulary(loaded.module, tokenizer, config.path)
    loaded.check_packing(config.path)
    policy = PolicyModel(loaded.module)
    if not trainable:
        policy = policy.requires_grad_(False).eval()
    elif config.lora_rank > 0:
        with with_stand_ins(loaded.module) if shards else nullcontext():
            policy = PolicyModel(_with_adapter(loaded.module, config))
    policy.reader = loaded.reader
    return policy.train(trainable)


def outline_policy(config: ModelConfig) -> Any:
    """The policy's Hugging Face module without memory: class, configuration, names and shapes. Errors as `load_policy`."""
    from transformers import AutoModelForCausalLM

    source, model_config = _read_config(config, "a causal language model")
    return _outline(AutoModelForCausalLM, "a causal language model", source, model_config, config.trust_remote_code)


def load_value_model(
    config: ModelConfig | OtherModelConfig, tokenizer: Any = None, shards: bool = False
) -> ScalarModel:
    """The trunk of `config.path` and a new scalar head that starts at 0 (see `new_scalar_head`)."""
    from transformers import AutoModelForCausalLM

    loaded = _load(AutoModelForCausalLM, "a causal language model", config, shards)
    model, trunk = loaded.module, f"{loaded.module.base_model_prefix}."
    loaded.check(lambda name: name.startswith(trunk))
    check_vocabulary(model, tokenizer, config.path)
    loaded.check_packing(config.path)
    scorer = ScalarModel(model.base_model, new_scalar_head(model.config.get_text_config().hidden_size))
    scorer.reader = loaded.reader
    return scorer.train()


def load_reward_model(
    config: ModelConfig | OtherModelConfig, tokenizer: Any = None, shards: bool = False
) -> ScalarModel:
    """A sequence classifier with one label, frozen. DataError where the weights hold no head for it."""
    from transformers import AutoModelForSequenceClassification

    loaded = _load(
        AutoModelForSequenceClassification,
        "a reward model (sequence classifier with one label)",
        config,
        shards,
        {"num_labels": 1},
    )
    model, trunk = loaded.module, f"{loaded.module.base_model_prefix}."
    unfit = [*loaded.info["missing_keys"], *(name for name, *_ in loaded.info["mismatched_keys"])]
    if no_head := sorted(name for name in unfit if not name.startswith(trunk)):
        raise DataError(
            f"{config.path} is not a reward model with one label: no fitting weights for {', '.join(no_head[:4])}",
            "give a model saved as a sequence classifier with num_labels=1",
        )
    loaded.check(lambda name: name.startswith(trunk))
    check_vocabulary(model, tokenizer, config.path)
    head = next((getattr(model, name) for name in ("score", "classifier") if hasattr(model, name)), None)
    if not isinstance(head, nn.Linear):
        raise DataError(
            f"the classifier of {config.path} is no single linear layer over the last token",
            "give a decoder model saved as a sequence classifier (its head is called score)",
        )
    scorer = ScalarModel(model.base_model, head)
    scorer.reader = loaded.reader
    return scorer.requires_grad_(False).eval()


def check_vocabulary(model: Any, tokenizer: Any, path: str) -> None:
    """DataError if the tokenizer can produce an id that the model has no embedding for."""
    if tokenizer is None:
        return
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= rows:
        raise DataError(
            f"the tokenizer has token ids up to {highest}, but the model {path} has only {rows} embeddings",
            "set model.tokenizer_path to the tokenizer that this model was trained with",
        )


@dataclass
class _Loaded:
    """A Hugging Face module, and how its weights fit, which the caller must look at.

    Attributes:
        reader: of an outline; None: the module has its weights.
    """

    module: Any
    source: Path | str
    info: dict[str, Any]
    reader: WeightReader | None = None

    def check(self, uses: Callable[[str], bool] = lambda name: True) -> None:
        """DataError unless the weights that matter fit, as far as they are known yet."""
        if self.reader is None:
            check_weights(self.module, self.info, self.source, uses)
        else:
            check_fit(self.info, self.source, uses)
            self.reader.uses = uses
            self.reader.read_buffers()

    def check_packing(self, path: str) -> None:
        check_packing(PolicyModel(self.module if self.reader is None else sample_of(self.module)), path)


def _load(
    auto_class: Any,
    what: str,
    config: ModelConfig | OtherModelConfig,
    shards: bool,
    settings: dict[str, Any] | None = None,
) -> _Loaded:
    source, model_config = _read_config(config, what)
    trust = config.trust_remote_code
    for key, value in (settings or {}).items():
        setattr(model_config, key, value)
    if shards:
        module = _outline(auto_class, what, source, model_config, trust)
        with readable_load_errors(source, what):
            folder = fetch_model(source)
        check_weight_files(folder)
        reader = WeightReader(module, folder)
        return _Loaded(module, folder, reader.info, reader)
    with readable_load_errors(source, what), _without_a_report():
        module, info = auto_class.from_pretrained(
            source,
            config=model_config,
            dtype=torch.float32,
            attn_implementation=register_packed_attention(),
            trust_remote_code=trust,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_weights` names them; transformers only prints them
        )
    return _Loaded(module, source, info)


@contextmanager
def _without_a_report() -> Iterator[None]:
    """transformers prints a table of weights that do not fit, and says that it has made up the missing ones: here they are an
    error, or a head that is replaced."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _outline(auto_class: Any, what: str, source: Path | str, model_config: Any, trust_remote_code: bool) -> Any:
    from transformers import GenerationConfig

    with readable_load_errors(source, what):
        module = outline_of(
            auto_class,
            model_config,
            dtype=torch.float32,
            attn_implementation=register_packed_attention(),
            trust_remote_code=trust_remote_code,
        )
    module.config.name_or_path = str(source)
    with suppress(OSError):  # a model may have no generation_config.json
        module.generation_config = GenerationConfig.from_pretrained(source)
    return module


def _read_config(config: ModelConfig | OtherModelConfig, what: str) -> tuple[Path | str, Any]:
    """Where the model is, and its configuration with `override_config` applied."""
    from transformers import AutoConfig

    source = resolve_model_path(config.path)
    if isinstance(source, Path):
        check_weight_files(source)
    with readable_load_errors(source, what):
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    override(model_config, config.override_config)
    if getattr(model_config.get_text_config(), "num_hidden_layers", 1) == 0:
        raise DataError(f"config.json of {source} says num_hidden_layers: 0", "a model needs at least one layer")
    return source, model_config


def override(model_config: Any, changes: dict[str, Any]) -> None:
    """Apply `override_config`, and switch off every dropout it does not name. ConfigError for an unknown key."""
    known = model_config.to_dict()
    for key, value in changes.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"model.override_config: {type(model_config).__name__} has no key {key!r}",
                f"did you mean {near[0]!r}?" if near else "see the model's config.json for its keys",
            )
        setattr(model_config, key, value)
    text_config = model_config.get_text_config()
    for key, value in text_config.to_dict().items():
        is_dropout = "dropout" in key or key.endswith("pdrop")
        if is_dropout and key not in changes and isinstance(value, float) and value > 0:
            setattr(text_config, key, 0.0)


def _with_adapter(model: Any, config: ModelConfig) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if config.lora_adapter_path:
        require_adapter(config.lora_adapter_path)
        return PeftModel.from_pretrained(
            model, config.lora_adapter_path, is_trainable=True, use_safetensors=True, autocast_adapter_dtype=False
        )
    _check_targets(model, config)
    try:
        return get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                target_modules=config.target_modules,
                exclude_modules=config.exclude_modules,
            ),
        )
    except ValueError as error:
        raise ConfigError(
            f"model.target_modules={config.target_modules!r} does not fit {config.path}: {error}",
            "use all-linear, or names of linear layers of this model",
        ) from error


def _check_targets(model: Any, config: ModelConfig) -> None:
    """ConfigError if one of the listed target modules is none of the model's: peft objects only if none matches."""
    targets = config.target_modules
    if isinstance(targets, str):
        return
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            linear = sorted(
                {n.rpartition(".")[2] for n, module in model.named_modules() if isinstance(module, nn.Linear)}
            )
            raise ConfigError(
                f"model.target_modules: {config.path} has no module {target!r}",
                f"use all-linear, or some of {', '.join(linear)}",
            )
