// Tokens times a panel of a weight matrix that is stored as codes; quantized.py documents it.

#pragma once

#include "panels.h"

struct quantized {
    const uint32_t *codes;       // [num_panels, in / codes of a word, PANEL]
    const void *scales, *zeros;  // [num_panels, num_groups, PANEL]; zeros may be NULL
    const float *table;          // [16] the numbers of 4-bit codes; NULL: the codes are float8
    long in, out, group_size;
    enum dtype scale_dtype;  // of zeros too
};

// sums [num_tokens, PANEL] = inputs from `first` to `end` of x [num_tokens, in] times a panel.
void multiply_quantized(const struct quantized *a, const float *x, float *sums, long num_tokens,
                        long x_stride, long panel, long first, long end);
