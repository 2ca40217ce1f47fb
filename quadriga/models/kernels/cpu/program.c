/* The rows of a step through the whole of a Llama-like model, with as few barriers as can be.

With many rows every thread takes its own through all layers, so that what it computes stays in its cache and it waits for
others only where a prompt needs their keys; with few rows the threads share the columns of each product. A row has the
same bits either way, and whether its token is a prompt's or a new one. */

#include <omp.h>

#include "attention.h"
#include "products.h"

#define ROWS_OF_ITS_OWN 24 /* from so many rows a thread on, reading all weights costs it little */

struct layer {
    const float *norm, *q_norm, *k_norm, *mlp_norm; /* q_norm, k_norm: null where there is none */
    struct weight qkv, out, gate_up, down;
    float *keys, *values;
    int64_t window; /* 0: none */
    float scale;
};

struct model {
    const float *embedding, *cos, *sin, *norm; /* cos and sin [positions, size] */
    const struct layer *layers;
    struct weight head;
    int64_t num_layers, width, heads, kv_heads, size, block_size, columns;
    float eps;
};

/* A row is a token at its position of the sequence whose blocks are tables[sequences[row], :]; several rows of a sequence
stand together, in the order of their positions. Logits are wanted of the rows `outputs`. */
struct step {
    const int64_t *tokens, *positions, *sequences, *outputs, *tables;
    int64_t rows, num_outputs, table_width, longest;
    int64_t mixed; /* whether a sequence has several rows, or the outputs are not simply all rows */
    float *scratch, *logits;
};

/* An odd number of cache lines, so that the same column of neighbouring rows falls into different sets of the cache. */
INLINE int64_t stride_of(int64_t width) { return ((width + 15) / 16 | 1) * 16; }

/* Of each row: residual stream, normed input of a product, q k v, attention's result, the MLP's inner activations. */
struct buffers {
    int64_t x_stride, qkv_stride, attended_stride, inner_stride;
    float *x, *normed, *qkv, *attended, *inner, *scores;
};

INLINE struct buffers buffers_of(const struct model *m, int64_t rows, float *scratch) {
    struct buffers b = {.x_stride = stride_of(m->width), .qkv_stride = stride_of(m->layers->qkv.outer),
                        .attended_stride = stride_of(m->heads * m->size),
                        .inner_stride = stride_of(m->layers->down.inner), .x = scratch};
    b.normed = b.x + rows * b.x_stride;
    b.qkv = b.normed + rows * b.x_stride;
    b.attended = b.qkv + rows * b.qkv_stride;
    b.inner = b.attended + rows * b.attended_stride;
    b.scores = b.inner + rows * b.inner_stride;
    return b;
}

