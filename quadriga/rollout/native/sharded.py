"""One model over the members of a set: every member holds columns or rows of each large weight, none holds the model.

The member's module is a Hugging Face model of a *smaller* configuration: its share of the heads, of the MLP's width and of the
vocabulary. So the cache, the attention and the kernels see an ordinary model. Which weight is cut along which dimension is what
the model's own tensor parallel plan says (`base_model_tp_plan`, `_tp_plan`); a weight that has another shape in the smaller
model without a word in the plan makes the model unsupported, never wrong. Where the plan cuts rows (the projections back to
the width of the model), the outputs of the members are added up; the embedding is added up too, and the logits are gathered, so
that every member samples from the same whole distribution.

Widths and vocabularies that do not divide are padded with zeros, which add nothing. Key and value heads are split, or, where
there are more members than heads, repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ConfigError, WorkerError
from quadriga.rollout.interface import WeightsEcho
from quadriga.rollout.rank_set import RankSet
from quadriga.rollout.weights import checksums

COLUMNS, ROWS, PACKED, EXPERTS = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
WIDTH_STEP = 8
"""A member's width is a multiple of it: grouped products of experts want rows of whole 16 bytes."""
KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
KEY_HEADS = ("k_proj", "v_proj")


@dataclass(frozen=True)
class Cut:
    """Which part of a weight a member holds."""

    dim: int = -1
    """Cut along it; -1: the member holds the whole."""
    start: int = 0
    length: int = 0
    """Of the member's part, padding included."""
    halves: bool = False
    """The dimension holds two weights end to end, each cut by itself."""
    copies: int = 1
    """So many neighbouring members hold the same."""

    def of(self, whole: Tensor) -> Tensor:
        """The member's part of `whole`."""
        if self.dim < 0:
            return whole
        if self.halves:
            return torch.cat([self._part(half, self.length // 2) for half in whole.chunk(2, self.dim)], self.dim)
        return self._part(whole, self.length)

    def _part(self, whole: Tensor, length: int) -> Tensor:
        size = whole.shape[self.dim]
        start = min(self.start, size)
        part = whole.narrow(self.dim, start, min(length, size - start))
        if (missing := length - part.shape[self.dim]) == 0:
            return part
        return F.pad(part, [0, 0] * (whole.ndim - 1 - self.dim) + [0, missing])


class ShardedModel:
    """The member's module and how its weights are cut. The module knows it as `sharded`.

    Args:
        whole: the model, on the meta device: its class, configuration, names and shapes.
        ranks: the set.
        device, dtype: of the member's weights.
        buffers: tables of the training module, to be used as they are; None: computed here.
    """

    def __init__(
        self,
        whole: Any,
        ranks: RankSet,
        device: torch.device | str,
        dtype: torch.dtype,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        from transformers.initialization import no_init_weights

        self.ranks = ranks
        self.vocab_size = int(whole.config.get_text_config().vocab_size)
        local, plan = smaller_config(whole.config, ranks.size), tensor_plan(whole)
        with no_init_weights():
            module: Any = type(whole)._from_config(local, dtype=dtype)
        module.tie_weights()
        self.cuts = plan_cuts(whole, module, plan, ranks.rank, ranks.size)
        self.whole_shapes = {name: tuple(weight.shape) for name, weight in whole.named_parameters()}
        for name, table in module.named_buffers():
            if buffers is not None:
                table.copy_(buffers[name])
        module.generation_config = whole.generation_config
        self.module = module.to(device).requires_grad_(False).eval()
        self.module.sharded = self
        self._connect(plan)

    def _connect(self, plan: dict[str, str]) -> None:
        module, ranks = self.module, self.ranks
        for name, child in list(module.named_modules()):
            style = _style(plan, name)
            if style == ROWS and isinstance(child, nn.Linear):
                parent, _, last = name.rpartition(".")
                setattr(module.get_submodule(parent), last, RowParallelLinear(child, ranks))
            elif style == EXPERTS:
                child.register_forward_hook(lambda _, args, out: ranks.add_up(out))
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
        self._first, self._foreign = ranks.rank * embedding.weight.shape[0], torch.zeros(0)
        embedding.register_forward_pre_hook(self._own_ids)
        embedding.register_forward_hook(self._whole_embedding)
        head.register_forward_hook(lambda _, args, own: self.whole_logits(own))

    def _own_ids(self, embedding: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
        """Ids in the member's own part of the vocabulary; of those that are not, the embedding is left out."""
        ids, rows = args[0] - self._first, embedding.weight.shape[0]
        self._foreign = (ids < 0) | (ids >= rows)
        return (ids.masked_fill(self._foreign, 0),)

    def _whole_embedding(self, embedding: Any, args: tuple[Any, ...], own: Tensor) -> Tensor:
        return self.ranks.add_up(own.masked_fill(self._foreign[..., None], 0))

    def whole_logits(self, own: Tensor) -> Tensor:
        """`[…, V]` of the members' parts."""
        return torch.cat(self.ranks.gather(own), -1)[..., : self.vocab_size].contiguous()

    # ---- weights ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> WeightsEcho:
        """Copy the member's part out of whole weights that come one by one; all members take the same, in the same order.

        The echo is of the whole model: the parts that the members hold now were added up, and compared with what came,
        weight by weight. WorkerError where they differ, or where copies of one part do.
        """
        own = dict(self.module.named_parameters())
        sent: dict[str, int] = {}
        for name, weight in weights:
            if name not in own or tuple(weight.shape) != self.whole_shapes[name]:
                wanted = self.whole_shapes.get(name)
                raise WorkerError(
                    f"weight {name!r} has shape {tuple(weight.shape)}, the sharded rollout model "
                    + ("has no such weight" if wanted is None else f"wants {wanted}"),
                    "send the weights of the same model, whole",
                )
            own[name].copy_(self.cuts[name].of(weight))
            if self.ranks.leads:
                sent.update(checksums([(name, weight.to(own[name].dtype))]))
            else:
                sent[name] = 0
        if missing := sorted(set(own) - set(sent)):
            raise WorkerError(
                f"{len(missing)} weights were not sent, the first is {missing[0]!r}", "send all weights of the model"
            )
        return self._echo(version, sent)

    @torch.no_grad()
    def echo(self, version: int) -> WeightsEcho:
        """What the set holds now; called by all members."""
        return self._echo(version, {})

    def _echo(self, version: int, sent: dict[str, int]) -> WeightsEcho:
        """`sent` of the leader: checksums of what came."""
        held = checksums(self.module.named_parameters())
        names = sorted(held)
        device = next(self.module.parameters()).device
        table = [[_signed(held[name]), _signed(sent.get(name, 0))] for name in names]
        both = [part.tolist() for part in self.ranks.gather(torch.tensor(table, device=device))]  # [size, weights, 2]
        total = 0
        for i, name in enumerate(names):
            copies = self.cuts[name].copies
            parts = [both[rank][i][0] for rank in range(self.ranks.size)]
            groups = [parts[at : at + copies] for at in range(0, self.ranks.size, copies)]
            whole = sum(group[0] for group in groups) % (1 << 64)
            same = all(part == group[0] for group in groups for part in group)
            if not same or (sent and whole != both[0][i][1] % (1 << 64)):
                raise WorkerError(
                    f"version {version} of the weights: the members of a tensor parallel set do not hold what was sent "
                    f"as {name}: {parts}",
                    "this is a fault of the weight hand-over, not of your configuration: please report it",
                )
            total += whole
        return WeightsEcho(version, total % (1 << 64))


class RowParallelLinear(nn.Module):
    """x · Wᵀ + b of inputs that are spread over the members: each multiplies its own, and the products are added up."""

    def __init__(self, linear: nn.Linear, ranks: RankSet) -> None:
        super().__init__()
        self.weight, self.bias, self._ranks = linear.weight, linear.bias, ranks
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        out = self._ranks.add_up(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


# ---- what is cut how -------------------------------------------------------------------------------------------------


def smaller_config(config: Any, size: int) -> Any:
    """The configuration of a member's module. ConfigError if heads cannot be shared out."""
    local = copy.deepcopy(config)
    text = local.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"{KEY}={size} does not share out {heads} attention heads and {kv_heads} key and value heads",
            f"set it to one of {', '.join(map(str, sizes_that_fit(heads, kv_heads, size * 2)))}",
        )
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // heads
    text.num_attention_heads = heads // size
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = max(1, kv_heads // size)
    for name in WIDTHS:
        if isinstance(width := getattr(text, name, None), int):
            setattr(text, name, -(-width // (size * WIDTH_STEP)) * WIDTH_STEP)
    text.vocab_size = -(-text.vocab_size // size)
    text.pad_token_id = None  # it may be in another member's part
    return local


def sizes_that_fit(heads: int, kv_heads: int, most: int) -> list[int]:
    """Sizes of a set, up to `most`, that share out these heads."""
    return [t for t in range(1, most + 1) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]


def tensor_plan(whole: Any) -> dict[str, str]:
    """Style of each module or weight, by patterns of names. ConfigError for a model without a plan, or without a head."""
    plan = dict(getattr(whole.config.get_text_config(), "base_model_tp_plan", None) or {})
    if not plan:
        raise ConfigError(
            f"{type(whole).__name__} has no tensor parallel plan (base_model_tp_plan), so it cannot be shared out",
            f"set {KEY}=1, or use a model with a plan, such as Llama, Mistral, Qwen2, Qwen3, Gemma or Mixtral",
        )
    prefix = whole.base_model_prefix
    own = {f"{prefix}.{pattern}": style for pattern, style in plan.items()}
    own |= dict(getattr(type(whole), "_tp_plan", None) or {})
    return own


def plan_cuts(whole: Any, module: Any, plan: dict[str, str], rank: int, size: int) -> dict[str, Cut]:
    """How each weight of `module` is cut out of that of `whole`. ConfigError if the plan does not explain a shape."""
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    of_vocabulary = {id(weight) for end in ends for weight in end.parameters()}
    kv_heads = getattr(whole.config.get_text_config(), "num_key_value_heads", None) or size
    shapes = {name: weight.shape for name, weight in whole.named_parameters()}
    cuts = {}
    for name, weight in module.named_parameters():
        full, part = shapes[name], weight.shape
        holder, _, kind = name.rpartition(".")
        style = _style(plan, name) or _style(plan, holder)
        if id(weight) in of_vocabulary:
            style = COLUMNS  # of the vocabulary, in the embedding and in the head alike, which may be one weight
        if full == part:
            cuts[name] = Cut(copies=size)
            continue
        dims = [dim for dim, (a, b) in enumerate(zip(full, part, strict=True)) if a != b]
        # The last dimension of a linear map is its input; experts have their number in front.
        outputs = len(part) - (1 if kind == "bias" else 2)
        expected = {COLUMNS: outputs, PACKED: outputs, ROWS: len(part) - 1}
        if len(dims) != 1 or expected.get(style or "") != dims[0]:
            raise ConfigError(
                f"{type(whole).__name__} cannot be shared out over {size} members: its plan says {style or 'nothing'} of "
                f"{name}, which would go from {tuple(full)} to {tuple(part)}",
                f"set {KEY}=1, or use a model such as Llama, Mistral, Qwen2, Qwen3, Gemma or Mixtral",
            )
        dim = dims[0]
        repeats = size > kv_heads and holder.rpartition(".")[2] in KEY_HEADS
        copies = size // kv_heads if repeats else 1
        length = part[dim]
        each = length // 2 if style == PACKED else length
        cuts[name] = Cut(dim, rank // copies * each, length, style == PACKED, copies)
    return cuts


def _style(plan: dict[str, str], name: str) -> str | None:
    """The style of a module or weight of that name."""
    for pattern, style in plan.items():
        if fnmatchcase(name, pattern):
            return style
    return None


def _signed(number: int) -> int:
    """64 bits as int64 has them."""
    return number - (1 << 64) if number >= 1 << 63 else number
