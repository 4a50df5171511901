// Mixtures of experts; experts.py documents the arguments.

#include "segments.h"

#define HALF (PANEL / 2)  // gates of a panel of gate_up, and rows of up beside them

struct routing {
    long num_chosen, num_groups, num_open_groups;
    float scale;
    int is_sigmoid, is_renormalized;
};

// The largest of `values` that is not taken, the first of equals; any if all are NaN.
INLINE long best_of(const float *values, const char *taken, long count) {
    long best = -1;
    for (long i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

// Leaves the groups with the largest sums of their two best scores open.
INLINE void close_groups(const struct routing *a, const float *choice, long num_experts,
                         char *taken) {
    long size = num_experts / a->num_groups;
    float sums[a->num_groups];
    char is_open[a->num_groups];
    memset(is_open, 0, sizeof is_open);
    for (long group = 0; group < a->num_groups; group++) {
        const float *values = choice + group * size;
        char seen[size];
        memset(seen, 0, sizeof seen);
        sums[group] = 0;
        for (long i = 0; i < least(2, size); i++) {
            long best = best_of(values, seen, size);
            seen[best] = 1;
            sums[group] += values[best];
        }
    }
    for (long i = 0; i < a->num_open_groups; i++)
        is_open[best_of(sums, is_open, a->num_groups)] = 1;
    for (long group = 0; group < a->num_groups; group++)
        memset(taken + group * size, !is_open[group], size);
}

void route(const struct routing *a, const void *logits, const float *correction,
           int32_t *expert_ids, float *weights, long num_tokens, long num_experts,
           long logits_stride, int dtype) {
    float scores[num_experts + LANES], choice[num_experts + LANES];
    char taken[num_experts];
    for (long token = 0; token < num_tokens; token++) {
        vec peak = all(-INFINITY);
        for (long i = 0; i < num_experts; i += LANES) {
            vec x = load(logits, token * logits_stride + i, num_experts - i, dtype);
            store_whole(choice, i, x, FLOAT32);
            for (long lane = 0; lane < least(LANES, num_experts - i); lane++)
                peak = larger_of(peak, all(x[lane]));
        }
        for (long i = 0; i < num_experts; i += LANES) {
            vec x = load_whole(choice, i, FLOAT32);
            vec score = a->is_sigmoid ? 1.0f / (1.0f + exp2_of(x * -LOG2_E))
                                      : exp2_of((x - peak) * LOG2_E);
            store_whole(scores, i, score, FLOAT32);
            if (a->is_sigmoid) store_whole(choice, i, score, FLOAT32);
        }
        for (long i = 0; correction && i < num_experts; i++) choice[i] += correction[i];
        float divisor = 0;
        for (long i = 0; i < num_experts; i++) divisor += scores[i];
        memset(taken, 0, sizeof taken);
        if (a->num_open_groups < a->num_groups) close_groups(a, choice, num_experts, taken);
        int32_t *ids = expert_ids + token * a->num_chosen;
        float *mine = weights + token * a->num_chosen, chosen_sum = 1e-20f;
        for (long i = 0; i < a->num_chosen; i++) {
            ids[i] = best_of(choice, taken, num_experts);
            taken[ids[i]] = 1;
            mine[i] = scores[ids[i]];
            chosen_sum += mine[i];
        }
        if (a->is_renormalized) divisor = chosen_sum;
        else if (a->is_sigmoid) divisor = 1;
        for (long i = 0; i < a->num_chosen; i++) mine[i] = mine[i] / divisor * a->scale;
    }
}

struct experts {
    const void *x, *gate_up, *down;
    const float *gate_up_bias, *down_bias, *weights;
    const int32_t *expert_ids;
    void *gathered, *opened, *out;
    float *results;
    long num_tokens, num_chosen, num_experts, hidden_size, width, x_stride;
    float alpha, limit;
    enum dtype dtype;
    // In place of `gate_up` and `down` where they are stored as codes, with experts below one
    // another; then x is float32.
    const struct quantized *quantized_gate_up, *quantized_down;
    struct segments cut;  // of `width` inputs of `down`
};

// Rows of `order` that one expert computes together.
struct group {
    long expert, first, count;
};

// Sorts the choices by expert, each expert's by token, and cuts them into groups.
INLINE long sort_choices(const struct experts *a, int32_t *order, struct group *groups) {
    long num_choices = a->num_tokens * a->num_chosen, num_groups = 0, starts[a->num_experts + 1];
    memset(starts, 0, sizeof starts);
    for (long i = 0; i < num_choices; i++) starts[a->expert_ids[i] + 1]++;
    for (long expert = 0; expert < a->num_experts; expert++) {
        long count = starts[expert + 1];
        for (long done = 0; done < count; done += BLOCK)
            groups[num_groups++] =
                (struct group){expert, starts[expert] + done, least(BLOCK, count - done)};
        starts[expert + 1] += starts[expert];
    }
    for (long i = 0; i < num_choices; i++) order[starts[a->expert_ids[i]]++] = i;
    return num_groups;
}

// opened [count, HALF] from sums of HALF gates and as many rows of up.
INLINE void open_gates(const struct experts *a, const struct group *group, const float *sums,
                       long column) {
    const float *bias = a->gate_up_bias ? a->gate_up_bias + group->expert * 2 * a->width : NULL;
    for (long row = 0; row < group->count; row++)
        for (long i = 0; i < HALF && column + i < a->width; i += LANES) {
            long count = a->width - column - i;
            vec gate = load_whole(sums, row * PANEL + i, FLOAT32);
            vec up = load_whole(sums, row * PANEL + HALF + i, FLOAT32);
            if (bias) {
                gate += load(bias, column + i, count, FLOAT32);
                up += load(bias, a->width + column + i, count, FLOAT32);
            }
            if (a->limit > 0) {
                gate = smaller_of(all(a->limit), gate);
                up = larger_of(all(-a->limit), smaller_of(all(a->limit), up)) + 1.0f;
            }
            vec opened = gate / (1.0f + exp2_of(gate * (-LOG2_E * a->alpha))) * up;
            store(a->opened, (group->first + row) * a->width + column + i, count, opened,
                  a->dtype);
        }
}

// The sums of PANEL columns, to the places of their choices.
INLINE void keep(const struct experts *a, const struct group *group, const float *sums,
                 const int32_t *order, long column) {
    for (long row = 0; row < group->count; row++) {
        float *results = a->results + order[group->first + row] * a->hidden_size + column;
        for (long i = 0; i < PANEL && column + i < a->hidden_size; i += LANES)
            store(results, i, a->hidden_size - column - i,
                  load_whole(sums, row * PANEL + i, FLOAT32), FLOAT32);
    }
}

// Panels that one thread takes in turn: enough to be read in a stream, few enough that threads end
// together although experts have different numbers of tokens.
INLINE long share_of(long num_pieces, int num_threads) {
    return most(1, num_pieces / (4 * num_threads));
}

// Computes `results`: of each choice, the sums over these segments.
void experts(const struct experts *a, int num_threads) {
    int in_pairs = a->dtype == BFLOAT16;
    long num_choices = a->num_tokens * a->num_chosen, size = SIZE[a->dtype];
    int32_t order[num_choices];
    struct group groups[a->num_experts + num_choices / BLOCK];
    long num_groups = sort_choices(a, order, groups);
    long hidden = a->hidden_size >> in_pairs, width = a->width >> in_pairs;
    struct matrix gate_up = {a->gate_up, a->quantized_gate_up, hidden, in_pairs};
    struct matrix down = {a->down, a->quantized_down, width, in_pairs};
    long num_open_panels = (a->width + HALF - 1) / HALF;
    long num_down_panels = (a->hidden_size + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(num_threads) \
    if (a->hidden_size * a->width > LEAST_SHARED_WEIGHTS)
    {
        float sums[BLOCK * PANEL];
#pragma omp for
        for (long i = 0; i < num_choices; i++)
            memcpy((char *)a->gathered + i * a->hidden_size * size,
                   (const char *)a->x + order[i] / a->num_chosen * a->x_stride * size,
                   a->hidden_size * size);
#pragma omp for schedule(dynamic, share_of(num_groups * num_open_panels, num_threads))
        for (long piece = 0; piece < num_groups * num_open_panels; piece++) {
            const struct group *group = groups + piece / num_open_panels;
            long panel = piece % num_open_panels;
            const float *x = (const float *)a->gathered + group->first * hidden;
            multiply_inputs(&gate_up, x, sums, group->count, hidden,
                            group->expert * num_open_panels + panel, 0, hidden);
            open_gates(a, group, sums, panel * HALF);
        }
#pragma omp for schedule(dynamic, share_of(num_groups * num_down_panels, num_threads))
        for (long piece = 0; piece < num_groups * num_down_panels; piece++) {
            const struct group *group = groups + piece / num_down_panels;
            long panel = piece % num_down_panels;
            const float *x = (const float *)a->opened + group->first * width;
            multiply_segments(&down, &a->cut, x, sums, group->count, width,
                              group->expert * num_down_panels + panel);
            keep(a, group, sums, order, panel * PANEL);
        }
    }
}

// Computes `out` from the results of all segments, each token's in the order of its choice.
void sum_choices(const struct experts *a, int num_threads) {
#pragma omp parallel for num_threads(num_threads) \
    if (a->num_tokens * a->num_chosen * a->hidden_size > LEAST_SHARED_WEIGHTS)
    for (long token = 0; token < a->num_tokens; token++)
        for (long i = 0; i < a->hidden_size; i += LANES) {
            long count = a->hidden_size - i;
            vec total = {0};
            for (long rank = 0; rank < a->num_chosen; rank++) {
                long choice = token * a->num_chosen + rank;
                vec result = load(a->results, choice * a->hidden_size + i, count, FLOAT32);
                if (a->down_bias)
                    result += load(a->down_bias, a->expert_ids[choice] * a->hidden_size + i, count,
                                   FLOAT32);
                total += result * a->weights[choice];
            }
            store(a->out, token * a->hidden_size + i, count, total, a->dtype);
        }
}
