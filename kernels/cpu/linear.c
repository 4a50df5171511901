// Tokens times a weight matrix; launch.py documents the arguments.

#include "panels.h"

// out [num_tokens, count] = x times one panel.
INLINE void multiply_columns_of(const float *x, const float *panel, void *out, long num_tokens,
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
        // Two calls, so that `in_pairs` is a constant in each.
        if (in_pairs)
            multiply_columns_of(from, panels + panel * panel_size, to, count, in / 2, width,
                                x_stride / 2, out_stride, 1);
        else
            multiply_columns_of(from, panels + panel * panel_size, to, count, in, width, x_stride,
                                out_stride, 0);
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
