// Tokens times a weight matrix; launch.py documents the arguments.

#include "panels.h"

#define LINES (4 * PANEL / LINE_BYTES)  // of a panel, for one input
#define FEW_TOKENS 48
#define CHUNK 64                        // inputs whose part of a panel stays in the cache

// Few tokens are bound by memory, which is read once: the first group of tokens loads a chunk into
// the cache, and every group prefetches its share of the next chunk. Many tokens are bound by
// arithmetic and go without chunks.
INLINE void multiply_chunks(const float *x, const float *panel, float *sums, long num_tokens,
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

void multiply_panel(const float *x, const float *panel, float *sums, long num_tokens, long in,
                    long x_stride, int in_pairs) {
    // Two calls, so that `in_pairs` is a constant in each.
    if (in_pairs)
        multiply_chunks(x, panel, sums, num_tokens, in, x_stride, 1);
    else
        multiply_chunks(x, panel, sums, num_tokens, in, x_stride, 0);
}

// out [num_tokens, count] = x times one panel.
static void multiply_columns_of(const float *x, const float *panel, void *out, long num_tokens,
                                long in, long count, long x_stride, long out_stride,
                                int in_pairs) {
    float sums[BLOCK * PANEL];
    multiply_panel(x, panel, sums, num_tokens, in, x_stride, in_pairs);
    for (long token = 0; token < num_tokens; token++)
        for (long i = 0; i < count; i += LANES)
            store(out, token * out_stride + i, count - i,
                  load_whole(sums, token * PANEL + i, FLOAT32), in_pairs ? BFLOAT16 : FLOAT32);
}

void linear(const char *x, const float *panels, char *out, long num_tokens, long in, long out_size,
            long x_stride, long out_stride, int dtype, int num_threads) {
    int in_pairs = dtype == BFLOAT16;
    long num_panels = (out_size + PANEL - 1) / PANEL;
    long num_blocks = (num_tokens + BLOCK - 1) / BLOCK;
    long size = SIZE[dtype], panel_size = (in >> in_pairs) * PANEL;
    // A piece of work is a block of tokens and a panel; all blocks of a panel follow one another.
#pragma omp parallel for num_threads(num_threads) if (in * out_size > LEAST_SHARED_WEIGHTS)
    for (long piece = 0; piece < num_panels * num_blocks; piece++) {
        long panel = piece / num_blocks, block = piece % num_blocks;
        long first = num_tokens * block / num_blocks;
        long count = num_tokens * (block + 1) / num_blocks - first;
        const float *from = (const float *)(x + first * x_stride * size);
        void *to = out + (first * out_stride + panel * PANEL) * size;
        long width = least(PANEL, out_size - panel * PANEL);
        multiply_columns_of(from, panels + panel * panel_size, to, count, in >> in_pairs, width,
                            x_stride >> in_pairs, out_stride, in_pairs);
    }
}

// Returns 1 when `linear` takes bfloat16.
int multiplies_bfloat16(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}