/* Floats of scratch that a step needs. */
int64_t program_room(const struct model *m, int64_t rows, int64_t longest) {
    return buffers_of(m, rows, 0).scores - (float *)0 + omp_get_max_threads() * scores_room(longest, m->block_size);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

INLINE struct cache cache_of(const struct model *m, const struct layer *l) {
    return (struct cache){l->keys, l->values, m->kv_heads, m->size, m->block_size, m->columns};
}

INLINE void norm_and_rotate(const struct model *m, const float *norm, int64_t position, float *x) {
    if (norm) norm_row(x, norm, m->eps, m->size, x);
    rotate_row(x, m->cos + position * m->size, m->sin + position * m->size, m->size / 2, x);
}

/* A barrier counts all threads, so each must come here equally often: they do, since every thread goes through every layer,
with rows of its own or with a share of all. */
INLINE void meet(int64_t others) {
    if (others) {
#pragma omp barrier
    }
}

/* Queries and key of one row and key head made ready, key and value written to the cache. */
static void prepare(const struct model *m, const struct layer *l, const struct step *s, struct buffers b, int64_t row,
                    int64_t head) {
    int64_t size = m->size, group = m->heads / m->kv_heads, position = s->positions[row];
    float *qkv = b.qkv + row * b.qkv_stride, *q = qkv + head * group * size;
    float *k = qkv + (m->heads + head) * size, *v = k + m->kv_heads * size;
    for (int64_t h = 0; h < group; h++) norm_and_rotate(m, l->q_norm, position, q + h * size);
    norm_and_rotate(m, l->k_norm, position, k);
    int64_t block = s->tables[s->sequences[row] * s->table_width + position / m->block_size];
    write_token(cache_of(m, l), block, head, position % m->block_size, k, v);
}

/* Attention of `rows` neighbours of one sequence, for one key head. */
static void attend_sequence(const struct model *m, const struct layer *l, const struct step *s, struct buffers b,
                        int64_t row, int64_t rows, int64_t head, float *scores) {
    int64_t group = m->heads / m->kv_heads, all = rows * group;
    const int64_t *table = s->tables + s->sequences[row] * s->table_width;
    const int64_t *next = s->tables + s->sequences[row + rows < s->rows ? row + rows : row] * s->table_width;
    struct sight sight = {table, next, head, l->window, l->scale, 0.0f};
    for (int64_t i = 0; i < all;) {
        struct query queries[QUERIES];
        int count = 0;
        for (; count < QUERIES && i < all; count++, i++) {
            int64_t at = row + i / group, column = (head * group + i % group) * m->size;
            queries[count] = (struct query){b.qkv + at * b.qkv_stride + column,
                                            b.attended + at * b.attended_stride + column, s->positions[at] + 1};
        }
        attend(queries, count, cache_of(m, l), sight, scores);
    }
}

/* Attention of `rows` rows, by key heads and rows shared by the members; a prompt's row sees keys that others write. */
static void attend_rows(const struct model *m, const struct layer *l, const struct step *s, struct buffers b,
                        int64_t from, int64_t rows, struct member who, int64_t with_others, float *scores) {
    int64_t first = FIRST(rows * m->kv_heads, who), last = LAST(rows * m->kv_heads, who);
    for (int64_t i = first; i < last; i++) prepare(m, l, s, b, from + i % rows, i / rows);
    meet(with_others);
    for (int64_t i = first, next; i < last; i = next) {
        int64_t row = from + i % rows, head = i / rows;
        for (next = i + 1; next < last && next / rows == head && next - i < QUERIES; next++)
            if (s->sequences[from + next % rows] != s->sequences[row]) break;
        attend_sequence(m, l, s, b, row, next - i, head, scores);
    }
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

/* Rows `from` to `to` through the model, by `who` of those that work on these rows. */
static void run_rows(const struct model *m, const struct step *s, struct buffers b, int64_t from, int64_t to,
                     struct member who, float *scores) {
    int64_t rows = to - from, together = who.size > 1;
    float *x = b.x + from * b.x_stride, *normed = b.normed + from * b.x_stride;
    float *qkv = b.qkv + from * b.qkv_stride, *inner = b.inner + from * b.inner_stride;
#define EACH_ROW for (int64_t r = FIRST(rows, who); r < LAST(rows, who); r++)
    EACH_ROW memcpy(x + r * b.x_stride, m->embedding + s->tokens[from + r] * m->width, m->width * sizeof(float));
    for (const struct layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        EACH_ROW norm_row(x + r * b.x_stride, l->norm, m->eps, m->width, normed + r * b.x_stride);
        meet(together);
        packed_product(normed, b.x_stride, rows, l->qkv, who, STORED, qkv, b.qkv_stride);
        meet(together);
        if (together || s->mixed) attend_rows(m, l, s, b, from, rows, who, 1, scores);
        else EACH_ROW attend_rows(m, l, s, b, from + r, 1, who, 0, scores); /* what a row writes is still at hand */
        meet(together);
        packed_product(b.attended + from * b.attended_stride, b.attended_stride, rows, l->out, who, ADDED, x,
                       b.x_stride);
        meet(together);
        EACH_ROW norm_row(x + r * b.x_stride, l->mlp_norm, m->eps, m->width, normed + r * b.x_stride);
        meet(together);
        packed_product(normed, b.x_stride, rows, l->gate_up, who, GATED, inner, b.inner_stride);
        meet(together);
        packed_product(inner, b.inner_stride, rows, l->down, who, ADDED, x, b.x_stride);
        meet(together);
    }
}

/* Logits of outputs `from` to `to`. */
static void run_outputs(const struct model *m, const struct step *s, struct buffers b, int64_t from, int64_t to,
                        struct member who) {
    int64_t rows = to - from, vocabulary = m->head.outer;
    float *normed = b.normed + from * b.x_stride;
    EACH_ROW norm_row(b.x + s->outputs[from + r] * b.x_stride, m->norm, m->eps, m->width, normed + r * b.x_stride);
    meet(who.size > 1);
    packed_product(normed, b.x_stride, rows, m->head, who, STORED, s->logits + from * vocabulary, vocabulary);
}

/* logits[num_outputs, vocabulary]; keys and values of all rows are in the cache afterwards. */
void run_program(const struct model *m, const struct step *s) {
    struct buffers b = buffers_of(m, s->rows, s->scratch);
#pragma omp parallel
    {
        struct member all = {omp_get_thread_num(), omp_get_num_threads()}, alone = {0, 1};
        float *scores = b.scores + all.rank * scores_room(s->longest, m->block_size);
        int64_t many = ROWS_OF_ITS_OWN * all.size;
        if (s->rows >= many) run_rows(m, s, b, FIRST(s->rows, all), LAST(s->rows, all), alone, scores);
        else run_rows(m, s, b, 0, s->rows, all, scores);
        meet(s->mixed);
        /* All rows are outputs unless the step is mixed: then nobody needs what another has computed. */
        if (s->num_outputs >= many) run_outputs(m, s, b, FIRST(s->num_outputs, all), LAST(s->num_outputs, all), alone);
        else run_outputs(m, s, b, 0, s->num_outputs, all);
    }
}
