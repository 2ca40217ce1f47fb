/* The parts of a language model that are no matrix products, each in one pass over memory, in float32.

Compiled on the machine that runs it (library.py). Rows never share a sum, so a row has the same bits whatever rows are
beside it, and no sum depends on the number of threads. Not-a-number goes through all of it. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define GRAIN 16384 /* elements that are worth a thread */
#define GROUP 64    /* tokens whose likelihoods are summed first when one is drawn */

/* e^x within two units in the last place for x in [-87, 88]; 0 below, e^88 above. A loop over it becomes vector code. */
INLINE float exp_of(float given) {
    float x = given < -87.0f ? -87.0f : given;
    x = x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        int32_t i;
        float f;
    } power = {((int32_t)n + 127) << 23};
    return given < -87.0f ? 0.0f : p * power.f;
}

INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

INLINE float highest_of(const float *x, int64_t n) {
    float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < n; i++) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */

/* y = x · scale · weight with scale[row] = 1 / sqrt(mean(x²) + eps), which is kept for the gradient. */
void rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *y, float *scale) {
#pragma omp parallel for schedule(static) if (rows * width > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = x + row * width;
        float *out = y + row * width, sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += in[i] * in[i];
        float s = 1.0f / sqrtf(sum / width + eps);
        scale[row] = s;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = in[i] * s * weight[i];
    }
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
            const float *a = x + (row * heads + head) * 2 * half, *b = a + half;
            float *p = y + (row * heads + head) * 2 * half, *q = p + half;
            if (back) {
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float left = a[i], right = b[i];
                    p[i] = left * c[i] + right * s[i + half];
                    q[i] = right * c[i + half] - left * s[i];
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    float left = a[i], right = b[i];
                    p[i] = left * c[i] - right * s[i];
                    q[i] = right * c[i + half] + left * s[i + half];
                }
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

/* ---- attention of decoding rows ---------------------------------------------------------------------------------- */

/* Row i of x[tokens, heads, size], numbered over tokens and heads, to row rows[i] of `cache`. */
void write_cache(const float *x, const int64_t *rows, int64_t tokens, int64_t heads, int64_t size, int64_t token_stride,
                 int64_t head_stride, float *cache) {
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(cache + rows[token * heads + head] * size, x + token * token_stride + head * head_stride,
                   size * sizeof(float));
}

/* One row's `group` queries over the keys that its blocks hold for one key head, `first` to `last`. */
INLINE void attend(const float *q, const float *keys, const float *values, const int64_t *table, int64_t kv_heads,
                   int64_t head, int64_t first, int64_t last, int64_t block_size, int64_t group, int64_t size,
                   float scale, float softcap, float *scores, float *out) {
    int64_t length = last - first;
    for (int64_t at = first; at < last;) {
        int64_t within = at % block_size, stop = at - within + block_size;
        stop = stop < last ? stop : last;
        const float *key = keys + ((table[at / block_size] * kv_heads + head) * block_size + within) * size;
        for (; at < stop; at++, key += size)
            for (int64_t g = 0; g < group; g++) {
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < size; d++) sum += q[g * size + d] * key[d];
                scores[g * length + at - first] = sum * scale;
            }
    }
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * length, total = 0.0f;
        if (softcap > 0)
            for (int64_t i = 0; i < length; i++) s[i] = softcap * tanhf(s[i] / softcap);
        float highest = highest_of(s, length);
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < length; i++) {
            s[i] = exp_of(s[i] - highest);
            total += s[i];
        }
        float share = 1.0f / total;
#pragma omp simd
        for (int64_t i = 0; i < length; i++) s[i] *= share;
    }
    memset(out, 0, group * size * sizeof(float));
    for (int64_t at = first; at < last;) {
        int64_t within = at % block_size, stop = at - within + block_size;
        stop = stop < last ? stop : last;
        const float *value = values + ((table[at / block_size] * kv_heads + head) * block_size + within) * size;
        for (int64_t g = 0; g < group; g++) {
            float *o = out + g * size;
            for (int64_t i = at; i < stop; i++) {
                float w = scores[g * length + i - first];
                const float *v = value + (i - at) * size;
#pragma omp simd
                for (int64_t d = 0; d < size; d++) o[d] += w * v[d];
            }
        }
        at = stop;
    }
}

/* q and out [rows, heads, size]; keys and values [blocks, kv_heads, block_size, size]; row r sees positions 0 to
positions[r], at most the last `window` of them (0: all), in the blocks tables[r, :]; scratch [rows, heads, longest]. */
void paged_decode(const float *q, const float *keys, const float *values, const int64_t *tables, int64_t table_width,
                  const int64_t *positions, int64_t rows, int64_t heads, int64_t kv_heads, int64_t size,
                  int64_t block_size, int64_t window, float scale, float softcap, int64_t longest, float *scratch,
                  float *out) {
    int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(static) if (rows * heads * size > 1024)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t last = positions[row] + 1, first = window > 0 && last > window ? last - window : 0;
            int64_t at = row * heads + head * group;
            float *scores = scratch + at * longest;
#define ATTEND(GROUPS, SIZE)                                                                                           \
    attend(q + at * size, keys, values, tables + row * table_width, kv_heads, head, first, last, block_size, GROUPS,   \
           SIZE, scale, softcap, scores, out + at * size)
            if (size == 64 && group == 1) ATTEND(1, 64);
            else if (size == 64 && group == 2) ATTEND(2, 64);
            else if (size == 64) ATTEND(group, 64);
            else if (size == 128) ATTEND(group, 128);
            else ATTEND(group, size);
        }
}
