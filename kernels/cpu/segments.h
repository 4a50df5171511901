// Tokens times a panel of a weight matrix, summed in segments; segments.py documents it.

#pragma once

#include "quantized.h"

#define SEGMENT_LEVELS 4   // of the tree over at most 8 segments
#define SEGMENT_BLOCK 96   // tokens whose sums at all levels stay in the cache

// Segments [first, first + count) of the `num_all` into which `in` numbers are cut, at multiples of
// `unit`; `count` is a power of two.
struct segments {
    long in, num_all, first, count, unit;
};

// A matrix in panels: of numbers, or of codes where `codes` is there.
struct matrix {
    const float *numbers;
    const struct quantized *codes;
    long in;  // pairs where `in_pairs`
    int in_pairs;
};

// sums [num_tokens, PANEL] = inputs from `begin` to `end` of x times a panel; pairs are counted.
INLINE void multiply_inputs(const struct matrix *a, const float *x, float *sums, long num_tokens,
                            long x_stride, long panel, long begin, long end) {
    if (a->codes)
        multiply_quantized(a->codes, x, sums, num_tokens, x_stride, panel, begin, end);
    else
        multiply_panel(x + begin, a->numbers + (panel * a->in + begin) * PANEL, sums, num_tokens,
                       end - begin, x_stride, a->in_pairs);
}

// sums [num_tokens, PANEL] = x times a panel of the segments, which are added pairwise.
void multiply_segments(const struct matrix *a, const struct segments *cut, const float *x,
                       float *sums, long num_tokens, long x_stride, long panel);
