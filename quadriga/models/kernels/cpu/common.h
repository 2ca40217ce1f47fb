/* What the kernels have in common. All in float32; not-a-number goes through all of it. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define INTERNAL __attribute__((visibility("hidden"))) /* not for callers outside of the library */
#define GRAIN 16384 /* elements that are worth a thread */

/* Vectors of the machine, and a · b + c of them. Rounded once where the machine can, and so written out: a compiler that
chooses by itself chooses one way here and another way there. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX__)
#include <immintrin.h>
#define LANES 8
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define LANES 4
#endif
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vector spread(float x) { return x - (vector){0}; }

INLINE vector add_product(vector c, vector a, vector b) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return c + a * b;
#endif
}

#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1 /* 32 of them, not 16 */
#else
#define MANY_REGISTERS 0
#endif

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

/* y = x · s · weight with s = 1 / sqrt(mean(x²) + eps); returns s. */
INLINE float norm_row(const float *x, const float *weight, float eps, int64_t width, float *y) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    float s = 1.0f / sqrtf(sum / width + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) y[i] = x[i] * s * weight[i];
    return s;
}

/* x[2·half] turned by the angles whose cosines and sines are c and s [2·half]; y may be x. */
INLINE void rotate_row(const float *x, const float *c, const float *s, int64_t half, float *y) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float left = x[i], right = x[i + half];
        y[i] = left * c[i] - right * s[i];
        y[i + half] = right * c[i + half] + left * s[i + half];
    }
}
