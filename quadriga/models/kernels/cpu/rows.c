/* The parts of a language model that are no matrix products, each in one pass over memory.

Rows never share a sum, so a row has the same bits whatever rows are beside it, and no sum depends on the number of
threads. */

#include "common.h"

#define GROUP 64 /* tokens whose likelihoods are summed first when one is drawn */

/* ---- norms ------------------------------------------------------------------------------------------------------- */

/* y = x · scale · weight with scale[row] = 1 / sqrt(mean(x²) + eps), which is kept for the gradient. */
void rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y, float *scale) {
#pragma omp parallel for schedule(static) if (rows * width > GRAIN)
    for (int64_t row = 0; row < rows; row++)
        scale[row] = norm_row(x + row * width, weight, eps, width, y + row * width);
}

/* dx, and dweight[part] summed over the rows of each of `parts` runs of neighbours: the caller adds the parts. */
void rms_norm_gradient(const float *dy, const float *x, const float *weight, const float *scale, int64_t rows,
                       int64_t width, int64_t parts, float *dx, float *dweight) {
#pragma omp parallel for schedule(static) if (rows * width > GRAIN)
    for (int64_t part = 0; part < parts; part++) {
        float *dw = dweight + part * width;
        memset(dw, 0, width * sizeof(float));
        for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++) {
            const float *in = x + row * width, *g = dy + row * width, s = scale[row];
            float *out = dx + row * width, sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) sum += g[i] * weight[i] * in[i];
            float pull = sum * s * s * s / width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                out[i] = g[i] * weight[i] * s - in[i] * pull;
                dw[i] += g[i] * in[i] * s;
            }
        }
    }
}

/* ---- gated MLP --------------------------------------------------------------------------------------------------- */

/* out = silu(gate) · up */
void swiglu(const float *gate, const float *up, int64_t n, float *out) {
#pragma omp parallel for simd schedule(static) if (parallel : n > GRAIN)
    for (int64_t i = 0; i < n; i++) out[i] = gate[i] * sigmoid_of(gate[i]) * up[i];
}

void swiglu_gradient(const float *dout, const float *gate, const float *up, int64_t n, float *dgate, float *dup) {
#pragma omp parallel for simd schedule(static) if (parallel : n > GRAIN)
    for (int64_t i = 0; i < n; i++) {
        float s = sigmoid_of(gate[i]), g = dout[i], x = gate[i];
        dup[i] = g * x * s;
        dgate[i] = g * up[i] * s * (1.0f + x * (1.0f - s));
    }
}

/* ---- rotary embedding -------------------------------------------------------------------------------------------- */

/* x[rows, heads, 2·half] turned by the angles of its row, cos and sin [rows, 2·half]; backwards with `back`. */
void rotate(const float *x, const float *cos, const float *sin, int64_t rows, int64_t heads, int64_t half, int back,
            float *y) {
#pragma omp parallel for schedule(static) if (rows * heads * half > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cos + row * 2 * half, *s = sin + row * 2 * half;
        for (int64_t head = 0; head < heads; head++) {
            const float *in = x + (row * heads + head) * 2 * half;
            float *out = y + (row * heads + head) * 2 * half;
            if (!back) {
                rotate_row(in, c, s, half, out);
                continue;
            }
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float left = in[i], right = in[i + half];
                out[i] = left * c[i] + right * s[i + half];
                out[i + half] = right * c[i + half] - left * s[i];
            }
        }
    }
}

/* ---- logits ------------------------------------------------------------------------------------------------------ */

/* Of z = raw · scale, rows of `vocab`: logsumexp, z of the target, entropy of the softmax. */
void softmax_statistics(const float *raw, const int64_t *targets, float scale, int64_t rows, int64_t vocab,
                        float *normaliser, float *target_logit, float *entropy) {
#pragma omp parallel for schedule(static) if (rows * vocab > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *z = raw + row * vocab;
        float highest = highest_of(z, vocab), total = 0.0f, weighted = 0.0f;
#pragma omp simd reduction(+ : total, weighted)
        for (int64_t i = 0; i < vocab; i++) {
            float below = (z[i] - highest) * scale, likelihood = exp_of(below);
            total += likelihood;
            weighted += likelihood * below;
        }
        float log_total = logf(total);
        normaliser[row] = highest * scale + log_total;
        target_logit[row] = z[targets[row]] * scale;
        entropy[row] = log_total - weighted / total;
    }
}

/* The gradient by raw, in its place: with p = softmax(z), g and e the gradients by the log-prob and by the entropy H,
scale · (g · (target - p) - e · p · (log p + H)). */
void softmax_gradient(float *raw, const int64_t *targets, float scale, const float *normaliser, const float *entropy,
                      const float *grad_log_prob, const float *grad_entropy, int64_t rows, int64_t vocab) {
#pragma omp parallel for schedule(static) if (rows * vocab > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        float *z = raw + row * vocab, norm = normaliser[row], g = grad_log_prob[row];
        if (grad_entropy) {
            float e = grad_entropy[row], h = entropy[row];
#pragma omp simd
            for (int64_t i = 0; i < vocab; i++) {
                float log_p = z[i] * scale - norm;
                z[i] = -scale * exp_of(log_p) * (g + e * (log_p + h));
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < vocab; i++) z[i] = -scale * g * exp_of(z[i] * scale - norm);
        }
        z[targets[row]] += scale * g;
    }
}

/* One token a row of logits[rows, vocab]: the one at which the running sum of softmax(z / temperature) passes u, or the
likeliest where `greedy`; and its log-prob. */
void sample_tokens(const float *logits, const float *temperature, const float *u, const uint8_t *greedy, int64_t rows,
                   int64_t vocab, float *group_sums, int64_t *tokens, float *log_probs) {
    int64_t groups = (vocab + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(static) if (rows * vocab > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *z = logits + row * vocab;
        float *sums = group_sums + row * groups, highest = highest_of(z, vocab), scale = 1.0f / temperature[row];
        float total = 0.0f;
        for (int64_t group = 0; group < groups; group++) {
            int64_t start = group * GROUP, end = start + GROUP < vocab ? start + GROUP : vocab;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = start; i < end; i++) sum += exp_of((z[i] - highest) * scale);
            sums[group] = sum;
            total += sum;
        }
        int64_t token = 0;
        if (greedy[row]) {
            while (token < vocab - 1 && !(z[token] >= highest)) token++;
        } else {
            float target = u[row] * total, before = 0.0f;
            int64_t group = 0;
            while (group < groups - 1 && !(before + sums[group] > target)) before += sums[group++];
            int64_t start = group * GROUP, end = start + GROUP < vocab ? start + GROUP : vocab;
            /* The group's sum and the running sum inside it round differently: stay on a token that has weight. */
            token = start;
            float best = -INFINITY;
            for (int64_t i = start; i < end; i++) {
                if (!(z[i] >= best)) continue;
                best = z[i];
                token = i;
            }
            for (int64_t i = start; i < end; i++) {
                before += exp_of((z[i] - highest) * scale);
                if (before > target) {
                    token = i;
                    break;
                }
            }
        }
        tokens[row] = token;
        log_probs[row] = (z[token] - highest) * scale - logf(total);
    }
}
