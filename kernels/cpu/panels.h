// Tokens times a panel of a weight matrix.

#pragma once

#include "tiles.h"

#define PANEL 64                        // rows of the matrix that stand side by side
#define LINES (4 * PANEL / LINE_BYTES)  // of a panel, for one input
#define BLOCK 192                       // tokens whose sums stay in the cache
#define FEW_TOKENS 48
#define CHUNK 64                        // inputs whose part of a panel stays in the cache
#define LEAST_SHARED_WEIGHTS 65536  // as LEAST_SHARED

// sums [num_tokens, PANEL] = x [num_tokens, in] panel [in, PANEL]. In pairs, `in` counts these.
// Few tokens are bound by memory, which is read once: the first group of tokens loads a chunk into
// the cache, and every group prefetches its share of the next chunk. Many tokens are bound by
// arithmetic and go without chunks.
INLINE void multiply_panel(const float *x, const float *panel, float *sums, long num_tokens,
                           long in, long x_stride, int in_pairs) {
    const long width = TILE_VECS * LANES;
    long num_groups = (num_tokens + TILE_ROWS - 1) / TILE_ROWS;
    long num_tiles = num_groups * (PANEL / width), share = (LINES + num_tiles - 1) / num_tiles;
    long chunk = num_tokens > FEW_TOKENS ? in : CHUNK;
    for (long first = 0; first < in; first += chunk) {
        long depth = least(chunk, in - first), num_asked = 0;
        const float *part = panel + first * PANEL;
        const char *next = (const char *)(part + depth * PANEL);
        for (long group = 0; group < num_groups; group++) {
            long token = num_tokens * group / num_groups;
            long rows = num_tokens * (group + 1) / num_groups - token;
            for (long column = 0; column < PANEL; column += width) {
                long num_ahead = least(share, LINES - num_asked);
                multiply_rows(rows, TILE_VECS, depth, x + token * x_stride + first, x_stride,
                              part + column, PANEL, sums + token * PANEL + column, PANEL,
                              first > 0, in_pairs, next + num_asked * depth * LINE_BYTES,
                              num_ahead);
                num_asked += num_ahead;
            }
        }
    }
}
