// Tokens times a weight matrix, summed in segments; segments.py documents the arguments.

#include "segments.h"

INLINE long segment_start(const struct segments *cut, long segment) {
    return segment == cut->num_all ? cut->in
                                   : cut->in / cut->unit * segment / cut->num_all * cut->unit;
}

// `multiply_segments` of at most SEGMENT_BLOCK tokens. Each level of the tree needs one place for sums, since
// segments come in order.
INLINE void multiply_block(const struct matrix *a, const struct segments *cut, const float *x,
                           float *sums, long num_tokens, long x_stride, long panel) {
    float higher[SEGMENT_LEVELS - 1][SEGMENT_BLOCK * PANEL];
    float *levels[SEGMENT_LEVELS] = {sums, higher[0], higher[1], higher[2]};
    long depth = 0, origin = segment_start(cut, cut->first);
    for (long i = 0; i < cut->count; i++) {
        long begin = segment_start(cut, cut->first + i) - origin;
        long end = segment_start(cut, cut->first + i + 1) - origin;
        multiply_inputs(a, x, levels[depth++], num_tokens, x_stride, panel, begin >> a->in_pairs,
                        end >> a->in_pairs);
        for (long done = i + 1; done % 2 == 0; done /= 2) {
            depth--;
            for (long at = 0; at < num_tokens * PANEL; at += LANES)
                store_whole(levels[depth - 1], at,
                            load_whole(levels[depth - 1], at, FLOAT32) +
                                load_whole(levels[depth], at, FLOAT32),
                            FLOAT32);
        }
    }
}

void multiply_segments(const struct matrix *a, const struct segments *cut, const float *x,
                       float *sums, long num_tokens, long x_stride, long panel) {
    for (long token = 0; token < num_tokens; token += SEGMENT_BLOCK)
        multiply_block(a, cut, x + token * x_stride, sums + token * PANEL,
                       least(SEGMENT_BLOCK, num_tokens - token), x_stride, panel);
}

// As `linear`, over the segments of x and of the panels, whose inputs are these segments' alone.
void linear_in_segments(const struct matrix *a, const struct segments *cut, const char *x,
                        char *out, long num_tokens, long out_size, long x_stride, int out_dtype,
                        int num_threads) {
    long size = SIZE[a->in_pairs ? BFLOAT16 : FLOAT32];
    long num_panels = (out_size + PANEL - 1) / PANEL;
    long num_blocks = (num_tokens + SEGMENT_BLOCK - 1) / SEGMENT_BLOCK;
#pragma omp parallel for num_threads(num_threads) if (a->in * out_size > LEAST_SHARED_WEIGHTS)
    for (long piece = 0; piece < num_panels * num_blocks; piece++) {
        long panel = piece / num_blocks, block = piece % num_blocks;
        long first = num_tokens * block / num_blocks;
        long count = num_tokens * (block + 1) / num_blocks - first;
        const float *from = (const float *)(x + first * x_stride * size);
        char *to = out + (first * out_size + panel * PANEL) * SIZE[out_dtype];
        float sums[SEGMENT_BLOCK * PANEL];
        multiply_block(a, cut, from, sums, count, x_stride >> a->in_pairs, panel);
        long width = least(PANEL, out_size - panel * PANEL);
        for (long token = 0; token < count; token++)
            for (long i = 0; i < width; i += LANES)
                store(to, token * out_size + i, width - i,
                      load_whole(sums, token * PANEL + i, FLOAT32), out_dtype);
    }
}
