/* Matrix products with weights that were packed for them, and how threads share them. */

#pragma once
#include "common.h"

/* Rows of a tile of results, which stays in registers: 12 · 2 sums, 2 vectors of the panel and 1 of x are 27 of 32 registers,
6 · 2 + 2 + 1 are 15 of 16. */
#define TILE (MANY_REGISTERS ? 12 : 6)
#define VECTORS 2
#define PANEL (VECTORS * LANES)
#define BLOCK (16 * TILE) /* rows that go through all panels before others do, from the cache */

/* A weight W[outer, inner] in panels of PANEL columns of its transpose, zeros behind the last column; a panel is
[1 + inner, PANEL], its first row the bias. So a tile reads its panel from front to back, once, in whole vectors, and the bias
costs nothing: the sums begin with it. */
struct weight {
    const float *panels;
    int64_t inner, outer;
};

/* One of `size` threads that do something together. */
struct member {
    int64_t rank, size;
};

#define FIRST(n, m) ((n) * (m).rank / (m).size)      /* of n things the first that is this member's ... */
#define LAST(n, m) ((n) * ((m).rank + 1) / (m).size) /* ... and the first that is not any more */

enum result {
    STORED, /* out = product */
    ADDED,  /* out += product */
    GATED   /* out = silu(gate) · up: the first half of a panel holds rows of the gate's weight, the second of up's */
};

/* x[rows, inner] · Wᵀ + bias, for the columns that are this member's, to out[rows, outer]. Each element is summed in the
order of k, so its bits do not depend on the rows beside it or on who computes it. */
void packed_product(const float *x, int64_t x_stride, int64_t rows, struct weight w, struct member who,
                    enum result kind, float *out, int64_t out_stride);
