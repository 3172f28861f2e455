/* Sums over processes of one host, in memory that all of them see.
 *
 * Every process has a block: a line for each of its flags, one for when it came, then data. A flag
 * counts up and has one writer, its owner; whoever waits for it sleeps in the kernel (futex), after a
 * short look.
 *
 *     own data written -> READY += 1 -> all are READY -> sum one part of all blocks, into all blocks
 *                      -> DONE += 1  -> all are DONE  -> every block holds the sum
 *
 * NOTE [ The order of sums ]
 * A part is summed by one process, in the order of blocks, and written to all: so all have the same
 * bits, and the same bits in every run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, LOOKS = 200, STRIP = 8192 };
enum { FLOAT32 = 4, FLOAT64 = 8 };

typedef _Atomic uint32_t Flag;

static Flag *flag_of(char *block, int which) { return (Flag *)(block + which * LINE); }

static void raise_flag(char *block, int which, uint32_t count)
{
    Flag *flag = flag_of(block, which);
    atomic_store_explicit(flag, count, memory_order_release);
    /* Not private: the others are other processes. */
    syscall(SYS_futex, flag, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* 0, or -1 after `seconds`: then some process is lost. Counts wrap, hence the difference. */
static int await_flag(char *block, int which, uint32_t count, int seconds)
{
    Flag *flag = flag_of(block, which);
    struct timespec begin, now, most = {1, 0};
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int look = 0;; look++) {
        uint32_t seen = atomic_load_explicit(flag, memory_order_acquire);
        if ((int32_t)(seen - count) >= 0)
            return 0;
        if (look < LOOKS)
            continue;
        syscall(SYS_futex, flag, FUTEX_WAIT, seen, &most, NULL, 0);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - begin.tv_sec > seconds)
            return -1;
    }
}

static int await_all(char **blocks, int num_blocks, int which, uint32_t count, int seconds)
{
    for (int at = 0; at < num_blocks; at++)
        if (await_flag(blocks[at], which, count, seconds))
            return at + 1;
    return 0;
}

#define DEFINE_SUM(NAME, TYPE)                                                                     \
    static void NAME(char **blocks, int num_blocks, size_t offset, size_t count, char **into,      \
                     int num_into)                                                                 \
    {                                                                                              \
        TYPE sum[STRIP / sizeof(TYPE)];                                                            \
        const size_t most = STRIP / sizeof(TYPE);                                                  \
        for (size_t done = 0; done < count; done += most) {                                        \
            const size_t here = offset + done * sizeof(TYPE);                                      \
            const size_t num = count - done < most ? count - done : most;                          \
            memcpy(sum, blocks[0] + here, num * sizeof(TYPE));                                     \
            for (int at = 1; at < num_blocks; at++) {                                              \
                const TYPE *part = (const TYPE *)(blocks[at] + here);                              \
                for (size_t i = 0; i < num; i++)                                                   \
                    sum[i] += part[i];                                                             \
            }                                                                                      \
            for (int at = 0; at < num_into; at++)                                                  \
                memcpy(into[at] + here, sum, num * sizeof(TYPE));                                  \
        }                                                                                          \
    }

DEFINE_SUM(sum_float32, float)
DEFINE_SUM(sum_float64, double)

enum { READY, DONE, PUBLISHED, COPIED, CAME };

static double *came_at(char *block) { return (double *)(block + CAME * LINE); }

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* Sum `count` numbers at `offset` of all blocks; the result is in the first `num_into` blocks.
 *
 * 0, or 1 + the block whose process does not come. `turn` counts the calls and is the same for all.
 * `last` is told which process came last, and `waited` for how long this one waited for it. */
int shared_sum(char **blocks, int num_blocks, int own, size_t offset, size_t count, int itemsize,
               int num_into, uint32_t turn, int seconds, int *last, double *waited)
{
    int lost;
    *came_at(blocks[own]) = now_seconds();
    raise_flag(blocks[own], READY, turn);
    if ((lost = await_all(blocks, num_blocks, READY, turn, seconds)))
        return lost;
    /* Nobody writes the next time before all are DONE with this turn. */
    *last = own;
    for (int at = 0; at < num_blocks; at++)
        if (*came_at(blocks[at]) > *came_at(blocks[*last]))
            *last = at;
    *waited = *came_at(blocks[*last]) - *came_at(blocks[own]);
    /* Parts are whole lines, so that no two processes write to one. */
    const size_t per_line = LINE / itemsize, lines = (count + per_line - 1) / per_line;
    size_t first = lines * own / num_blocks * per_line, end = lines * (own + 1) / num_blocks * per_line;
    if (end > count)
        end = count;
    if (first < end) {
        const size_t here = offset + first * itemsize;
        if (itemsize == FLOAT32)
            sum_float32(blocks, num_blocks, here, end - first, blocks, num_into);
        else
            sum_float64(blocks, num_blocks, here, end - first, blocks, num_into);
    }
    raise_flag(blocks[own], DONE, turn);
    return await_all(blocks, num_blocks, DONE, turn, seconds);
}

/* The first block's owner hands out what it has at `offset`; the others take it. */
int shared_spread(char **blocks, int num_blocks, int own, size_t offset, size_t size, uint32_t turn,
                  int seconds)
{
    if (own) {
        if (await_flag(blocks[0], PUBLISHED, turn, seconds))
            return 1;
        memcpy(blocks[own] + offset, blocks[0] + offset, size);
        raise_flag(blocks[own], COPIED, turn);
        return 0;
    }
    raise_flag(blocks[0], PUBLISHED, turn);
    int lost = await_all(blocks + 1, num_blocks - 1, COPIED, turn, seconds);
    return lost ? lost + 1 : 0;
}
