// The kernels of a step on a CPU; launch.py says what each takes. Vectors are GCC's, and so are the
// same on every processor: what it has decides how many of its registers one of them takes.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE_ROWS 6
#define TILE_VECS 4
// Of a vector's indices, and for each power of two below LANES.
#define EACH_LANE(of, step) {of(0, step), of(1, step), of(2, step), of(3, step), of(4, step), \
    of(5, step), of(6, step), of(7, step), of(8, step), of(9, step), of(10, step), of(11, step), \
    of(12, step), of(13, step), of(14, step), of(15, step)}
#define EACH_STEP(run) run(8) run(4) run(2) run(1)
#else
#define LANES 8
#define TILE_ROWS 6
#define TILE_VECS 2
#define EACH_LANE(of, step) {of(0, step), of(1, step), of(2, step), of(3, step), of(4, step), \
    of(5, step), of(6, step), of(7, step)}
#define EACH_STEP(run) run(4) run(2) run(1)
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_bits __attribute__((vector_size(2 * LANES)));
typedef _Float16 half_vec __attribute__((vector_size(2 * LANES)));

enum dtype { FLOAT32, FLOAT16, BFLOAT16 };

static const long SIZE[] = {4, 2, 2};
static const float LOG2_E = 1.44269504088896341f;

// Below this many numbers, or products, a second thread costs more than it saves: it waits for what
// comes next without sleeping, on a core that others could use.
#define LEAST_SHARED 16384
#define LEAST_SHARED_PRODUCTS 262144

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec choose(ivec condition, vec yes, vec no) {
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

INLINE half_bits bfloat16_of(vec x) {
#if defined(__AVX512BF16__)
    return (half_bits)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec nearest = bits + 0x7fff + ((bits >> 16) & 1);
    bits = (uvec)choose(x == x, (vec)nearest, (vec)(bits | 0x400000));
    return __builtin_convertvector(bits >> 16, half_bits);
#endif
}

INLINE vec widened(half_bits x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE vec load_whole(const void *from, long index, enum dtype dtype) {
    const char *source = (const char *)from + index * SIZE[dtype];
    if (dtype == FLOAT32) {
        vec x;
        memcpy(&x, source, sizeof x);
        return x;
    }
    if (dtype == FLOAT16) {
        half_vec x;
        memcpy(&x, source, sizeof x);
        return __builtin_convertvector(x, vec);
    }
    half_bits x;
    memcpy(&x, source, sizeof x);
    return widened(x);
}

INLINE void store_whole(void *to, long index, vec x, enum dtype dtype) {
    char *target = (char *)to + index * SIZE[dtype];
    if (dtype == FLOAT32) {
        memcpy(target, &x, sizeof x);
    } else if (dtype == FLOAT16) {
        half_vec half = __builtin_convertvector(x, half_vec);
        memcpy(target, &half, sizeof half);
    } else {
        half_bits half = bfloat16_of(x);
        memcpy(target, &half, sizeof half);
    }
}

// The numbers [index, index + count) of an array, the lanes after them 0.
INLINE vec load(const void *from, long index, long count, enum dtype dtype) {
    if (count >= LANES) return load_whole(from, index, dtype);
    float part[LANES] = {0};  // wide enough for any dtype
    memcpy(part, (const char *)from + index * SIZE[dtype], count * SIZE[dtype]);
    return load_whole(part, 0, dtype);
}

INLINE void store(void *to, long index, long count, vec x, enum dtype dtype) {
    if (count >= LANES) {
        store_whole(to, index, x, dtype);
        return;
    }
    float part[LANES];
    store_whole(part, 0, x, dtype);
    memcpy((char *)to + index * SIZE[dtype], part, count * SIZE[dtype]);
}

INLINE vec rounded(vec x, enum dtype dtype) {
    if (dtype == FLOAT32) return x;
    if (dtype == BFLOAT16) return widened(bfloat16_of(x));
    return __builtin_convertvector(__builtin_convertvector(x, half_vec), vec);
}

// The larger and the smaller of two; y where one is not a number.
INLINE vec larger_of(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return choose(x > y, x, y);
#endif
}

INLINE vec smaller_of(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)x, (__m512)y);
#else
    return choose(x < y, x, y);
#endif
}

#define OTHER(lane, step) ((lane) ^ (step))
#define OTHER_HALF(x, step) __builtin_shuffle(x, (ivec)EACH_LANE(OTHER, step))

INLINE float sum(vec x) {
#define ADD(step) x += OTHER_HALF(x, step);
    EACH_STEP(ADD)
    return x[0];
}

