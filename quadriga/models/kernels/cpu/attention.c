#include "attention.h"

/* The blocks of positions `first` up to `last`, one after the other: `at` to `stop` lie in `block`, from `within` on. */
#define EACH_BLOCK(table, block_size, first, last)                                                                     \
    for (int64_t at = first, within = at % block_size, block, stop;                                                    \
         at < last && (block = table[at / block_size], stop = at - within + block_size,                                \
                       stop = stop < last ? stop : last, 1);                                                           \
         at = stop, within = 0)

/* q · key of `vectors` · LANES neighbouring keys, for each of `count` queries. */
INLINE void score_keys(const struct query *queries, const int count, const float *keys, const float *next,
                       const int vectors, struct cache cache, float scale, int64_t stride, float *scores) {
    vector sum[QUERIES][KEY_VECTORS] = {0};
    for (int64_t d = 0; d < cache.size; d++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            vector key = *(const vector *)(keys + d * cache.columns + v * LANES);
            __builtin_prefetch(next + d * cache.columns + v * LANES, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) sum[i][v] = add_product(sum[i][v], spread(queries[i].q[d]), key);
        }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) *(vector *)(scores + i * stride + v * LANES) = sum[i][v] * scale;
}

/* The sum of weight · value over positions `first` to `last`, in their order, of dimensions `from` on. */
INLINE void add_values(const struct query *queries, const int count, const float *weights, int64_t stride,
                       struct cache cache, struct sight sight, int64_t first, int64_t last, int64_t from,
                       const int vectors) {
    vector sum[QUERIES][VALUE_VECTORS] = {0};
    EACH_BLOCK(sight.table, cache.block_size, first, last) {
        const float *value = values_of(cache, block, sight.head) + within * cache.size + from;
        const float *next = values_of(cache, sight.next[at / cache.block_size], sight.head) + within * cache.size + from;
        for (int64_t p = at; p < stop; p++, value += cache.size, next += cache.size)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                vector part = *(const vector *)(value + v * LANES);
                __builtin_prefetch(next + v * LANES, 0, 2);
#pragma GCC unroll 4
                for (int i = 0; i < count; i++)
                    sum[i][v] = add_product(sum[i][v], spread(weights[i * stride + p]), part);
            }
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) *(vector *)(queries[i].out + from + v * LANES) = sum[i][v];
}

/* Scores [length] turned into weights that sum to 1. Not inlined: the same bits for whoever calls it. */
static __attribute__((noinline)) void softmax(float *scores, int64_t length, float softcap) {
    if (softcap > 0)
        for (int64_t i = 0; i < length; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
    float highest = highest_of(scores, length), total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < length; i++) {
        scores[i] = exp_of(scores[i] - highest);
        total += scores[i];
    }
    float share = 1.0f / total;
#pragma omp simd
    for (int64_t i = 0; i < length; i++) scores[i] *= share;
}

INLINE int64_t first_of(struct query query, int64_t window) {
    return window > 0 && query.last > window ? query.last - window : 0;
}

