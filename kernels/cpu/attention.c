// Attention of prompts and answers over the paged cache; launch.py documents the arguments.

#include "tiles.h"

#include <stdlib.h>

#define LEAST_SHARED_PRODUCTS 262144  // as LEAST_SHARED
#define KEYS 128        // keys of one tile
#define AHEAD 32        // keys between the one that is read and the one that is prefetched
#define QUERY_ROWS 192  // rows of one tile, a row being one head of one query

struct attention {
    const void *q, *kv_cache;
    void *out;
    const int64_t *block_tables, *cu_seqlens, *context_lens;
    const float *sinks;  // [num_heads], or NULL
    long q_stride, out_stride, table_stride, block_stride;
    long to_values;  // of a block, from a head's keys to its values
    long num_heads, num_kv_heads, head_dim, block_size, window;
    float scale, soft_cap;
    enum dtype q_dtype, cache_dtype, out_dtype;
};

// Where the processor multiplies pairs of bfloat16, operands stay bfloat16: a float then stands for
// two, neighbors in head_dim for the scores and neighboring keys for the result.
struct scratch {
    float *q;       // [QUERY_ROWS, head_dim]
    float *keys;    // [head_dim, KEYS]
    float *values;  // [KEYS, padded head_dim]
    float *scores;  // [QUERY_ROWS, KEYS]
    float *out;     // [QUERY_ROWS, padded head_dim]
    float *best, *mass;  // [QUERY_ROWS] the largest score so far, and the sum of the weights
};

INLINE long padded(long size) { return (size + LANES - 1) / LANES * LANES; }

// A position in the blocks of a sequence.
struct cursor {
    const int64_t *block;
    long offset;  // in the block
};

INLINE struct cursor cursor_at(const struct attention *a, long seq, long key) {
    const int64_t *table = a->block_tables + seq * a->table_stride;
    return (struct cursor){table + key / a->block_size, key % a->block_size};
}

// Returns the key at the cursor and moves the cursor to the next key.
INLINE const char *step(const struct attention *a, struct cursor *at, long kv_head, long size) {
    long first = *at->block * a->block_stride;
    first += (kv_head * a->block_size + at->offset) * a->head_dim;
    if (++at->offset == a->block_size) {
        at->offset = 0;
        at->block++;
    }
    return (const char *)a->kv_cache + first * size;
}

// Gathers keys (transposed) and values [first, last) of one KV head, widened; 0 up to a multiple of
// LANES. Prefetches later keys up to `end`: the pool is larger than caches, its blocks scattered.
// One line at a time, because the processor drops most of many prefetches at once.
INLINE void gather_keys(const struct attention *a, const struct scratch *s, long seq, long kv_head,
                        long first, long last, long end, enum dtype dtype, int in_pairs) {
    long to_values = a->to_values, width = padded(a->head_dim);
    long num_units = a->head_dim >> in_pairs;
    enum dtype unit = in_pairs ? FLOAT32 : dtype;
    struct cursor at = cursor_at(a, seq, first), next = cursor_at(a, seq, first + AHEAD);
    for (long group = 0; group < last - first; group += LANES) {
        long num_keys = least(LANES, last - first - group);
        const char *keys[LANES], *wanted[LANES];
        for (long lane = 0; lane < LANES; lane++) {
            keys[lane] = lane < num_keys ? step(a, &at, kv_head, SIZE[dtype]) : keys[0];
            int is_there = first + AHEAD + group + lane < end;
            wanted[lane] = is_there ? step(a, &next, kv_head, SIZE[dtype]) : keys[0];
        }
        for (long i = 0; i < num_units; i += LANES) {
            long count = least(LANES, num_units - i);
            vec lanes[LANES];
            UNROLL for (long lane = 0; lane < LANES; lane++) {
                __builtin_prefetch(wanted[lane] + i * SIZE[unit], 0, 2);
                lanes[lane] = load(keys[lane], i, count, unit);
            }
            transpose(lanes);
            for (long k = 0; k < count; k++)
                store_whole(s->keys, (i + k) * KEYS + group, lanes[k], FLOAT32);
        }
        for (long lane = 0; lane < LANES; lane++) {
            const char *ahead = wanted[lane] + to_values * SIZE[dtype];
            for (long i = 0; i < a->head_dim; i += LANES) {
                __builtin_prefetch(ahead + i * SIZE[dtype], 0, 2);
                if (in_pairs && lane % 2) continue;
                long count = a->head_dim - i;
                vec value = all(0);
                if (lane < num_keys) value = load(keys[lane], to_values + i, count, dtype);
                if (in_pairs) {
                    uvec pair = (uvec)value >> 16;
                    if (lane + 1 < num_keys)
                        pair |= (uvec)load(keys[lane + 1], to_values + i, count, dtype);
                    value = (vec)pair;
                }
                store_whole(s->values, ((group + lane) >> in_pairs) * width + i, value, FLOAT32);
            }
        }
    }
}