INLINE float largest(vec x) {
#define COMPARE(step) x = larger_of(OTHER_HALF(x, step), x);
    EACH_STEP(COMPARE)
    return x[0];
}

// 2^x, within 2 units of the last place for x in (-126, 128), and 0 up to -127. A NaN stays one.
INLINE vec exp2_of(vec x) {
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vec within = larger_of(all(-127), smaller_of(all(127.999f), x));
    vec shifted = within + magic;
    vec f = within - (shifted - magic);
    vec p = all(1.32187e-3f);  // least squares over [-0.5, 0.5], within 1.1e-7 of 2^f
    p = p * f + 9.6717e-3f;
    p = p * f + 5.550893e-2f;
    p = p * f + 2.4022238e-1f;
    p = p * f + 6.9314686e-1f;
    p = p * f + 1.0f;
    // At -127 the exponent becomes 0, and with it the number.
    return (vec)((ivec)p + (((ivec)shifted - (ivec)magic) << 23));
}

INLINE float inverse_rms(vec squares, long size, float eps) {
    return 1.0f / sqrtf(sum(squares) / size + eps);
}

void rms_norm(const void *x, void *residual, const void *weight, void *out, long num_tokens,
              long hidden_size, long x_stride, long residual_stride, long out_stride, float eps,
              int x_dtype, int residual_dtype, int weight_dtype, int out_dtype, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * hidden_size > LEAST_SHARED)
    for (long token = 0; token < num_tokens; token++) {
        // What is normed: the sum as it is kept, where there is a residual.
        const void *values = residual ? residual : x;
        int dtype = residual ? residual_dtype : x_dtype;
        long first = token * (residual ? residual_stride : x_stride);
        vec squares = {0};
        for (long i = 0; i < hidden_size; i += LANES) {
            long count = hidden_size - i;
            vec value = load(x, token * x_stride + i, count, x_dtype);
            if (residual) {
                value = rounded(value + load(residual, first + i, count, dtype), dtype);
                store(residual, first + i, count, value, dtype);
            }
            squares += value * value;
        }
        float scale = inverse_rms(squares, hidden_size, eps);
        for (long i = 0; i < hidden_size; i += LANES) {
            long count = hidden_size - i;
            vec value = load(values, first + i, count, dtype) * scale;
            value *= load(weight, i, count, weight_dtype);
            store(out, token * out_stride + i, count, value, out_dtype);
        }
    }
}

void silu_mul(const void *gate_up, void *out, long num_tokens, long size, long gate_up_stride,
              long out_stride, int dtype, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > LEAST_SHARED)
    for (long token = 0; token < num_tokens; token++) {
        long first = token * gate_up_stride;
        for (long i = 0; i < size; i += LANES) {
            long count = size - i;
            vec gate = load(gate_up, first + i, count, dtype);
            vec up = load(gate_up, first + size + i, count, dtype);
            vec opened = rounded(gate / (1.0f + exp2_of(gate * -LOG2_E)), dtype);
            store(out, token * out_stride + i, count, opened * up, dtype);
        }
    }
}

struct storing {
    const void *qkv, *qk_norm, *rope_table;
    const int64_t *positions, *slots;
    void *kv_cache, *q_out;
    long qkv_stride, q_stride, block_stride;
    long num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    enum dtype qkv_dtype, table_dtype, cache_dtype;
};

// One head's query or key, normed if there is a norm, to a row that stands there twice.
INLINE void norm_head(const struct storing *a, const void *x, long head, float *row) {
    vec squares = {0};
    for (long i = 0; i < a->head_dim; i += LANES) {
        vec value = load(x, i, a->head_dim - i, a->qkv_dtype);
        squares += value * value;
    }
    float scale = inverse_rms(squares, a->head_dim, a->eps);
    for (long i = 0; i < a->head_dim; i += LANES) {
        long count = a->head_dim - i;
        vec value = load(x, i, count, a->qkv_dtype);
        if (a->qk_norm)
            value = value * scale * load(a->qk_norm, head * a->head_dim + i, count, a->qkv_dtype);
        store(row, i, count, value, FLOAT32);
        store(row, a->head_dim + i, count, value, FLOAT32);
    }
}

