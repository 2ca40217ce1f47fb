/* The gradient of a weight: a product whose sums run over the rows of a batch, a thousand and more of them. */

#include <omp.h>
#include <stdlib.h>

#include "products.h"

/* Rows of the batch whose products are summed in registers before the sums go to memory. A block of both factors then stays
in a core's cache, and since blocks have one size and one order, an element has the same bits whatever the number of
threads. */
#define SUMMED 192

/* sums[rows, PANEL] of left[SUMMED, TILE] · right[SUMMED, PANEL]; constants where this is inlined, so sums are registers. */
INLINE void multiply(const float *left, const float *right, int64_t count, const int rows, vector sum[TILE][VECTORS]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[r][v] = spread(0.0f);
    for (int64_t t = 0; t < count; t++) {
        vector column[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) column[v] = *(const vector *)(right + t * PANEL + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[r][v] = add_product(sum[r][v], spread(left[t * TILE + r]), column[v]);
    }
}

/* to[columns rounded up to a multiple of `width`, in panels of it][count, width] = from[count, columns], zeros behind. */
INLINE void pack(const float *from, int64_t stride, int64_t count, int64_t columns, const int width, struct member who,
                 float *to) {
    int64_t panels = (columns + width - 1) / width;
    for (int64_t p = FIRST(panels, who); p < LAST(panels, who); p++) {
        int64_t kept = columns - p * width < width ? columns - p * width : width;
        float *panel = to + p * count * width;
        if (kept == width) {
            for (int64_t t = 0; t < count; t++) memcpy(panel + t * width, from + t * stride + p * width, 4 * width);
            continue;
        }
        for (int64_t t = 0; t < count; t++)
            for (int64_t c = 0; c < width; c++) panel[t * width + c] = c < kept ? from[t * stride + p * width + c] : 0.0f;
    }
}

/* A tile of the result: `rows` outputs of `columns` inputs, added to what is there. */
INLINE void add_tile(vector sum[TILE][VECTORS], int64_t rows, int64_t columns, float *out, int64_t stride) {
    for (int64_t r = 0; r < rows; r++) {
        if (columns == PANEL) {
            for (int v = 0; v < VECTORS; v++) *(vector *)(out + r * stride + v * LANES) += sum[r][v];
        } else {
            const float *sums = (const float *)sum[r];
            for (int64_t c = 0; c < columns; c++) out[r * stride + c] += sums[c];
        }
    }
}

/* Floats of scratch that `weight_gradient` needs. */
int64_t weight_gradient_room(int64_t outer, int64_t inner) {
    return SUMMED * ((outer + TILE - 1) / TILE * TILE + (inner + PANEL - 1) / PANEL * PANEL);
}

/* out[outer, inner] += gᵀ · x for g[rows, outer] and x[rows, inner]. */
void weight_gradient(const float *g, const float *x, int64_t rows, int64_t outer, int64_t inner, float *scratch,
                     float *out) {
    int64_t tiles = (outer + TILE - 1) / TILE, panels = (inner + PANEL - 1) / PANEL;
    int64_t wide = inner > outer; /* the smaller factor goes by while a part of the larger stays in the cache */
    float *left = scratch, *right = scratch + SUMMED * tiles * TILE;
#pragma omp parallel
    {
        struct member who = {omp_get_thread_num(), omp_get_num_threads()};
        for (int64_t start = 0; start < rows; start += SUMMED) {
            int64_t count = rows - start < SUMMED ? rows - start : SUMMED;
            pack(g + start * outer, outer, count, outer, TILE, who, left);
            pack(x + start * inner, inner, count, inner, PANEL, who, right);
#pragma omp barrier
            for (int64_t i = FIRST(tiles * panels, who); i < LAST(tiles * panels, who); i++) {
                int64_t row = (wide ? i % tiles : i / panels) * TILE, column = (wide ? i / tiles : i % panels) * PANEL;
                vector sum[TILE][VECTORS];
                multiply(left + row * count, right + column * count, count, TILE, sum);
                add_tile(sum, outer - row < TILE ? outer - row : TILE, inner - column < PANEL ? inner - column : PANEL,
                         out + row * inner + column, inner);
            }
#pragma omp barrier
        }
    }
}
