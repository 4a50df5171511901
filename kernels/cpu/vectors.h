// Vectors of float32, their loads and their stores. They are GCC's, the same on every processor,
// which may take several of its registers for one of them.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
// Of a vector's indices, and for each power of two below LANES.
#define EACH_LANE(of, step) {of(0, step), of(1, step), of(2, step), of(3, step), of(4, step), \
    of(5, step), of(6, step), of(7, step), of(8, step), of(9, step), of(10, step), of(11, step), \
    of(12, step), of(13, step), of(14, step), of(15, step)}
#define EACH_STEP(run) run(8) run(4) run(2) run(1)
#else
#define LANES 8
#define EACH_LANE(of, step) {of(0, step), of(1, step), of(2, step), of(3, step), of(4, step), \
    of(5, step), of(6, step), of(7, step)}
#define EACH_STEP(run) run(4) run(2) run(1)
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_bits __attribute__((vector_size(2 * LANES)));
typedef _Float16 half_vec __attribute__((vector_size(2 * LANES)));

enum dtype { FLOAT32, FLOAT16, BFLOAT16 };

static const long SIZE[] = {4, 2, 2};
static const float LOG2_E = 1.44269504088896341f;

// Below this many numbers a second thread costs more than it saves: it spins until its next work,
// on a core that others could use.
#define LEAST_SHARED 16384

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec choose(ivec condition, vec yes, vec no) {
    return (vec)((condition & (ivec)yes) | (~condition & (ivec)no));
}

INLINE half_bits bfloat16_of(vec x) {
#if defined(__AVX512BF16__)
    return (half_bits)_mm512_cvtneps_pbh((__m512)x);
#else
    uvec bits = (uvec)x;
    uvec nearest = bits + 0x7fff + ((bits >> 16) & 1);
    bits = (uvec)choose(x == x, (vec)nearest, (vec)(bits | 0x400000));
    return __builtin_convertvector(bits >> 16, half_bits);
#endif
}

INLINE vec widened(half_bits x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE vec load_whole(const void *from, long index, enum dtype dtype) {
    const char *source = (const char *)from + index * SIZE[dtype];
    if (dtype == FLOAT32) {
        vec x;
        memcpy(&x, source, sizeof x);
        return x;
    }
    if (dtype == FLOAT16) {
        half_vec x;
        memcpy(&x, source, sizeof x);
        return __builtin_convertvector(x, vec);
    }
    half_bits x;
    memcpy(&x, source, sizeof x);
    return widened(x);
}

INLINE void store_whole(void *to, long index, vec x, enum dtype dtype) {
    char *target = (char *)to + index * SIZE[dtype];
    if (dtype == FLOAT32) {
        memcpy(target, &x, sizeof x);
    } else if (dtype == FLOAT16) {
        half_vec half = __builtin_convertvector(x, half_vec);
        memcpy(target, &half, sizeof half);
    } else {
        half_bits half = bfloat16_of(x);
        memcpy(target, &half, sizeof half);
    }
}

// The numbers [index, index + count) of an array, the lanes after them 0.
INLINE vec load(const void *from, long index, long count, enum dtype dtype) {
    if (count >= LANES) return load_whole(from, index, dtype);
    float part[LANES] = {0};  // wide enough for any dtype
    memcpy(part, (const char *)from + index * SIZE[dtype], count * SIZE[dtype]);
    return load_whole(part, 0, dtype);
}

INLINE void store(void *to, long index, long count, vec x, enum dtype dtype) {
    if (count >= LANES) {
        store_whole(to, index, x, dtype);
        return;
    }
    float part[LANES];
    store_whole(part, 0, x, dtype);
    memcpy((char *)to + index * SIZE[dtype], part, count * SIZE[dtype]);
}

INLINE vec rounded(vec x, enum dtype dtype) {
    if (dtype == FLOAT32) return x;
    if (dtype == BFLOAT16) return widened(bfloat16_of(x));
    return __builtin_convertvector(__builtin_convertvector(x, half_vec), vec);
}

// The larger and the smaller of two; y where one is not a number.
INLINE vec larger_of(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return choose(x > y, x, y);
#endif
}

INLINE vec smaller_of(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)x, (__m512)y);
#else
    return choose(x < y, x, y);
#endif
}

#define OTHER(lane, step) ((lane) ^ (step))
#define OTHER_HALF(x, step) __builtin_shuffle(x, (ivec)EACH_LANE(OTHER, step))

INLINE float sum(vec x) {
#define ADD(step) x += OTHER_HALF(x, step);
    EACH_STEP(ADD)
    return x[0];
}

INLINE float largest(vec x) {
#define COMPARE(step) x = larger_of(OTHER_HALF(x, step), x);
    EACH_STEP(COMPARE)
    return x[0];
}

// 2^x, within 2 units of the last place for x in (-126, 128), and 0 up to -127. A NaN stays one.
INLINE vec exp2_of(vec x) {
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vec within = larger_of(all(-127), smaller_of(all(127.999f), x));
    vec shifted = within + magic;
    vec f = within - (shifted - magic);
    vec p = all(1.32187e-3f);  // least squares over [-0.5, 0.5], within 1.1e-7 of 2^f
    p = p * f + 9.6717e-3f;
    p = p * f + 5.550893e-2f;
    p = p * f + 2.4022238e-1f;
    p = p * f + 6.9314686e-1f;
    p = p * f + 1.0f;
    // At -127 the exponent becomes 0, and with it the number.
    return (vec)((ivec)p + (((ivec)shifted - (ivec)magic) << 23));
}

// Lane l of rows[i] becomes lane i of rows[l]: in each round pairs of rows swap half their lanes.
INLINE void transpose(vec rows[LANES]) {
#define FROM_LOW(lane, step) ((lane) & (step) ? LANES + (lane) - (step) : (lane))
#define FROM_HIGH(lane, step) ((lane) & (step) ? LANES + (lane) : (lane) + (step))
#define SWAP(step)                                                                      \
    UNROLL for (int i = 0; i < LANES; i++) {                                            \
        if (i & (step)) continue;                                                       \
        vec low = rows[i], high = rows[i + (step)];                                     \
        rows[i] = __builtin_shuffle(low, high, (ivec)EACH_LANE(FROM_LOW, step));        \
        rows[i + (step)] = __builtin_shuffle(low, high, (ivec)EACH_LANE(FROM_HIGH, step)); \
    }
    EACH_STEP(SWAP)
}