void store_qkv(const struct storing *a, long num_tokens, int num_threads) {
    long num_rotated = a->num_heads + a->num_kv_heads, num_all = num_rotated + a->num_kv_heads;
    long head_dim = a->head_dim, record = a->block_size * head_dim;
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_all * head_dim > LEAST_SHARED)
    for (long token = 0; token < num_tokens; token++) {
        float row[2 * head_dim + LANES];
        const char *x = (const char *)a->qkv + token * a->qkv_stride * SIZE[a->qkv_dtype];
        long turn = a->positions[token] * 2 * head_dim, slot = a->slots[token];
        // A block holds [2, num_kv_heads] records: keys, then values.
        long kept = slot / a->block_size * a->block_stride + slot % a->block_size * head_dim;
        for (long head = 0; head < num_rotated; head++) {
            int is_key = head >= a->num_heads;
            if (is_key && slot < 0) break;
            norm_head(a, x + head * head_dim * SIZE[a->qkv_dtype], head, row);
            for (long i = 0; i < head_dim; i += LANES) {
                long count = head_dim - i;
                vec turned = load(row, i, count, FLOAT32) *
                             load(a->rope_table, turn + i, count, a->table_dtype);
                turned += load(row, i + head_dim / 2, count, FLOAT32) *
                          load(a->rope_table, turn + head_dim + i, count, a->table_dtype);
                if (is_key)
                    store(a->kv_cache, kept + (head - a->num_heads) * record + i, count, turned,
                          a->cache_dtype);
                else
                    store(a->q_out, token * a->q_stride + head * head_dim + i, count, turned,
                          a->qkv_dtype);
            }
        }
        if (slot < 0) continue;
        for (long head = num_rotated; head < num_all; head++)
            for (long i = 0; i < head_dim; i += LANES)
                store(a->kv_cache, kept + (head - a->num_heads) * record + i, head_dim - i,
                      load(x, head * head_dim + i, head_dim - i, a->qkv_dtype), a->cache_dtype);
    }
}

// c [rows, vecs * LANES] = a [rows, depth] b [depth, vecs * LANES], added to c where `adds`.
INLINE void multiply_tile(long rows, long vecs, long depth, const float *a, long a_stride,
                          const float *b, long b_stride, float *c, long c_stride, int adds) {
    vec sums[TILE_ROWS][TILE_VECS];
    UNROLL for (long row = 0; row < rows; row++)
        UNROLL for (long i = 0; i < vecs; i++)
            sums[row][i] = adds ? load_whole(c, row * c_stride + i * LANES, FLOAT32) : all(0);
    for (long k = 0; k < depth; k++) {
        vec factors[TILE_VECS];
        UNROLL for (long i = 0; i < vecs; i++)
            factors[i] = load_whole(b, k * b_stride + i * LANES, FLOAT32);
        UNROLL for (long row = 0; row < rows; row++)
            UNROLL for (long i = 0; i < vecs; i++)
                sums[row][i] += a[row * a_stride + k] * factors[i];
    }
    UNROLL for (long row = 0; row < rows; row++)
        UNROLL for (long i = 0; i < vecs; i++)
            store_whole(c, row * c_stride + i * LANES, sums[row][i], FLOAT32);
}

INLINE void multiply_columns(long vecs, long rows, long depth, const float *a, long a_stride,
                             const float *b, long b_stride, float *c, long c_stride, int adds) {
    long row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        multiply_tile(TILE_ROWS, vecs, depth, a + row * a_stride, a_stride, b, b_stride,
                      c + row * c_stride, c_stride, adds);
    a += row * a_stride;
    c += row * c_stride;
    switch (rows - row) {
    case 1: multiply_tile(1, vecs, depth, a, a_stride, b, b_stride, c, c_stride, adds); break;
    case 2: multiply_tile(2, vecs, depth, a, a_stride, b, b_stride, c, c_stride, adds); break;
    case 3: multiply_tile(3, vecs, depth, a, a_stride, b, b_stride, c, c_stride, adds); break;
    case 4: multiply_tile(4, vecs, depth, a, a_stride, b, b_stride, c, c_stride, adds); break;
    case 5: multiply_tile(5, vecs, depth, a, a_stride, b, b_stride, c, c_stride, adds); break;
    }
}

// The same over any number of columns that is a multiple of LANES.
static void multiply(long columns, long rows, long depth, const float *a, long a_stride,
                     const float *b, long b_stride, float *c, long c_stride, int adds) {
    long column = 0;
    for (; column + TILE_VECS * LANES <= columns; column += TILE_VECS * LANES)
        multiply_columns(TILE_VECS, rows, depth, a, a_stride, b + column, b_stride, c + column,
                         c_stride, adds);
    for (; column < columns; column += LANES)
        multiply_columns(1, rows, depth, a, a_stride, b + column, b_stride, c + column, c_stride,
                         adds);
}

