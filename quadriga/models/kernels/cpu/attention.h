/* Attention over a cache in blocks. */

#pragma once
#include "common.h"

#define QUERIES 4     /* so many at once ... */
#define KEY_VECTORS 2 /* ... are multiplied with vectors of keys, and of a value's dimensions: sums stay in registers */
#define VALUE_VECTORS (MANY_REGISTERS ? 4 : 2)

/* Keys [blocks, kv_heads, size, columns], values [blocks, kv_heads, block_size, size]: the keys of a block lie beside each
other in each dimension, so that LANES of them are multiplied at once. columns: block_size rounded up to a multiple of
LANES. */
struct cache {
    float *keys, *values;
    int64_t kv_heads, size, block_size, columns;
};

/* A query over the positions before `last` of its sequence, and where its result goes; [size] each. */
struct query {
    const float *q;
    float *out;
    int64_t last;
};

/* What queries of one sequence and key head have in common. window: positions that a query sees, 0: all. next: the blocks
of whoever comes next, as many as `table`; they are fetched meanwhile. */
struct sight {
    const int64_t *table, *next;
    int64_t head, window;
    float scale, softcap;
};

INLINE float *keys_of(struct cache cache, int64_t block, int64_t head) {
    return cache.keys + (block * cache.kv_heads + head) * cache.size * cache.columns;
}

INLINE float *values_of(struct cache cache, int64_t block, int64_t head) {
    return cache.values + (block * cache.kv_heads + head) * cache.block_size * cache.size;
}

/* The key and value of one token and head to their place. */
INLINE void write_token(struct cache cache, int64_t block, int64_t head, int64_t place, const float *key,
                        const float *value) {
    float *keys = keys_of(cache, block, head) + place;
    for (int64_t d = 0; d < cache.size; d++) keys[d * cache.columns] = key[d];
    memcpy(values_of(cache, block, head) + place * cache.size, value, cache.size * sizeof(float));
}

/* Floats of scratch that `attend` needs when no query sees more than `longest` positions. */
INLINE int64_t scores_room(int64_t longest, int64_t block_size) {
    return QUERIES * (longest + block_size + LANES);
}

/* 1 to QUERIES queries of neighbouring positions. A query has the same bits whatever others are beside it. */
INTERNAL void attend(const struct query *queries, int count, struct cache cache, struct sight sight, float *scores);
