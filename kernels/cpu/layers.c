// The layers' functions besides matrices and attention; launch.py documents their arguments.

#include "vectors.h"

INLINE float inverse_rms(vec squares, long size, float eps) {
    return 1.0f / sqrtf(sum(squares) / size + eps);
}

void rms_norm(const void *x, void *residual, const void *weight, void *out, long num_tokens,
              long hidden_size, long x_stride, long residual_stride, long out_stride, float eps,
              int x_dtype, int residual_dtype, int weight_dtype, int out_dtype, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * hidden_size > LEAST_SHARED)
    for (long token = 0; token < num_tokens; token++) {
        // The values to norm: the rounded sum, if there is a residual.
        const void *values = residual ? residual : x;
        int dtype = residual ? residual_dtype : x_dtype;
        long first = token * (residual ? residual_stride : x_stride);
        vec squares = {0};
        for (long i = 0; i < hidden_size; i += LANES) {
            long count = hidden_size - i;
            vec value = load(x, token * x_stride + i, count, x_dtype);
            if (residual) {
                value = rounded(value + load(residual, first + i, count, dtype), dtype);
                store(residual, first + i, count, value, dtype);
            }
            squares += value * value;
        }
        float scale = inverse_rms(squares, hidden_size, eps);
        for (long i = 0; i < hidden_size; i += LANES) {
            long count = hidden_size - i;
            vec value = load(values, first + i, count, dtype) * scale;
            value *= load(weight, i, count, weight_dtype);
            store(out, token * out_stride + i, count, value, out_dtype);
        }
    }
}

INLINE vec silu(vec x) { return x / (1.0f + exp2_of(x * -LOG2_E)); }

// By tanh: x (1 + tanh(u)) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
INLINE vec gelu(vec x) {
    vec u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp2_of(u * (-2 * LOG2_E)));
}

INLINE void activate_mul(const void *gate_up, void *out, long num_tokens, long size,
                         long gate_up_stride, long out_stride, int dtype, int num_threads,
                         int is_gelu) {
#pragma omp parallel for num_threads(num_threads) if (num_tokens * size > LEAST_SHARED)
    for (long token = 0; token < num_tokens; token++) {
        long first = token * gate_up_stride;
        for (long i = 0; i < size; i += LANES) {
            long count = size - i;
            vec gate = load(gate_up, first + i, count, dtype);
            vec up = load(gate_up, first + size + i, count, dtype);
            vec opened = rounded(is_gelu ? gelu(gate) : silu(gate), dtype);
            store(out, token * out_stride + i, count, opened * up, dtype);
        }
    }
}

void silu_mul(const void *gate_up, void *out, long num_tokens, long size, long gate_up_stride,
              long out_stride, int dtype, int num_threads) {
    activate_mul(gate_up, out, num_tokens, size, gate_up_stride, out_stride, dtype, num_threads, 0);
}

void gelu_mul(const void *gate_up, void *out, long num_tokens, long size, long gate_up_stride,
              long out_stride, int dtype, int num_threads) {
    activate_mul(gate_up, out, num_tokens, size, gate_up_stride, out_stride, dtype, num_threads, 1);
}

struct storing {
    const void *qkv, *qk_norm, *rope_table;
    const int64_t *positions, *slots;
    void *kv_cache, *q_out;
    long qkv_stride, q_stride, block_stride;
    long to_values;  // of a block, from a head's keys to its values
    long num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    enum dtype qkv_dtype, norm_dtype, table_dtype, cache_dtype;
};

// Writes one head's query or key, normed if there is a norm, twice into `row`.
INLINE void norm_head(const struct storing *a, const void *x, long head, float *row) {
    vec squares = {0};
    for (long i = 0; i < a->head_dim; i += LANES) {
        vec value = load(x, i, a->head_dim - i, a->qkv_dtype);
        squares += value * value;
    }
    float scale = inverse_rms(squares, a->head_dim, a->eps);
    for (long i = 0; i < a->head_dim; i += LANES) {
        long count = a->head_dim - i;
        vec value = load(x, i, count, a->qkv_dtype);
        if (a->qk_norm)
            value = value * scale * load(a->qk_norm, head * a->head_dim + i, count, a->norm_dtype);
        store(row, i, count, value, FLOAT32);
        store(row, a->head_dim + i, count, value, FLOAT32);
    }
}

void store_qkv(const struct storing *a, long num_tokens, int num_threads) {
    long num_rotated = a->num_heads + a->num_kv_heads, num_all = num_rotated + a->num_kv_heads;
    long head_dim = a->head_dim, record = a->block_size * head_dim;
#pragma omp parallel for num_threads(num_threads) if (num_tokens * num_all * head_dim > LEAST_SHARED)
    for (long token = 0; token < num_tokens; token++) {
        float row[2 * head_dim + LANES];
        const char *x = (const char *)a->qkv + token * a->qkv_stride * SIZE[a->qkv_dtype];
        long turn = a->positions[token] * 2 * head_dim, slot = a->slots[token];
        // A block holds records: keys of these heads, and at a distance their values.
        long kept = slot / a->block_size * a->block_stride + slot % a->block_size * head_dim;
        for (long head = 0; head < num_rotated; head++) {
            int is_key = head >= a->num_heads;
            if (is_key && slot < 0) break;
            norm_head(a, x + head * head_dim * SIZE[a->qkv_dtype], head, row);
            for (long i = 0; i < head_dim; i += LANES) {
                long count = head_dim - i;
                vec turned = load(row, i, count, FLOAT32) *
                             load(a->rope_table, turn + i, count, a->table_dtype);
                turned += load(row, i + head_dim / 2, count, FLOAT32) *
                          load(a->rope_table, turn + head_dim + i, count, a->table_dtype);
                if (is_key)
                    store(a->kv_cache, kept + (head - a->num_heads) * record + i, count, turned,
                          a->cache_dtype);
                else
                    store(a->q_out, token * a->q_stride + head * head_dim + i, count, turned,
                          a->qkv_dtype);
            }
        }
        if (slot < 0) continue;
        for (long head = num_rotated; head < num_all; head++)
            for (long i = 0; i < head_dim; i += LANES)
                store(a->kv_cache, kept + a->to_values + (head - num_rotated) * record + i,
                      head_dim - i, load(x, head * head_dim + i, head_dim - i, a->qkv_dtype),
                      a->cache_dtype);
    }
}
