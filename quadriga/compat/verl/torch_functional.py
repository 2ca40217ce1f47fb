"""`verl.utils.torch_functional`: what user code takes from there, with verl's arguments and edge cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.masked import masked_sum as _masked_sum

EPS = 1e-8


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """`data[…, V]` at `label[…]`."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probs `[…]` of `labels[…]` under `logits[…, V]`."""
    return gather_from_labels(torch.log_softmax(logits.float(), -1), labels).to(logits.dtype)


logprobs_from_logits_naive = logprobs_from_logits_v2 = logprobs_from_logits


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy `[…]` of the distributions of `logits[…, V]`."""
    log_probs = torch.log_softmax(logits.float(), -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    return torch.cat([entropy_from_logits(chunk) for chunk in logits.split(chunk_size)])


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Σ π² `[…]` of the distributions of `logits[…, V]`, for the optimal token baseline."""
    return torch.softmax(logits.float(), -1).square().sum(-1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    return torch.clamp(x, tensor_min, tensor_max)


# ---- Masked statistics: a mask without tokens has mean 0, and no variance


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return _masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    count = mask.sum() if axis is None else mask.sum(axis)
    return _masked_sum(values, mask, axis) / (count + EPS)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    count = mask.sum()
    if unbiased and count < 2:
        raise ValueError(f"{int(count)} tokens of the mask have no unbiased variance")
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + EPS)
    return whitened if shift_mean else whitened + mean


def distributed_mean_max_min_std(
    local_tensor: Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Over all elements of all ranks; of this process alone where there are no others."""
    import torch.distributed as dist

    def reduced(value: Tensor, how: Any) -> Tensor:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(value, op=how)
        return value

    count = reduced(torch.tensor(float(local_tensor.numel()), device=local_tensor.device), dist.ReduceOp.SUM)
    mean = reduced(local_tensor.sum(), dist.ReduceOp.SUM) / count
    largest = reduced(local_tensor.max(), dist.ReduceOp.MAX) if compute_max else None
    smallest = reduced(local_tensor.min(), dist.ReduceOp.MIN) if compute_min else None
    squares = reduced((local_tensor - mean).square().sum(), dist.ReduceOp.SUM) if compute_std else None
    return mean, largest, smallest, None if squares is None else (squares / (count - 1)).sqrt()


# ---- Responses and padding


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end token of each row of `response_id[B, R]`, 0 after it."""
    ends = [eos_token] if isinstance(eos_token, int) else list(eos_token)
    is_end = torch.isin(response_id, torch.tensor(ends, device=response_id.device)).int()
    return (is_end.cumsum(-1) - is_end).eq(0).to(dtype)


get_eos_mask = get_response_mask


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """`tensors[…, T]` padded to `max_seq_len`; unchanged where it is as long already."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Ragged rows as one tensor, padded on the right to the longest, or to `max_length` if that is more."""
    width = max([len(row) for row in response] + ([max_length] if max_length is not None else []))
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The ids of each row without its left padding."""
    return [ids[len(ids) - int(mask.sum()) :].tolist() for ids, mask in zip(input_ids, attention_mask)]


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Ids and mask `[1, T]` of exactly `max_length`: padded, or cut on the side that `truncation` names."""
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )
    from quadriga.data.ragged import kept_tokens

    if truncation == "error":
        raise NotImplementedError(f"{length} tokens are more than {max_length}, and truncation is error")
    kept = torch.as_tensor(kept_tokens(length, max_length, truncation))
    return input_ids[..., kept], attention_mask[..., kept]


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """A text as ids and mask `[1, max_length]`; see `postprocess_data`."""
    told = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        told["input_ids"], told["attention_mask"], max_length, pad_token_id, left_pad=left_pad, truncation=truncation
    )


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probs of the last `response_length` tokens, `[B, R]`, from logits of whole rows."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list[Any]:
    """A TensorDict in equal parts.

    Raises:
        AssertionError: its rows do not divide.
    """
    if tensors.batch_size[0] % batch_size:
        raise AssertionError(f"{tensors.batch_size[0]} rows cannot be split by {batch_size}")
    return list(tensors.split(batch_size))


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Mean of the selected elements of all ranks."""
    both = torch.stack([masked_sum(local_tensor, local_mask), local_mask.sum().to(local_tensor.dtype)])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(both)
    return both[0] / both[1]


def check_device_is_available() -> None: ...


def compute_grad_norm(model: torch.nn.Module) -> float:
    """Sum of the squares of all gradients."""
    return sum(float(p.grad.detach().square().sum()) for p in model.parameters() if p.grad is not None)


# ---- Schedules


def _scheduler(optimizer: Any, factor: Callable[[int], float], last_epoch: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch)


def _warm(step: int, warm_up: int) -> float:
    return step / max(1, warm_up)


def get_constant_schedule_with_warmup(optimizer: Any, num_warmup_steps: int, last_epoch: int = -1) -> Any:
    return _scheduler(
        optimizer, lambda step: min(1.0, _warm(step, num_warmup_steps)) if num_warmup_steps else 1.0, last_epoch
    )


def get_cosine_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> Any:
    """Linear from 0 in the warm-up, then along a cosine to `min_lr_ratio` of the learning rate."""
    lowest = min_lr_ratio or 0.0

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warm(step, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        wave = math.cos(math.pi * num_cycles * 2 * progress)
        return max(lowest, (1 + lowest) / 2 + wave * (1 - lowest) / 2)

    return _scheduler(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> Any:
    """Warm-up, a stable part of `stable_ratio` of the rest, then a cosine to `min_lr_ratio`."""
    stable = int((num_training_steps - num_warmup_steps) * stable_ratio)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warm(step, num_warmup_steps)
        if step < num_warmup_steps + stable:
            return 1.0
        progress = (step - num_warmup_steps - stable) / max(1, num_training_steps - num_warmup_steps - stable)
        value = max(0.0, 0.5 * (1 + math.cos(math.pi * num_cycles * 2 * progress)))
        return (1 - min_lr_ratio) * value + min_lr_ratio

    return _scheduler(optimizer, factor, last_epoch)
