// Masks of rows whose answers follow a grammar; launch.py documents the arguments.

#include <stdint.h>

static const uint32_t ALL = 0xFFFFFFFFu;  // tokens of a word
// The bits of minus infinity.
static const uint32_t MINUS_INF_32 = 0xFF800000u;
static const uint16_t MINUS_INF_16[3] = {0, 0xFC00u, 0xFF80u};  // by dtype, as in vectors.h

void mask_logits(void *logits, const int64_t *rows, const uint32_t *bits, long num_rows,
                 long num_words, long vocab_size, long logits_stride, int dtype) {
    for (long place = 0; place < num_rows; place++) {
        long first = rows[place] * logits_stride;
        for (long word = 0; word < num_words; word++) {
            uint32_t refused = ~bits[place * num_words + word];
            long start = word * 32;
            if (vocab_size - start < 32) refused &= (1u << (vocab_size - start)) - 1;
            if (dtype == 0) {
                uint32_t *values = (uint32_t *)logits + first + start;
                if (refused == ALL) {  // most words: a loop that is vectorized
                    for (int i = 0; i < 32; i++) values[i] = MINUS_INF_32;
                    continue;
                }
                for (; refused; refused &= refused - 1)
                    values[__builtin_ctz(refused)] = MINUS_INF_32;
            } else {
                uint16_t *values = (uint16_t *)logits + first + start;
                if (refused == ALL) {
                    for (int i = 0; i < 32; i++) values[i] = MINUS_INF_16[dtype];
                    continue;
                }
                for (; refused; refused &= refused - 1)
                    values[__builtin_ctz(refused)] = MINUS_INF_16[dtype];
            }
        }
    }
}
