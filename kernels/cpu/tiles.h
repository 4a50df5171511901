// Products of small matrices, a tile of the result at a time in registers.

#pragma once

#include "vectors.h"

#include <stddef.h>

#define TILE_ROWS 6
#define TILE_VECS (LANES / 4)
#define LINE_BYTES 64

// sum + a b, with a in all lanes. `in_pairs`: a float stands for two of bfloat16, whose products
// are both added. Rounded once where the processor can, by name: left to the compiler, some tiles
// are and others are not (tuned for Zen, GCC leaves long chains of fused additions out), and a row
// would have other bits beside other rows.
INLINE vec multiplied(vec sum, const float *a, vec b, int in_pairs) {
#if defined(__AVX512BF16__)
    if (in_pairs) {
        int32_t pair;
        memcpy(&pair, a, sizeof pair);
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
    }
#endif
    (void)in_pairs;
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps(_mm512_set1_ps(*a), (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps(_mm256_set1_ps(*a), (__m256)b, (__m256)sum);
#else
    return sum + *a * b;
#endif
}

// c [rows, vecs * LANES] = a [rows, depth] b [depth, vecs * LANES], added to c where `adds`. For
// each k the next `num_ahead` cache lines, at most 4, from `ahead` on are prefetched.
INLINE void multiply_tile(long rows, long vecs, long depth, const float *a, long a_stride,
                          const float *b, long b_stride, float *c, long c_stride, int adds,
                          int in_pairs, const char *ahead, long num_ahead) {
    vec sums[TILE_ROWS][TILE_VECS];
    UNROLL for (long row = 0; row < rows; row++)
        UNROLL for (long i = 0; i < vecs; i++)
            sums[row][i] = adds ? load_whole(c, row * c_stride + i * LANES, FLOAT32) : all(0);
    for (long k = 0; k < depth; k++) {
        vec factors[TILE_VECS];
        UNROLL for (long i = 0; i < vecs; i++)
            factors[i] = load_whole(b, k * b_stride + i * LANES, FLOAT32);
        for (long i = 0; i < 4; i++)
            if (i < num_ahead) __builtin_prefetch(ahead + (k * num_ahead + i) * LINE_BYTES);
        UNROLL for (long row = 0; row < rows; row++)
            UNROLL for (long i = 0; i < vecs; i++)
                sums[row][i] =
                    multiplied(sums[row][i], a + row * a_stride + k, factors[i], in_pairs);
    }
    UNROLL for (long row = 0; row < rows; row++)
        UNROLL for (long i = 0; i < vecs; i++)
            store_whole(c, row * c_stride + i * LANES, sums[row][i], FLOAT32);
}

// The same for a variable number of rows, at most TILE_ROWS.
INLINE void multiply_rows(long rows, long vecs, long depth, const float *a, long a_stride,
                          const float *b, long b_stride, float *c, long c_stride, int adds,
                          int in_pairs, const char *ahead, long num_ahead) {
#define MULTIPLY_TILE(count)                                                                \
    case count:                                                                             \
        multiply_tile(count, vecs, depth, a, a_stride, b, b_stride, c, c_stride, adds,      \
                      in_pairs, ahead, num_ahead);                                          \
        break;
    switch (rows) {
        MULTIPLY_TILE(1)
        MULTIPLY_TILE(2)
        MULTIPLY_TILE(3)
        MULTIPLY_TILE(4)
        MULTIPLY_TILE(5)
        MULTIPLY_TILE(6)
    }
}

INLINE void multiply_columns(long vecs, long rows, long depth, const float *a, long a_stride,
                             const float *b, long b_stride, float *c, long c_stride, int adds,
                             int in_pairs) {
    for (long row = 0; row < rows; row += TILE_ROWS)
        multiply_rows(least(TILE_ROWS, rows - row), vecs, depth, a + row * a_stride, a_stride, b,
                      b_stride, c + row * c_stride, c_stride, adds, in_pairs, NULL, 0);
}

// The same over any number of rows, and of columns that is a multiple of LANES.
INLINE void multiply(long columns, long rows, long depth, const float *a, long a_stride,
                     const float *b, long b_stride, float *c, long c_stride, int adds,
                     int in_pairs) {
    long column = 0;
    for (; column + TILE_VECS * LANES <= columns; column += TILE_VECS * LANES)
        multiply_columns(TILE_VECS, rows, depth, a, a_stride, b + column, b_stride, c + column,
                         c_stride, adds, in_pairs);
    for (; column < columns; column += LANES)
        multiply_columns(1, rows, depth, a, a_stride, b + column, b_stride, c + column, c_stride,
                         adds, in_pairs);
}