// Lane l of rows[i] becomes lane i of rows[l]: in each round pairs of rows swap half their lanes.
INLINE void transpose(vec rows[LANES]) {
#define FROM_LOW(lane, step) ((lane) & (step) ? LANES + (lane) - (step) : (lane))
#define FROM_HIGH(lane, step) ((lane) & (step) ? LANES + (lane) : (lane) + (step))
#define SWAP(step)                                                                      \
    UNROLL for (int i = 0; i < LANES; i++) {                                            \
        if (i & (step)) continue;                                                       \
        vec low = rows[i], high = rows[i + (step)];                                     \
        rows[i] = __builtin_shuffle(low, high, (ivec)EACH_LANE(FROM_LOW, step));        \
        rows[i + (step)] = __builtin_shuffle(low, high, (ivec)EACH_LANE(FROM_HIGH, step)); \
    }
    EACH_STEP(SWAP)
}

#define KEYS 128        // keys of one tile
#define AHEAD 32       // keys between the one that is read and the one that is asked for
#define QUERY_ROWS 192  // rows of one tile, a row being one head of one query

struct attention {
    const void *q, *kv_cache;
    void *out;
    const int64_t *block_tables, *cu_seqlens, *context_lens;
    long q_stride, out_stride, table_stride, block_stride;
    long num_heads, num_kv_heads, head_dim, block_size, window;
    float scale, soft_cap;
    enum dtype q_dtype, cache_dtype, out_dtype;
};

struct scratch {
    float *q;       // [QUERY_ROWS, head_dim]
    float *keys;    // [head_dim, KEYS]
    float *values;  // [KEYS, padded head_dim]
    float *scores;  // [QUERY_ROWS, KEYS]
    float *out;     // [QUERY_ROWS, padded head_dim]
    float *best, *mass;  // [QUERY_ROWS] the largest score so far, and the sum of the weights
};

INLINE long padded(long size) { return (size + LANES - 1) / LANES * LANES; }

// A key of one KV head on its way through the blocks of a sequence.
struct cursor {
    const int64_t *block;
    long offset;  // in the block
};

INLINE struct cursor cursor_at(const struct attention *a, long seq, long key) {
    const int64_t *table = a->block_tables + seq * a->table_stride;
    return (struct cursor){table + key / a->block_size, key % a->block_size};
}

// Where it begins; the cursor goes on to the next one.
INLINE const char *step(const struct attention *a, struct cursor *at, long kv_head, long size) {
    long first = *at->block * a->block_stride;
    first += (kv_head * a->block_size + at->offset) * a->head_dim;
    if (++at->offset == a->block_size) {
        at->offset = 0;
        at->block++;
    }
    return (const char *)a->kv_cache + first * size;
}

// Keys (transposed) and values [first, last) of one KV head, widened; 0 up to a multiple of LANES.
// What comes next, up to `end`, is asked for: the pool is larger than caches, its blocks scattered.
INLINE void gather_keys(const struct attention *a, const struct scratch *s, long seq, long kv_head,
                        long first, long last, long end, enum dtype dtype) {
    long to_values = a->num_kv_heads * a->block_size * a->head_dim, width = padded(a->head_dim);
    struct cursor at = cursor_at(a, seq, first), next = cursor_at(a, seq, first + AHEAD);
    for (long group = 0; group < last - first; group += LANES) {
        long num_keys = least(LANES, last - first - group);
        const char *keys[LANES], *wanted[LANES];
        for (long lane = 0; lane < LANES; lane++) {
            keys[lane] = lane < num_keys ? step(a, &at, kv_head, SIZE[dtype]) : keys[0];
            int is_there = first + AHEAD + group + lane < end;
            wanted[lane] = is_there ? step(a, &next, kv_head, SIZE[dtype]) : keys[0];
        }
        for (long i = 0; i < a->head_dim; i += LANES) {
            // One line at a time: of many at once the processor forgets most.
            long count = least(LANES, a->head_dim - i), byte = i * SIZE[dtype];
            vec lanes[LANES];
            UNROLL for (long lane = 0; lane < LANES; lane++) {
                __builtin_prefetch(wanted[lane] + byte, 0, 2);
                lanes[lane] = load(keys[lane], i, count, dtype);
            }
            transpose(lanes);
            for (long k = 0; k < count; k++)
                store_whole(s->keys, (i + k) * KEYS + group, lanes[k], FLOAT32);
            for (long lane = 0; lane < LANES; lane++) {
                __builtin_prefetch(wanted[lane] + to_values * SIZE[dtype] + byte, 0, 2);
                vec value = all(0);
                if (lane < num_keys) value = load(keys[lane], to_values + i, count, dtype);
                store_whole(s->values, (group + lane) * width + i, value, FLOAT32);
            }
        }
    }
}

