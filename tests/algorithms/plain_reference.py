"""The mathematics once more, in plain Python on lists of floats, one row and one token at a time.

Written from the definitions and slow on purpose: nothing here shares code, layout or order of operations
with the package.
"""

from __future__ import annotations

import math
from collections import defaultdict

Matrix = list[list[float]]


def clamp(x, low, high):
    return min(max(x, low), high)


# --------------------------------------------------------------------------------------------------- masked statistics


def selected(x: Matrix, mask) -> list[float]:
    return [v for row, keep in zip(x, mask) for v, k in zip(row, keep) if k]


def mean(numbers):
    return sum(numbers) / len(numbers)


def variance(numbers):
    if len(numbers) == 1:
        return 0.0
    centre = mean(numbers)
    return sum((v - centre) ** 2 for v in numbers) / (len(numbers) - 1)


def whiten(x: Matrix, mask) -> Matrix:
    tokens = selected(x, mask)
    centre, scale = mean(tokens), math.sqrt(variance(tokens) + 1e-8)
    return [[(v - centre) / scale if k else 0.0 for v, k in zip(row, keep)] for row, keep in zip(x, mask)]


# ---------------------------------------------------------------------------------------------------------- advantages


def gae_unwhitened(rewards, mask, values, gamma, lam):
    advantages, returns = [], []
    for r, m, v in zip(rewards, mask, values):
        a_row, g_row = [0.0] * len(r), [0.0] * len(r)
        next_value = next_advantage = 0.0
        for t in reversed(range(len(r))):
            if m[t]:
                delta = r[t] + gamma * next_value - v[t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = v[t]
                a_row[t], g_row[t] = next_advantage, next_advantage + v[t]
        advantages.append(a_row)
        returns.append(g_row)
    return advantages, returns


def gae(rewards, mask, values, gamma=1.0, lam=1.0, **_):
    advantages, returns = gae_unwhitened(rewards, mask, values, gamma, lam)
    return whiten(advantages, mask), returns


def return_to_go(rewards, mask, gamma):
    out = []
    for r, m in zip(rewards, mask):
        row, running = [0.0] * len(r), 0.0
        for t in reversed(range(len(r))):
            if m[t]:
                running = r[t] + gamma * running
                row[t] = running
        out.append(row)
    return out


def by_group(group_ids):
    groups = defaultdict(list)
    for row, group in enumerate(group_ids):
        groups[group].append(row)
    return groups.values()


def spread(per_row, mask):
    out = [[a if k else 0.0 for k in keep] for a, keep in zip(per_row, mask)]
    return out, out


def outcome(rule):
    """An estimator from `rule(scores of the group, lengths of the group) -> advantages of the group`."""

    def estimator(rewards, mask, group_ids, **kw):
        scores, lengths = [sum(r) for r in rewards], [sum(1 for k in m if k) for m in mask]
        per_row = [0.0] * len(scores)
        for rows in by_group(group_ids):
            group = rule([scores[i] for i in rows], [lengths[i] for i in rows], scores, **kw)
            for i, a in zip(rows, group):
                per_row[i] = a
        return spread(per_row, mask)

    return estimator


def _grpo(scores, lengths, batch, norm_adv_by_std_in_grpo=True, **_):
    scale = math.sqrt(variance(scores)) + 1e-6 if norm_adv_by_std_in_grpo else 1.0
    return [(s - mean(scores)) / scale for s in scores]


def _rloo(scores, lengths, batch, **_):
    if len(scores) == 1:
        return [0.0]
    return [s - (sum(scores) - s) / (len(scores) - 1) for s in scores]


def _opo(scores, lengths, batch, **_):
    if sum(lengths) == 0:
        return [0.0] * len(scores)
    baseline = sum(n * s for n, s in zip(lengths, scores)) / sum(lengths)
    return [s - baseline for s in scores]


def _passk(scores, lengths, batch, norm_adv_by_std_in_grpo=True, **_):
    out = [0.0] * len(scores)
    if len(scores) > 1:
        ranked = sorted(range(len(scores)), key=lambda i: scores[i])
        scale = math.sqrt(variance(scores)) + 1e-6 if norm_adv_by_std_in_grpo else 1.0
        out[ranked[-1]] = (scores[ranked[-1]] - scores[ranked[-2]]) / scale
    return out


def _gpg(scores, lengths, batch, f_norm=1.0, **_):
    alpha = len(batch) / max(1, sum(1 for s in batch if s != 0))
    return [alpha * (s - mean(scores)) / f_norm for s in scores]


def _baseline(scores, lengths, batch, **_):
    return [s - mean(scores) for s in scores]


def reinforce_plus_plus(rewards, mask, gamma=1.0, **_):
    returns = return_to_go(rewards, mask, gamma)
    return whiten(returns, mask), returns


def reinforce_plus_plus_baseline(rewards, mask, group_ids, **_):
    advantages = whiten(outcome(_baseline)(rewards, mask, group_ids)[0], mask)
    return advantages, advantages


def remax(rewards, mask, reward_baselines, **_):
    returns = return_to_go(rewards, mask, 1.0)
    advantages = [
        [g - b if k else 0.0 for g, k in zip(row, keep)] for row, b, keep in zip(returns, reward_baselines, mask)
    ]
    return advantages, returns


ESTIMATORS = {
    "gae": gae,
    "grpo": outcome(_grpo),
    "grpo_vectorized": outcome(_grpo),
    "rloo": outcome(_rloo),
    "rloo_vectorized": outcome(_rloo),
    "opo": outcome(_opo),
    "grpo_passk": outcome(_passk),
    "gpg": outcome(_gpg),
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


# --------------------------------------------------------------------------------------------------------- aggregation


def aggregate(mode, per_token: Matrix, mask, constant) -> float:
    """The value for a whole mini-batch."""
    rows = [selected([row], [keep]) for row, keep in zip(per_token, mask)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-mean":
        return mean([mean(row) for row in rows])
    if mode == "seq-mean-token-sum":
        return mean([sum(row) for row in rows])
    if mode == "seq-mean-token-sum-norm":
        return mean([sum(row) for row in rows]) / constant
    raise KeyError(mode)


# ------------------------------------------------------------------------------------------ policy losses, by the token


def _row_log_ratios(logp, old, m):
    return [a - b for a, b, k in zip(logp, old, m) if k]


def vanilla_token(logp, old, adv, low, high, c):
    ratio = math.exp(clamp(logp - old, -20, 20))
    loss = max(-adv * ratio, -adv * clamp(ratio, 1 - low, 1 + high))
    return min(loss, -adv * c) if adv < 0 else loss


def per_token_losses(name, logp, old, adv, mask, low, high, c=3.0) -> Matrix:
    out = []
    for lp_row, old_row, adv_row, m in zip(logp, old, adv, mask):
        ratios = _row_log_ratios(lp_row, old_row, m)
        row_advantages = [a for a, k in zip(adv_row, m) if k]
        row = []
        for lp, o, a, k in zip(lp_row, old_row, adv_row, m):
            if not k:
                row.append(0.0)
            elif name == "vanilla":
                row.append(vanilla_token(lp, o, a, low, high, c))
            elif name == "gspo":
                ratio = math.exp(clamp(mean(ratios), -20, 10))
                row.append(max(-a * ratio, -a * clamp(ratio, 1 - low, 1 + high)))
            elif name == "cispo":
                row.append(-clamp(math.exp(clamp(lp - o, -20, 20)), 1 - low, 1 + high) * a * lp)
            elif name == "gpg":
                row.append(-a * lp)
            elif name == "geo_mean":
                a_row = mean(row_advantages)
                sign = (a_row > 0) - (a_row < 0)
                logs = [clamp(d, -20, 20) for d in ratios]
                clipped = [sign * min(sign * d, sign * clamp(d, -low, high)) for d in logs]
                row.append(-a_row * math.exp(mean(clipped)))
            else:
                raise KeyError(name)
        out.append(row)
    return out


# ------------------------------------------------------------------------------------------------ KL, value, correction


def kl(d, kind):
    return {
        "k1": lambda: d,
        "abs": lambda: abs(d),
        "k2": lambda: d * d / 2,
        "k3": lambda: clamp(math.exp(-clamp(d, -20, 20)) + clamp(d, -20, 20) - 1, -10, 10),
    }[kind]()


def value_token(v, v_old, ret, cliprange):
    near = clamp(v, v_old - cliprange, v_old + cliprange)
    return 0.5 * max((v - ret) ** 2, (near - ret) ** 2)
