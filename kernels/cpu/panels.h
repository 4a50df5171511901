// Tokens times a panel of a weight matrix.

#pragma once

#include "tiles.h"

#define PANEL 64                        // rows of the matrix that stand side by side
#define BLOCK 192                       // tokens whose sums stay in the cache
#define LEAST_SHARED_WEIGHTS 65536      // as LEAST_SHARED

// sums [num_tokens, PANEL] = x [num_tokens, in] panel [in, PANEL]. In pairs, `in` counts these.
void multiply_panel(const float *x, const float *panel, float *sums, long num_tokens, long in,
                    long x_stride, int in_pairs);