// Scores [rows, columns] become weights; what was summed before shrinks to the new largest score.
INLINE void weigh(const struct attention *a, const struct scratch *s, long rows, long columns,
                  long first_key, long first_position) {
    long group_size = a->num_heads / a->num_kv_heads, width = padded(a->head_dim);
    for (long row = 0; row < rows; row++) {
        float *scores = s->scores + row * KEYS;
        if (a->soft_cap != 0) {
            for (long i = 0; i < columns; i += LANES) {
                vec grown = exp2_of(load_whole(scores, i, FLOAT32) * (2 * LOG2_E));
                vec capped = (1.0f - 2.0f / (grown + 1.0f)) * (a->soft_cap * LOG2_E);
                store_whole(scores, i, capped, FLOAT32);
            }
        }
        long end = first_position + row / group_size + 1 - first_key;  // of the keys it sees
        for (long i = most(end, 0); i < columns; i++) scores[i] = -INFINITY;
        if (a->window)
            for (long i = 0; i < least(end - a->window, columns); i++) scores[i] = -INFINITY;
        vec greatest = load_whole(scores, 0, FLOAT32);
        for (long i = LANES; i < columns; i += LANES) {
            greatest = larger_of(greatest, load_whole(scores, i, FLOAT32));
        }
        float before = s->best[row], now = fmaxf(before, largest(greatest));
        float origin = now == -INFINITY ? 0 : now;  // it has seen none as yet
        vec total = {0};
        for (long i = 0; i < columns; i += LANES) {
            vec weight = exp2_of(load_whole(scores, i, FLOAT32) - origin);
            store_whole(scores, i, weight, FLOAT32);
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

// The queries [begin, end) of a sequence, in the heads of one KV head.
INLINE void attend_part(const struct attention *a, const struct scratch *s, long seq, long kv_head,
                        long begin, long end) {
    long group_size = a->num_heads / a->num_kv_heads, width = padded(a->head_dim);
    long first_token = a->cu_seqlens[seq], query_len = a->cu_seqlens[seq + 1] - first_token;
    long first_position = a->context_lens[seq] - query_len + begin;
    long rows = (end - begin) * group_size;
    float scale = a->soft_cap != 0 ? a->scale / a->soft_cap : a->scale * LOG2_E;
    for (long row = 0; row < rows; row++) {
        long head = kv_head * group_size + row % group_size;
        long from = (first_token + begin + row / group_size) * a->q_stride + head * a->head_dim;
        for (long i = 0; i < a->head_dim; i += LANES) {
            long count = a->head_dim - i;
            vec scaled = load(a->q, from + i, count, a->q_dtype) * scale;
            store(s->q, row * a->head_dim + i, count, scaled, FLOAT32);
        }
        s->best[row] = -INFINITY;
        s->mass[row] = 0;
    }
    memset(s->out, 0, rows * width * sizeof(float));
    long num_seen = first_position + (end - begin);
    long start = a->window ? most(0, first_position + 1 - a->window) : 0;
    for (long key = start; key < num_seen; key += KEYS) {
        long last = least(key + KEYS, num_seen), columns = padded(last - key);
        if (a->cache_dtype == FLOAT32) gather_keys(a, s, seq, kv_head, key, last, num_seen, FLOAT32);
        else if (a->cache_dtype == FLOAT16) gather_keys(a, s, seq, kv_head, key, last, num_seen, FLOAT16);
        else gather_keys(a, s, seq, kv_head, key, last, num_seen, BFLOAT16);
        multiply(columns, rows, a->head_dim, s->q, a->head_dim, s->keys, KEYS, s->scores, KEYS, 0);
        weigh(a, s, rows, columns, key, first_position);
        multiply(width, rows, columns, s->scores, KEYS, s->values, width, s->out, width, 1);
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

INLINE float *take(char **memory, long count) {
    float *taken = (float *)*memory;
    *memory += (count * sizeof(float) + 63) / 64 * 64;
    return taken;
}

// Returns -1 when there is no memory, and then some queries have not been attended for.
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
        // The last parts see the most keys: they go first, and what remains evens out.
#pragma omp for schedule(dynamic, 1)
        for (long item = num_parts * a->num_kv_heads - 1; item >= 0; item--) {
            struct part part = parts[item / a->num_kv_heads];
            if (memory) attend_part(a, &s, part.seq, item % a->num_kv_heads, part.begin, part.end);
            else failed = 1;
        }
        free(memory);
    }
    free(parts);
    return -failed;
}