// Turns scores [rows, columns] into weights; earlier sums shrink to the new largest score.
INLINE void weigh(const struct attention *a, const struct scratch *s, long rows, long columns,
                  long first_key, long first_position, int in_pairs) {
    long group_size = a->num_heads / a->num_kv_heads, width = padded(a->head_dim);
    float scale = (a->soft_cap != 0 ? a->soft_cap : a->scale) * LOG2_E;
    for (long row = 0; row < rows; row++) {
        float *scores = s->scores + row * KEYS;
        if (a->soft_cap != 0) {
            for (long i = 0; i < columns; i += LANES) {
                // tanh(x) = 1 - 2 / (e^2x + 1)
                vec x = load_whole(scores, i, FLOAT32) * (a->scale / a->soft_cap);
                vec tanh = 1.0f - 2.0f / (exp2_of(x * (2 * LOG2_E)) + 1.0f);
                store_whole(scores, i, tanh, FLOAT32);
            }
        }
        long end = first_position + row / group_size + 1 - first_key;  // of the keys it sees
        for (long i = most(end, 0); i < columns; i++) scores[i] = -INFINITY;
        if (a->window)
            for (long i = 0; i < least(end - a->window, columns); i++) scores[i] = -INFINITY;
        vec greatest = load_whole(scores, 0, FLOAT32);
        for (long i = LANES; i < columns; i += LANES)
            greatest = larger_of(greatest, load_whole(scores, i, FLOAT32));
        float before = s->best[row], now = fmaxf(before, largest(greatest) * scale);
        float origin = now == -INFINITY ? 0 : now;  // it has seen none as yet
        vec total = {0};
        for (long i = 0; i < columns; i += LANES) {
            vec weight = exp2_of(load_whole(scores, i, FLOAT32) * scale - origin);
            store_whole(scores, i, weight, in_pairs ? BFLOAT16 : FLOAT32);
            total += weight;
        }
        float shrunk = exp2f(before - origin);
        s->best[row] = now;
        s->mass[row] = s->mass[row] * shrunk + sum(total);
        if (shrunk != 1)
            for (long i = 0; i < width; i += LANES)
                store_whole(s->out, row * width + i,
                            load_whole(s->out, row * width + i, FLOAT32) * shrunk, FLOAT32);
    }
}

// Attends for queries [begin, end) of a sequence, in the heads of one KV head.
INLINE void attend_part(const struct attention *a, const struct scratch *s, long seq, long kv_head,
                        long begin, long end, enum dtype dtype, int in_pairs) {
    long group_size = a->num_heads / a->num_kv_heads, width = padded(a->head_dim);
    long first_token = a->cu_seqlens[seq], query_len = a->cu_seqlens[seq + 1] - first_token;
    long first_position = a->context_lens[seq] - query_len + begin;
    long rows = (end - begin) * group_size, num_units = a->head_dim >> in_pairs;
    for (long row = 0; row < rows; row++) {
        long head = kv_head * group_size + row % group_size;
        long from = (first_token + begin + row / group_size) * a->q_stride + head * a->head_dim;
        const char *q = (const char *)a->q + from * SIZE[a->q_dtype];
        for (long i = 0; i < num_units; i += LANES) {
            vec x = load(q, i, num_units - i, in_pairs ? FLOAT32 : a->q_dtype);
            store(s->q, row * num_units + i, num_units - i, x, FLOAT32);
        }
        // A sink is a score of its own, of no key.
        s->best[row] = a->sinks ? a->sinks[head] * LOG2_E : -INFINITY;
        s->mass[row] = a->sinks ? 1 : 0;
    }
    memset(s->out, 0, rows * width * sizeof(float));
    long num_seen = first_position + (end - begin);
    long start = a->window ? most(0, first_position + 1 - a->window) : 0;
    for (long key = start; key < num_seen; key += KEYS) {
        long last = least(key + KEYS, num_seen), columns = padded(last - key);
        gather_keys(a, s, seq, kv_head, key, last, num_seen, dtype, in_pairs);
        multiply(columns, rows, num_units, s->q, num_units, s->keys, KEYS, s->scores, KEYS, 0,
                 in_pairs);
        weigh(a, s, rows, columns, key, first_position, in_pairs);
        multiply(width, rows, columns >> in_pairs, s->scores, KEYS, s->values, width, s->out,
                 width, 1, in_pairs);
    }
    for (long row = 0; row < rows; row++) {
        long head = kv_head * group_size + row % group_size;
        long to = (first_token + begin + row / group_size) * a->out_stride + head * a->head_dim;
        float share = s->mass[row] > 0 ? 1.0f / s->mass[row] : 0;  // 0: it saw nothing
        for (long i = 0; i < a->head_dim; i += LANES) {
            vec attended = load_whole(s->out, row * width + i, FLOAT32) * share;
            store(a->out, to + i, a->head_dim - i, attended, a->out_dtype);
        }
    }
}

