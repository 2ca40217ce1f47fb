"""On-policy distillation: the student samples, a teacher says how likely each of its tokens was.

d = student's log-prob − teacher's, of the sampled token. Under the student E[d] is the reverse KL, KL(student ‖ teacher).

**From sampled tokens** (`sampled_token_loss`), by the estimators of `kl`. Their values all estimate the reverse KL; their
gradients do not: `k1` has expectation 0 (refused), `k2`, `k1+` and `k3+` that of the reverse KL, `k3` that of the *forward*
KL, and its clamps take the gradient from surprising tokens. Tokens of an older student count times sg[ρ].

**As an advantage** (`distillation_advantage`): A_t = −sg[clamp(d, ±10)], undiscounted and not whitened, for the policy loss; or
minus another estimate of the divergence.

**From the teacher's top k** (`top_k_divergence`): the student's log-probs of the same ids under its full softmax; what lies
outside the set, the tail, is one more outcome (`bucket`: a lower bound of the whole divergence that is 0 only where both
agree), or `dropped`, or both are `renormalised` within the set (blind to what is outside).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.kl import kl_estimate
from quadriga.algorithms.masked import KL_BOUND, LOG_RATIO_BOUND, as_bool
from quadriga.errors import ConfigError

KEYS = "distillation.distillation_loss"
TAILS = ("bucket", "dropped", "renormalised")
TOP_K_MODES = ("forward_kl_topk", "jsd_topk")
SMALLEST_TAIL = 1e-7


@torch.no_grad()
def distillation_advantage(
    log_prob: Tensor,
    teacher_log_prob: Tensor,
    mask: Tensor,
    loss_mode: str = "k1",
    loss_max_clamp: float | None = None,
    log_prob_min_clamp: float | None = None,
) -> Tensor:
    """Minus the estimate `loss_mode` of each token within ±`loss_max_clamp` (10), 0 off the mask; all `[B, T]`.

    With k1 a token that the teacher likes better than the student is good. `log_prob_min_clamp` holds both log-probs up.
    """
    mask = as_bool(mask)
    student, teacher = _held_up(log_prob, teacher_log_prob, mask, log_prob_min_clamp)
    bound = KL_BOUND if loss_max_clamp is None else loss_max_clamp
    return -kl_estimate(student, teacher, loss_mode).clamp(-bound, bound)


def _held_up(student: Tensor, teacher: Tensor, mask: Tensor, floor: float | None) -> tuple[Tensor, Tensor]:
    """Both log-probs, at least `floor`, and 0 off the mask."""
    student, teacher = torch.where(mask, student, 0), torch.where(mask, teacher, 0)
    return (student, teacher) if floor is None else (student.clamp(min=floor), teacher.clamp(min=floor))


def sampled_token_loss(
    *,
    log_prob: Tensor,
    teacher_log_prob: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    loss_mode: str = "k3+",
    old_log_prob: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    loss_max_clamp: float | None = None,
    log_prob_min_clamp: float | None = None,
    ratio_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The reverse KL from the sampled tokens `[B, T]`; see the module's docstring for `loss_mode`.

    With `old_log_prob` tokens count times sg[ρ], at most `ratio_cap` times, and times `rollout_is_weights` where older weights
    than those of `old_log_prob` sampled them. `log_prob_min_clamp` holds both log-probs up, `loss_max_clamp` the token's
    value within ±. Returns these rows' share of the mini-batch's loss, with gradient, and
    metrics `distillation/*`.
    """
    if loss_mode in ("k1", "kl"):
        raise ConfigError(
            f"{KEYS}.loss_mode={loss_mode} as a loss has an expected gradient of 0: nothing would be learned.",
            f"set {KEYS}.use_policy_gradient=True, or loss_mode=k2 or k1+",
        )
    mask = as_bool(response_mask)
    student, teacher = _held_up(log_prob, teacher_log_prob, mask, log_prob_min_clamp)
    per_token = kl_estimate(student, teacher, loss_mode)
    if loss_max_clamp is not None:
        per_token = per_token.clamp(-loss_max_clamp, loss_max_clamp)
    if old_log_prob is not None:
        moved = torch.where(mask, log_prob - old_log_prob, 0).detach()
        ratio = moved.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        per_token = per_token * (ratio if ratio_cap is None else ratio.clamp(max=ratio_cap))
    if rollout_is_weights is not None:
        per_token = per_token * rollout_is_weights.detach()
    return loss_agg(per_token, mask), _figures(per_token, mask, loss_agg)


