#include "products.h"

/* ---- packing ----------------------------------------------------------------------------------------------------- */

int64_t panel_width(void) { return PANEL; }

/* Rows of weight[rows, inner] and of bias (or null) to the panels, in runs of `run` rows, one each `period` columns from
column `first` on. */
void pack_weight(const float *weight, const float *bias, int64_t rows, int64_t inner, int64_t first, int64_t run,
                 int64_t period, float *panels) {
#pragma omp parallel for schedule(static) if (rows * inner > GRAIN)
    for (int64_t row = 0; row < rows; row++) {
        int64_t column = first + row / run * period + row % run;
        float *to = panels + column / PANEL * (inner + 1) * PANEL + column % PANEL;
        const float *from = weight + row * inner;
        to[0] = bias ? bias[row] : 0.0f;
        for (int64_t k = 0; k < inner; k++) to[(k + 1) * PANEL] = from[k];
    }
}

/* ---- multiplying ------------------------------------------------------------------------------------------------- */

/* `rows` is a constant where this is inlined, so that the sums are registers and the loops over them are unrolled. */
INLINE void multiply(const float *x, int64_t stride, const float *panel, int64_t inner, const int rows, float *tile) {
    vector sum[TILE][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[r][v] = *(const vector *)(panel + v * LANES);
    for (int64_t k = 0; k < inner; k++) {
        panel += PANEL;
        vector column[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) column[v] = *(const vector *)(panel + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[r][v] = add_product(sum[r][v], spread(x[r * stride + k]), column[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) *(vector *)(tile + r * PANEL + v * LANES) = sum[r][v];
}

/* tile[rows, PANEL] = bias + x[rows, inner] · panel, with as many sums in registers as there are rows. */
static void multiply_rows(const float *x, int64_t stride, const float *panel, int64_t inner, int rows, float *tile) {
#define ROWS(n)                                                                                                        \
    case n:                                                                                                            \
        multiply(x, stride, panel, inner, n, tile);                                                                    \
        break;
    switch (rows) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if MANY_REGISTERS
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
    }
}

/* One row of a tile to where it belongs, `columns` results of it. */
INLINE void put(const float *tile, enum result kind, int64_t columns, float *out) {
    if (kind == STORED) {
        memcpy(out, tile, columns * sizeof(float));
    } else if (kind == ADDED) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) out[i] += tile[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) out[i] = tile[i] * sigmoid_of(tile[i]) * tile[i + PANEL / 2];
    }
}

void packed_product(const float *x, int64_t x_stride, int64_t rows, struct weight w, struct member who,
                    enum result kind, float *out, int64_t out_stride) {
    int64_t width = kind == GATED ? PANEL / 2 : PANEL, panels = (w.outer + width - 1) / width;
    float tile[TILE * PANEL] __attribute__((aligned(64)));
    /* A block of rows stays in the cache while the panels stream by, so weights are read from memory once a block and not once
    a tile. Members take columns and not rows: with few rows, each then reads a part of the weights and not all of them. */
    for (int64_t start = 0, end; start < rows; start = end) {
        end = rows - start < BLOCK ? rows : start + BLOCK;
        for (int64_t p = FIRST(panels, who); p < LAST(panels, who); p++) {
            const float *panel = w.panels + p * (w.inner + 1) * PANEL;
            int64_t columns = w.outer - p * width < width ? w.outer - p * width : width;
            for (int64_t row = start; row < end; row += TILE) {
                int count = end - row < TILE ? end - row : TILE;
                multiply_rows(x + row * x_stride, x_stride, panel, w.inner, count, tile);
                for (int r = 0; r < count; r++) {
                    float *to = out + (row + r) * out_stride + p * width;
                    if (columns == PANEL) put(tile + r * PANEL, kind, PANEL, to); /* constants make vector code */
                    else if (columns == PANEL / 2) put(tile + r * PANEL, kind, PANEL / 2, to);
                    else put(tile + r * PANEL, kind, columns, to);
                }
            }
        }
    }
}
