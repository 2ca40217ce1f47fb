"""Flags that all commands which generate have in common, and what they mean."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from quadriga.accelerator import use
from quadriga.errors import ConfigError
from quadriga.rollout.interface import SamplingParams, create_engine

MODEL_HELP = "Hugging Face name or folder, a checkpoint or run directory of Quadriga, or builtin:arithmetic"


def add_engine_flags(model: Any) -> None:
    """How the model is run; `model` is a group of a parser."""
    model.add_argument("--device", help="cpu, cuda or cuda:1 (default: the first accelerator there is)")
    model.add_argument(
        "--chat-template", help="Jinja template, or a file with one, instead of the tokenizer's (data.chat_template)"
    )
    model.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    model.add_argument("--engine", default="native", help="generation engine (native)")
    model.add_argument("--max-num-seqs", type=int, default=256, help="samples decoded together (256)")


def add_generation_flags(parser: argparse.ArgumentParser, temperature: float) -> None:
    """The model, its device and how it samples; `temperature` is the default."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help=MODEL_HELP)
    add_engine_flags(model)
    sampling = parser.add_argument_group("sampling")
    longest = SamplingParams().max_new_tokens
    sampling.add_argument("--n", type=int, default=1, help="samples of each prompt (1)")
    sampling.add_argument("--max-new-tokens", type=int, default=longest, help=f"longest response ({longest})")
    sampling.add_argument("--temperature", type=float, default=temperature, help=f"0: greedy ({temperature:g})")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (1: all)")
    sampling.add_argument("--top-k", type=int, default=-1, help="keep so many of the likeliest tokens (-1: all)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="keep tokens this likely relative to the best (0)")
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less (1)")
    sampling.add_argument("--stop", action="append", default=[], help="text that ends a response; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    sampling.add_argument("--seed", type=int, default=0, help="seed of sampling (0)")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=options.ignore_eos,
        stop_strings=tuple(options.stop),
        seed=options.seed,
    )


def open_engine(options: argparse.Namespace, path: str, tokenizer: Any, max_model_len: int | None) -> Any:
    """The engine that the flags describe, around the model at `path`.

    `max_model_len`: of the longest prompt and response together; None: what the model was made for.
    """
    from transformers.utils import logging as transformers_logging

    from quadriga.config.schema_models import ModelConfig
    from quadriga.models.load import end_token_ids, load_policy

    transformers_logging.disable_progress_bar()
    if options.device:
        use(options.device)
    if options.max_num_seqs < 1:
        raise ConfigError(f"--max-num-seqs {options.max_num_seqs} decodes nothing", "give at least 1")
    device = options.device or _default_device()
    dtype = getattr(torch, options.dtype or ("float32" if device.startswith("cpu") else "bfloat16"))
    module = load_policy(ModelConfig(path=path), tokenizer, trainable=False).huggingface.to(device, dtype)
    return create_engine(
        options.engine,
        module=module,
        eos_token_ids=end_token_ids(module, tokenizer),
        tokenizer=tokenizer,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
    )


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