/* Three passes: all scores, softmax, weighted values. The scores of a few queries fit into the cache of a core, and every sum
runs over positions in their order, so a query's bits depend neither on how its sequence is cut into blocks nor on the queries
beside it. Several at once, because each key and value that is read then serves all of them. */
INLINE void attend_queries(const struct query *queries, const int count, struct cache cache, struct sight sight,
                           float *scores) {
    int64_t first = first_of(queries[0], sight.window), last = queries[0].last;
    for (int i = 1; i < count; i++) {
        int64_t own = first_of(queries[i], sight.window);
        first = own < first ? own : first;
        last = queries[i].last > last ? queries[i].last : last;
    }
    /* Scores by position, from the first block that is seen on; the last vector of a block may reach into the next. */
    int64_t base = first / cache.block_size * cache.block_size, stride = last - base + cache.block_size + LANES;
    EACH_BLOCK(sight.table, cache.block_size, first, last) {
        const float *keys = keys_of(cache, block, sight.head);
        const float *next = keys_of(cache, sight.next[at / cache.block_size], sight.head);
        float *to = scores + at - within - base;
        int64_t c = within / LANES * LANES, end = within + stop - at;
        for (; end - c > (KEY_VECTORS - 1) * LANES; c += KEY_VECTORS * LANES)
            score_keys(queries, count, keys + c, next + c, KEY_VECTORS, cache, sight.scale, stride, to + c);
        for (; c < end; c += LANES) score_keys(queries, count, keys + c, next + c, 1, cache, sight.scale, stride, to + c);
    }
    for (int i = 0; i < count; i++) { /* what others see and a query does not weighs nothing for it */
        float *own = scores + i * stride - base;
        int64_t from = first_of(queries[i], sight.window);
        softmax(own + from, queries[i].last - from, sight.softcap);
        memset(own + first, 0, (from - first) * sizeof(float));
        memset(own + queries[i].last, 0, (last - queries[i].last) * sizeof(float));
    }
    const float *weights = scores - base;
    int64_t from = 0;
    for (; cache.size - from >= VALUE_VECTORS * LANES; from += VALUE_VECTORS * LANES)
        add_values(queries, count, weights, stride, cache, sight, first, last, from, VALUE_VECTORS);
    for (; cache.size - from >= LANES; from += LANES)
        add_values(queries, count, weights, stride, cache, sight, first, last, from, 1);
    if (from == cache.size) return;
    size_t rest = (cache.size - from) * sizeof(float);
    for (int i = 0; i < count; i++) {
        vector sum = {0}, part = {0};
        EACH_BLOCK(sight.table, cache.block_size, first, last) {
            const float *value = values_of(cache, block, sight.head) + within * cache.size + from;
            for (int64_t p = at; p < stop; p++, value += cache.size) {
                memcpy(&part, value, rest);
                sum = add_product(sum, spread(weights[i * stride + p]), part);
            }
        }
        memcpy(queries[i].out + from, &sum, rest);
    }
}

void attend(const struct query *queries, int count, struct cache cache, struct sight sight, float *scores) {
    switch (count) {
    case 4: attend_queries(queries, 4, cache, sight, scores); break;
    case 3: attend_queries(queries, 3, cache, sight, scores); break;
    case 2: attend_queries(queries, 2, cache, sight, scores); break;
    case 1: attend_queries(queries, 1, cache, sight, scores); break;
    }
}

/* Keys and values [tokens, kv_heads, size], with the strides of tokens and heads, to places[token] of blocks[token]. */
void write_cache(const struct cache *cache, const float *keys, const float *values, const int64_t *blocks,
                 const int64_t *places, int64_t tokens, int64_t key_stride, int64_t key_head_stride,
                 int64_t value_stride, int64_t value_head_stride) {
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < cache->kv_heads; head++)
            write_token(*cache, blocks[token], head, places[token], keys + token * key_stride + head * key_head_stride,
                        values + token * value_stride + head * value_head_stride);
}

/* q and out [rows, heads, size]; row r sees positions 0 to positions[r], at most the last `window` of them (0: all), in
the blocks tables[r, :]; scratch [rows, scores_room]. */
void paged_decode(const struct cache *cache, const float *q, const int64_t *tables, int64_t table_width,
                  const int64_t *positions, int64_t rows, int64_t heads, int64_t window, float scale, float softcap,
                  float *scratch, int64_t room, float *out) {
    int64_t group = heads / cache->kv_heads, size = cache->size;
#pragma omp parallel for schedule(static) if (rows * heads * size > 1024)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t h = 0; h < heads;) {
            const int64_t *table = tables + row * table_width, *next = row + 1 < rows ? table + table_width : table;
            struct sight sight = {table, next, h / group, window, scale, softcap};
            struct query queries[QUERIES];
            int count = 0;
            for (int64_t end = (h / group + 1) * group; count < QUERIES && h < end; count++, h++) {
                int64_t at = (row * heads + h) * size;
                queries[count] = (struct query){q + at, out + at, positions[row] + 1};
            }
            attend(queries, count, *cache, sight, scratch + row * room);
        }
}

/* Floats of a row's scratch above. */
int64_t paged_decode_room(int64_t longest, int64_t block_size) { return scores_room(longest, block_size); }
