// Tokens times a weight matrix that is stored as codes. A number is expanded to float32 as the
// reference implementation does it, and sums run over inputs in their order: a token's result is
// that of the expanded matrix, in any batch.

#include "quantized.h"

#define FEW_ROWS 4    // whose sums leave registers for expanding
#define CHUNK 64      // inputs that are expanded at once for more
#define AHEAD 4096    // bytes

// Bit fields of a float8 (E4M3), moved to those of a float32, make its number times 2^-120.
#define FLOAT8_BITS 0x87f00000
#define FLOAT8_FACTOR 0x1p120f

enum kind { OF_FLOAT8, OF_TABLE, OF_TABLE_LESS_ZEROS };

// Some columns of a panel, and the table of their codes.
struct columns {
    const struct quantized *a;
    long panel, first;
    vec low, high;  // of the table; all of it in `low` where it fits
};

INLINE struct columns columns_of(const struct quantized *a, long panel, long first) {
    struct columns columns = {a, panel, first, {0}, {0}};
    if (a->table) {
        columns.low = load_whole(a->table, 0, FLOAT32);
        columns.high = load_whole(a->table, 16 - LANES, FLOAT32);
    }
    return columns;
}

INLINE long codes_of_word(enum kind kind) { return kind == OF_FLOAT8 ? 4 : 8; }

// The number, without zero and scale, of the code at a place of each word.
INLINE vec number_of(const struct columns *c, uvec words, long place, enum kind kind) {
    if (kind == OF_FLOAT8)
        return (vec)(((ivec)(words << (uint32_t)(24 - 8 * place)) >> 4) & (int32_t)FLOAT8_BITS);
    uvec index = words >> (uint32_t)(4 * place);
#if defined(__AVX512F__)
    return (vec)_mm512_permutexvar_ps((__m512i)index, (__m512)c->low);
#else
    return __builtin_shuffle(c->low, c->high, (ivec)index);
#endif
}

// Adds x [rows, inputs from `first` to `end`] times the columns to sums [rows, PANEL]; without
// rows, writes the expanded numbers [end - first, PANEL] to `sums`.
INLINE void multiply_codes(const struct columns *c, long rows, long first, long end,
                           const float *x, long x_stride, float *sums, enum kind kind) {
    const struct quantized *a = c->a;
    const long per_word = codes_of_word(kind);
    long num_groups = (a->in + a->group_size - 1) / a->group_size;
    vec totals[FEW_ROWS][TILE_VECS] = {{{0}}};
    for (long k = first; k < end;) {
        long group = k / a->group_size, last = least(end, (group + 1) * a->group_size);
        long scales = (c->panel * num_groups + group) * PANEL + c->first;
        vec scale[TILE_VECS], zero[TILE_VECS];
        UNROLL for (long i = 0; i < TILE_VECS; i++) {
            scale[i] = load_whole(a->scales, scales + i * LANES, a->scale_dtype);
            if (kind == OF_FLOAT8) scale[i] *= FLOAT8_FACTOR;
            if (kind == OF_TABLE_LESS_ZEROS)
                zero[i] = load_whole(a->zeros, scales + i * LANES, a->scale_dtype);
        }
        for (; k < last; k += per_word) {
            const uint32_t *codes =
                a->codes + (c->panel * (a->in / per_word) + k / per_word) * PANEL + c->first;
            uvec words[TILE_VECS];
            UNROLL for (long i = 0; i < TILE_VECS; i++) {
                memcpy(words + i, codes + i * LANES, sizeof words[i]);
                __builtin_prefetch((const char *)(codes + i * LANES) + AHEAD);
            }
            UNROLL for (long place = 0; place < per_word; place++)
                UNROLL for (long i = 0; i < TILE_VECS; i++) {
                    vec number = number_of(c, words[i], place, kind);
                    if (kind == OF_TABLE_LESS_ZEROS) number -= zero[i];
                    number *= scale[i];
                    if (!rows)
                        store_whole(sums, (k + place - first) * PANEL + c->first + i * LANES,
                                    number, FLOAT32);
                    UNROLL for (long row = 0; row < rows; row++)
                        totals[row][i] += x[row * x_stride + k + place] * number;
                }
        }
    }
    UNROLL for (long row = 0; row < rows; row++)
        UNROLL for (long i = 0; i < TILE_VECS; i++)
            store_whole(sums, row * PANEL + c->first + i * LANES, totals[row][i], FLOAT32);
}