static void attend_part_of(const struct attention *a, const struct scratch *s, long seq,
                           long kv_head, long begin, long end) {
#define ATTEND_PART(dtype, in_pairs) \
    attend_part(a, s, seq, kv_head, begin, end, dtype, in_pairs); \
    return
    switch (a->cache_dtype) {
    case FLOAT32: ATTEND_PART(FLOAT32, 0);
    case FLOAT16: ATTEND_PART(FLOAT16, 0);
    case BFLOAT16:
#if defined(__AVX512BF16__)
        if (a->q_dtype == BFLOAT16 && a->head_dim % 2 == 0) { ATTEND_PART(BFLOAT16, 1); }
#endif
        ATTEND_PART(BFLOAT16, 0);
    }
}

INLINE float *take(char **memory, long count) {
    float *taken = (float *)*memory;
    *memory += (count * sizeof(float) + 63) / 64 * 64;
    return taken;
}

// Returns -1 when memory is short; some results are then missing.
int attend(const struct attention *a, long num_seqs, int num_threads) {
    long part_tokens = most(1, QUERY_ROWS * a->num_kv_heads / a->num_heads);
    long num_parts = 0, num_pairs = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        long query_len = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq];
        num_parts += (query_len + part_tokens - 1) / part_tokens;
        num_pairs += query_len * a->context_lens[seq];
    }
    int is_shared = num_pairs * a->num_heads * a->head_dim > LEAST_SHARED_PRODUCTS;
    struct part { long seq, begin, end; } *parts = malloc((num_parts + 1) * sizeof *parts);
    if (!parts) return -1;
    long index = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        long query_len = a->cu_seqlens[seq + 1] - a->cu_seqlens[seq];
        for (long begin = 0; begin < query_len; begin += part_tokens)
            parts[index++] = (struct part){seq, begin, least(begin + part_tokens, query_len)};
    }
    long rows = most(QUERY_ROWS, a->num_heads / a->num_kv_heads), width = padded(a->head_dim);
    long num_floats = rows * (a->head_dim + KEYS + width + 2) + KEYS * (a->head_dim + width);
    int failed = 0;
#pragma omp parallel num_threads(num_threads) if (is_shared) reduction(| : failed)
    {
        char *memory = aligned_alloc(64, (num_floats * sizeof(float) + 7 * 64 + 63) / 64 * 64);
        char *rest = memory;
        struct scratch s;
        if (memory) {
            s.q = take(&rest, rows * a->head_dim);
            s.keys = take(&rest, a->head_dim * KEYS);
            s.values = take(&rest, KEYS * width);
            s.scores = take(&rest, rows * KEYS);
            s.out = take(&rest, rows * width);
            s.best = take(&rest, rows);
            s.mass = take(&rest, rows);
        }
        // The last parts see the most keys: they go first, which evens out the threads' work.
#pragma omp for schedule(dynamic, 1)
        for (long item = num_parts * a->num_kv_heads - 1; item >= 0; item--) {
            struct part part = parts[item / a->num_kv_heads];
            if (memory)
                attend_part_of(a, &s, part.seq, item % a->num_kv_heads, part.begin, part.end);
            else
                failed = 1;
        }
        free(memory);
    }
    free(parts);
    return -failed;
}