def top_k_loss(
    *,
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    loss_mode: str = "forward_kl_topk",
    tail: str = "bucket",
    jsd_beta: float = 0.5,
    loss_max_clamp: float | None = None,
    log_prob_min_clamp: float | None = None,
    teacher_ids: Tensor | None = None,
    student_top_ids: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A divergence on the teacher's top k, `[B, T, k]` log-probs of the same ids by both; see `top_k_divergence`.

    Returns these rows' share of the mini-batch's loss, with gradient, and metrics: both masses on the set, and with the
    ids of both top-k sets their overlap.
    """
    mask = as_bool(response_mask)
    inside = mask.unsqueeze(-1)
    student, teacher = torch.where(inside, student_log_probs, 0), torch.where(inside, teacher_log_probs, 0)
    masses = {
        "distillation/student_mass": student.detach().exp().sum(-1),
        "distillation/teacher_mass": teacher.exp().sum(-1),
    }
    if log_prob_min_clamp is not None:
        student, teacher = student.clamp(min=log_prob_min_clamp), teacher.clamp(min=log_prob_min_clamp)
    beta = 0.0 if loss_mode == "forward_kl_topk" else jsd_beta
    # Padding takes part with a harmless distribution: its value is masked, and 0 · inf must not become a gradient.
    k = student.shape[-1]
    even = torch.full_like(teacher, -1.0) - torch.log(torch.tensor(float(k)))
    student, teacher = torch.where(inside, student, even), torch.where(inside, teacher, even)
    per_token = top_k_divergence(student, teacher, beta=beta, tail=tail)
    if loss_max_clamp is not None:
        per_token = per_token.clamp(-loss_max_clamp, loss_max_clamp)
    metrics = _figures(per_token, mask, loss_agg) | {k: loss_agg.token_mean(v, mask) for k, v in masses.items()}
    if teacher_ids is not None and student_top_ids is not None:
        shared = (teacher_ids.unsqueeze(-1) == student_top_ids.unsqueeze(-2)).any(-1).to(student.dtype).mean(-1)
        metrics["distillation/overlap_ratio"] = loss_agg.token_mean(shared, mask)
    return loss_agg(per_token, mask), metrics


def top_k_divergence(student: Tensor, teacher: Tensor, *, beta: float = 0.0, tail: str = "bucket") -> Tensor:
    """Divergence of log-probs `[..., k]` of the same ids → `[...]`, with gradient in the student's.

    Generalised Jensen–Shannon (GKD, Agarwal et al. 2023, arXiv 2306.13649) with m = βt + (1−β)s: β·KL(t‖m) + (1−β)·KL(s‖m);
    β = 0 is the forward KL(t‖s) and β = 1 the reverse KL(s‖t), by definition.
    """
    if tail not in TAILS:
        raise ConfigError(f"{KEYS}.tail={tail!r} is unknown.", f"set it to {', '.join(TAILS)}")
    if not 0 <= beta <= 1:
        raise ConfigError(f"{KEYS}.jsd_beta={beta} is outside [0, 1].", "set it to 0.5")
    if tail == "bucket":
        student, teacher = _with_bucket(student), _with_bucket(teacher)
    elif tail == "renormalised":
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        total = _kl(teacher, student)
    elif beta == 1:
        total = _kl(student, teacher)
    else:
        weights = torch.tensor([beta, 1 - beta], dtype=student.dtype, device=student.device).log()
        middle = torch.logaddexp(teacher + weights[0], student + weights[1])
        total = beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)
    # Without its tail a divergence can be negative, which means nothing.
    return total.clamp(min=0) if tail == "dropped" else total


def _with_bucket(log_probs: Tensor) -> Tensor:
    """One more outcome: everything that is not in the set, with at least 1e-7."""
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST_TAIL)
    return torch.cat([log_probs, rest.log()], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _figures(per_token: Tensor, mask: Tensor, loss_agg: Aggregation) -> dict[str, Tensor]:
    value = per_token.detach()
    return {
        "distillation/loss": loss_agg.token_mean(value, mask),
        "distillation/abs_loss": loss_agg.token_mean(value.abs(), mask),
        "distillation/loss_max": value.masked_fill(~mask, -torch.inf).max(),
        "distillation/loss_min": value.masked_fill(~mask, torch.inf).min(),
    }