// Few tokens: codes are expanded in registers and used there.
INLINE void multiply_few(const struct quantized *a, const float *x, float *sums, long num_tokens,
                         long x_stride, long panel, long first, long end, enum kind kind) {
#define MULTIPLY_CODES(count)                                                      \
    case count:                                                                    \
        multiply_codes(&columns, count, first, end, x, x_stride, sums, kind);      \
        break;
    for (long column = 0; column < PANEL; column += TILE_VECS * LANES) {
        struct columns columns = columns_of(a, panel, column);
        switch (num_tokens) {
            MULTIPLY_CODES(1)
            MULTIPLY_CODES(2)
            MULTIPLY_CODES(3)
            MULTIPLY_CODES(4)
        }
    }
}

// More tokens: a chunk of the panel is expanded into the cache, for all of them.
INLINE void multiply_many(const struct quantized *a, const float *x, float *sums, long num_tokens,
                          long x_stride, long panel, long begin, long end, enum kind kind) {
    const long width = TILE_VECS * LANES;
    float numbers[CHUNK * PANEL];
    for (long first = begin; first < end; first += CHUNK) {
        long last = least(end, first + CHUNK);
        for (long column = 0; column < PANEL; column += width) {
            struct columns columns = columns_of(a, panel, column);
            multiply_codes(&columns, 0, first, last, NULL, 0, numbers, kind);
        }
        for (long token = 0; token < num_tokens; token += TILE_ROWS)
            for (long column = 0; column < PANEL; column += width)
                multiply_rows(least(TILE_ROWS, num_tokens - token), TILE_VECS, last - first,
                              x + token * x_stride + first, x_stride, numbers + column, PANEL,
                              sums + token * PANEL + column, PANEL, first > begin, 0, NULL, 0);
    }
}

void multiply_quantized(const struct quantized *a, const float *x, float *sums, long num_tokens,
                        long x_stride, long panel, long first, long end) {
#define MULTIPLY(kind)                                                        \
    if (num_tokens <= FEW_ROWS)                                               \
        multiply_few(a, x, sums, num_tokens, x_stride, panel, first, end, kind); \
    else                                                                      \
        multiply_many(a, x, sums, num_tokens, x_stride, panel, first, end, kind);
    if (!a->table) {
        MULTIPLY(OF_FLOAT8)
    } else if (!a->zeros) {
        MULTIPLY(OF_TABLE)
    } else {
        MULTIPLY(OF_TABLE_LESS_ZEROS)
    }
}

void quantized_linear(const struct quantized *a, const float *x, void *out, long num_tokens,
                      long x_stride, int dtype, int num_threads) {
    long num_panels = (a->out + PANEL - 1) / PANEL;
    long num_blocks = (num_tokens + BLOCK - 1) / BLOCK;
    // A piece of work is a block of tokens and a panel; all blocks of a panel follow one another.
#pragma omp parallel for num_threads(num_threads) if (a->in * a->out > LEAST_SHARED_WEIGHTS)
    for (long piece = 0; piece < num_panels * num_blocks; piece++) {
        long panel = piece / num_blocks, block = piece % num_blocks;
        long first = num_tokens * block / num_blocks;
        long count = num_tokens * (block + 1) / num_blocks - first;
        long width = least(PANEL, a->out - panel * PANEL);
        float sums[BLOCK * PANEL];
        multiply_quantized(a, x + first * x_stride, sums, count, x_stride, panel, 0, a->in);
        for (long token = 0; token < count; token++)
            for (long i = 0; i < width; i += LANES)
                store(out, (first + token) * a->out + panel * PANEL + i, width - i,
                      load_whole(sums, token * PANEL + i, FLOAT32), dtype);
    }
}
