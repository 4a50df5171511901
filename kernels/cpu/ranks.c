// Exchanges between the ranks of one model over memory that their processes share.

#include "vectors.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 8
#define SPIN_NS 50000          // ranks may share a core: then waiting in the kernel is faster
#define LOOK_NS 100000000      // between looks at the other processes

// In shared memory, a cache line of its own for each rank.
struct line {
    _Atomic uint32_t round;  // the last that the rank has arrived at
    _Atomic uint32_t num_waiting;
    _Atomic uint32_t is_over;  // set in rank 0's line: nobody waits any longer
    _Atomic int64_t waited_ns;  // by the rank, for others
    char rest[40];
};

// One process's end; ranks.py documents the fields.
struct ranks {
    struct line *lines;  // [num_ranks]
    char *buffers;       // [2, num_ranks, buffer_bytes]
    long buffer_bytes, rank, num_ranks, leader_pid, patience_ms;
    uint32_t round;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Ranks count rounds modulo 2^32.
static int is_behind(struct line *line, uint32_t round) {
    return (int32_t)(atomic_load(&line->round) - round) < 0;
}

// Returns 0 once the rank has arrived at `round`; 1 if it does not, or its process is gone.
static int wait_for(struct ranks *r, long rank, uint32_t round) {
    struct line *line = r->lines + rank;
    if (!is_behind(line, round)) return 0;
    int64_t started = now_ns();
    while (now_ns() - started < SPIN_NS)
        for (int i = 0; i < 32; i++) {
            if (!is_behind(line, round)) {
                atomic_fetch_add(&r->lines[r->rank].waited_ns, now_ns() - started);
                return 0;
            }
            pause_briefly();
        }
    int failed = 0;
    atomic_fetch_add(&line->num_waiting, 1);
    for (;;) {
        uint32_t seen = atomic_load(&line->round);
        if ((int32_t)(seen - round) >= 0) break;
        int is_orphan = r->rank && getppid() != r->leader_pid;
        int is_late = (now_ns() - started) / 1000000 > r->patience_ms;
        if ((failed = is_orphan || is_late || atomic_load(&r->lines->is_over))) break;
        struct timespec timeout = {0, LOOK_NS};
        syscall(SYS_futex, &line->round, FUTEX_WAIT, seen, &timeout, NULL, 0);
    }
    atomic_fetch_sub(&line->num_waiting, 1);
    atomic_fetch_add(&r->lines[r->rank].waited_ns, now_ns() - started);
    return failed;
}

// Arrives, and waits for all ranks. Returns 0, or 1 + the first rank that does not arrive.
//
// A rank's buffer of a round is written again two rounds later. By then every rank has arrived at
// the round between, so it has read the buffer.
int meet(struct ranks *r) {
    struct line *mine = r->lines + r->rank;
    atomic_store(&mine->round, ++r->round);
    if (atomic_load(&mine->num_waiting)) futex_wake_all(&mine->round);
    for (long rank = 0; rank < r->num_ranks; rank++)
        if (wait_for(r, rank, r->round)) return 1 + rank;
    return 0;
}

// Lets every rank that waits, or will wait, return at once.
void end_waiting(struct ranks *r) {
    atomic_store(&r->lines->is_over, 1);
    for (long rank = 0; rank < r->num_ranks; rank++) futex_wake_all(&r->lines[rank].round);
}

// The buffer of a rank for the coming round.
static char *buffer_of(struct ranks *r, long rank, uint32_t round) {
    return r->buffers + ((round & 1) * r->num_ranks + rank) * r->buffer_bytes;
}

// out [count] = the sum of all ranks' parts, pairwise, neighbors first.
int add_up(struct ranks *r, const float *part, char *out, long count, int out_dtype) {
    long most_numbers = r->buffer_bytes / 4;
    long first = 0;
    do {
        long num = least(most_numbers, count - first);
        uint32_t round = r->round + 1;
        memcpy(buffer_of(r, r->rank, round), part + first, num * 4);
        int missing = meet(r);
        if (missing) return missing;
        const char *from[MAX_RANKS];
        for (long rank = 0; rank < r->num_ranks; rank++) from[rank] = buffer_of(r, rank, round);
        for (long i = 0; i < num; i += LANES) {
            vec sums[MAX_RANKS];
            for (long rank = 0; rank < r->num_ranks; rank++)
                sums[rank] = load(from[rank], i, num - i, FLOAT32);
            for (long left = r->num_ranks / 2; left; left /= 2)
                for (long pair = 0; pair < left; pair++)
                    sums[pair] = sums[2 * pair] + sums[2 * pair + 1];
            store(out, first + i, num - i, sums[0], out_dtype);
        }
        first += num;
    } while (first < count);
    return 0;
}

// out [num_rows, starts[num_ranks] bytes] = the ranks' columns side by side, at rank 0 alone. Those
// of a rank are bytes [starts[rank], starts[rank + 1]) of a row.
int join_columns(struct ranks *r, const char *part, char *out, long num_rows,
                 const int64_t *starts) {
    long widest = 1, row_bytes = starts[r->num_ranks];
    for (long rank = 0; rank < r->num_ranks; rank++)
        widest = most(widest, starts[rank + 1] - starts[rank]);
    long most_rows = r->buffer_bytes / widest, first = 0;
    long mine = starts[r->rank + 1] - starts[r->rank];
    do {
        long num = least(most_rows, num_rows - first);
        uint32_t round = r->round + 1;
        if (r->rank) memcpy(buffer_of(r, r->rank, round), part + first * mine, num * mine);
        int missing = meet(r);
        if (missing) return missing;
        for (long rank = 0; rank < r->num_ranks && !r->rank; rank++) {
            const char *from = rank ? buffer_of(r, rank, round) : part + first * mine;
            long width = starts[rank + 1] - starts[rank];
            for (long row = 0; row < num; row++)
                memcpy(out + (first + row) * row_bytes + starts[rank], from + row * width, width);
        }
        first += num;
    } while (first < num_rows);
    return 0;
}

// rows [num_rows, row_bytes]: each rank has those that it owns, and gets the others.
int share_rows(struct ranks *r, char *rows, long num_rows, long row_bytes, const int64_t *owners) {
    long most_rows = r->buffer_bytes / row_bytes, first = 0;
    do {
        long num = least(most_rows, num_rows - first);
        uint32_t round = r->round + 1;
        char *mine = buffer_of(r, r->rank, round), *part = rows + first * row_bytes;
        for (long row = 0; row < num; row++)
            if (owners[first + row] == r->rank)
                memcpy(mine + row * row_bytes, part + row * row_bytes, row_bytes);
        int missing = meet(r);
        if (missing) return missing;
        for (long row = 0; row < num; row++)
            if (owners[first + row] != r->rank)
                memcpy(part + row * row_bytes,
                       buffer_of(r, owners[first + row], round) + row * row_bytes, row_bytes);
        first += num;
    } while (first < num_rows);
    return 0;
}
