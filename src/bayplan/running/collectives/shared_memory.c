// cc -std=c11 -O3 -ffp-contract=off -Wall -Wextra
// No product is fused with an addition, which would round once where torch rounds twice.
/* Memory that all processes of one host see: sums over it, and below, mailboxes in it.
 *
 * NOTE [ Sums ]
 * Every process has a block: some lines of flags, then data. A flag counts up; whoever waits for it
 * sleeps in the kernel (futex), after a short look. The first block's flags are everybody's.
 *
 *     own data written -> ARRIVED += 1 -> the last one to come raises GO
 *                      -> sum strips of all blocks, into all blocks, as long as any are left
 *                      -> whoever ends the last strip raises DONE: every block holds the sum
 *
 * Strips are taken by whoever runs. With more processes than cores most of them sleep when the last
 * one comes, and to wait until each has summed a part of its own would be to wait for the scheduler.
 *
 * NOTE [ The order of sums ]
 * A strip is summed by one process, in the order of blocks, and written to all: so all have the same
 * bits, and the same bits in every run, whoever sums it.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { LINE = 64, LOOKS = 200, STRIP = 8192, SHARE = 64 << 10, MOST_BLOCKS = 8 };
enum { FLOAT32 = 4, FLOAT64 = 8 };

typedef _Atomic uint32_t Flag;

static Flag *flag_of(char *block, int which) { return (Flag *)(block + which * LINE); }

/* Not private: the others are other processes. */
static void wake(Flag *flag, int most) { syscall(SYS_futex, flag, FUTEX_WAKE, most, NULL, NULL, 0); }

static void raise_flag(char *block, int which, uint32_t count)
{
    Flag *flag = flag_of(block, which);
    atomic_store_explicit(flag, count, memory_order_release);
    wake(flag, INT32_MAX);
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

/* All numbers are read once and written once, and a sum lives in a register in between: 3 times as
 * fast as through a buffer, in the caches of today. The compiler needs to know how many blocks there
 * are for that. Blocks do not overlap, hence ivdep. */
#define DEFINE_SUM_OF(NAME, TYPE)                                                                  \
    __attribute__((always_inline)) static inline void NAME##_of(                                   \
        char **blocks, const int num_blocks, size_t offset, size_t count, TYPE factor,             \
        const int num_into)                                                                        \
    {                                                                                              \
        TYPE *parts[MOST_BLOCKS];                                                                  \
        for (int block = 0; block < num_blocks; block++)                                           \
            parts[block] = (TYPE *)(blocks[block] + offset);                                       \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++)                                    \
        {                                                                                          \
            TYPE sum = parts[0][i] * factor;                                                       \
            for (int block = 1; block < num_blocks; block++)                                       \
                sum += parts[block][i] * factor;                                                   \
            for (int block = 0; block < num_into; block++)                                         \
                parts[block][i] = sum;                                                             \
        }                                                                                          \
    }

/* Any number of blocks, through a buffer. */
#define DEFINE_SUM_OF_ANY(NAME, TYPE)                                                              \
    static void NAME##_of_any(char **blocks, int num_blocks, size_t offset, size_t count,          \
                              TYPE factor, int num_into)                                           \
    {                                                                                              \
        TYPE sum[STRIP / sizeof(TYPE)];                                                            \
        const size_t most = STRIP / sizeof(TYPE);                                                  \
        for (size_t done = 0; done < count; done += most) {                                        \
            const size_t here = offset + done * sizeof(TYPE);                                      \
            const size_t num = count - done < most ? count - done : most;                          \
            for (int at = 0; at < num_blocks; at++) {                                              \
                const TYPE *part = (const TYPE *)(blocks[at] + here);                              \
                for (size_t i = 0; i < num; i++)                                                   \
                    sum[i] = at ? sum[i] + part[i] * factor : part[i] * factor;                    \
            }                                                                                      \
            for (int at = 0; at < num_into; at++)                                                  \
                memcpy(blocks[at] + here, sum, num * sizeof(TYPE));                                \
        }                                                                                          \
    }

#define CASE(NAME, NUMBER)                                                                         \
    case NUMBER:                                                                                   \
        NAME##_of(blocks, NUMBER, offset, count, factor, NUMBER);                                  \
        break;                                                                                     \
    case -NUMBER:                                                                                  \
        NAME##_of(blocks, NUMBER, offset, count, factor, 1);                                       \
        break;

/* Into all blocks, or into the first one. */
#define DEFINE_SUM(NAME, TYPE)                                                                     \
    DEFINE_SUM_OF(NAME, TYPE)                                                                      \
    DEFINE_SUM_OF_ANY(NAME, TYPE)                                                                  \
    static void NAME(char **blocks, int num_blocks, size_t offset, size_t count, TYPE factor,      \
                     int num_into)                                                                 \
    {                                                                                              \
        switch (num_into == num_blocks ? num_blocks : num_into == 1 ? -num_blocks : 0) {           \
            CASE(NAME, 2)                                                                          \
            CASE(NAME, 3)                                                                          \
            CASE(NAME, 4)                                                                          \
            CASE(NAME, 5)                                                                          \
            CASE(NAME, 6)                                                                          \
            CASE(NAME, 7)                                                                          \
            CASE(NAME, 8)                                                                          \
        default:                                                                                   \
            NAME##_of_any(blocks, num_blocks, offset, count, factor, num_into);                    \
        }                                                                                          \
    }

DEFINE_SUM(sum_float32, float)
DEFINE_SUM(sum_float64, double)

enum { READY, GO, DONE, PUBLISHED, COPIED, ARRIVED, NEXT, ENDED, LAST };

/* What the last to come tells the others; of two turns, as some may not have read the one before. */
typedef struct {
    int who;
    double came;
} Last;

static _Atomic uint64_t *count_of(char *block, int which)
{
    return (_Atomic uint64_t *)(block + which * LINE);
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* The number of a strip that nobody has taken in this turn; -1 if there is none. */
static int64_t take_strip(char *first, uint32_t turn, uint64_t num_strips)
{
    _Atomic uint64_t *next = count_of(first, NEXT);
    uint64_t seen = atomic_load(next);
    do {
        if (seen >> 32 != turn || (uint32_t)seen >= num_strips)
            return -1;
    } while (!atomic_compare_exchange_weak(next, &seen, seen + 1));
    return (uint32_t)seen;
}

static void end_turn(char *first, uint32_t turn)
{
    raise_flag(first, DONE, turn);
    wake(flag_of(first, GO), INT32_MAX); /* those who were not needed */
}

/* Sum `count` numbers at `offset` of all blocks, each times `factor`; the result is in the first
 * `num_into` blocks, which is best one of them or all.
 *
 * 0, or 1 + the block whose process does not come. `turn` counts the calls and is the same for all.
 * `last` is told which process came last, and `waited` for how long this one waited for it. */
int shared_sum(char **blocks, int num_blocks, int own, size_t offset, size_t count, int itemsize,
               double factor, int num_into, uint32_t turn, int seconds, int *last, double *waited)
{
    char *first = blocks[0];
    const size_t share = SHARE / itemsize;
    const uint64_t num_strips = (count + share - 1) / share;
    Last *told = (Last *)(first + LAST * LINE) + turn % 2;
    const double came = now_seconds();
    atomic_store_explicit(flag_of(blocks[own], READY), turn, memory_order_release);
    if ((atomic_fetch_add(count_of(first, ARRIVED), 1) + 1) % num_blocks == 0) {
        *told = (Last){own, came};
        atomic_store(count_of(first, ENDED), 0);
        atomic_store(count_of(first, NEXT), (uint64_t)turn << 32);
        atomic_store_explicit(flag_of(first, GO), turn, memory_order_release);
        if (num_strips) /* there is work for no more than there are cores; the others sleep on */
            wake(flag_of(first, GO), num_strips > 1 ? sysconf(_SC_NPROCESSORS_ONLN) - 1 : 0);
        else
            end_turn(first, turn);
    } else if (await_flag(first, GO, turn, seconds)) {
        for (int at = 0; at < num_blocks; at++)
            if (atomic_load(flag_of(blocks[at], READY)) != turn)
                return at + 1;
        return 1;
    }
    for (int64_t strip; (strip = take_strip(first, turn, num_strips)) >= 0;) {
        const size_t begin = strip * share, num = count - begin < share ? count - begin : share;
        const size_t here = offset + begin * itemsize;
        if (itemsize == FLOAT32)
            sum_float32(blocks, num_blocks, here, num, factor, num_into);
        else
            sum_float64(blocks, num_blocks, here, num, factor, num_into);
        if (atomic_fetch_add(count_of(first, ENDED), 1) + 1 == num_strips)
            end_turn(first, turn);
    }
    if (await_flag(first, DONE, turn, seconds))
        return 1;
    *last = told->who;
    *waited = told->came - came;
    return 0;
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

/* NOTE [ Copies past the caches ]
 * What is summed next is mostly what other processes have written, so nothing is lost; and the memory
 * that is written to need not be read first, a third of what a copy moves. The wider the registers,
 * the fewer stores fill a line, and the sooner it leaves.
 */
#define DEFINE_STREAM(NAME, TARGET, TYPE, LOAD, STORE)                                             \
    __attribute__((target(TARGET))) static void NAME(char *to, const char *from, size_t size)      \
    {                                                                                              \
        for (size_t line = 0; line < size; line += LINE)                                           \
            for (size_t at = line; at < line + LINE; at += sizeof(TYPE))                           \
                STORE((TYPE *)(to + at), LOAD((const TYPE *)(from + at)));                         \
        _mm_sfence();                                                                              \
    }

#ifdef __x86_64__
DEFINE_STREAM(stream_16, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128)
DEFINE_STREAM(stream_32, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_STREAM(stream_64, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

static void stream_lines(char *to, const char *from, size_t size)
{
    if (__builtin_cpu_supports("avx512f"))
        stream_64(to, from, size);
    else if (__builtin_cpu_supports("avx2"))
        stream_32(to, from, size);
    else
        stream_16(to, from, size);
}
#else
static void stream_lines(char *to, const char *from, size_t size) { memcpy(to, from, size); }
#endif

static void streamed_copy(char *to, const char *from, size_t size)
{
    const size_t head = -(uintptr_t)to % LINE, whole = size > head ? (size - head) / LINE * LINE : 0;
    if (whole) {
        memcpy(to, from, head);
        stream_lines(to + head, from + head, whole);
        to += head + whole, from += head + whole, size -= head + whole;
    }
    memcpy(to, from, size);
}

/* Copy several pieces; from `streamed` bytes on, past the caches. */
void copy_pieces(char **to, char **from, const size_t *sizes, int number, size_t streamed)
{
    for (int at = 0; at < number; at++)
        if (sizes[at] < streamed)
            memcpy(to[at], from[at], sizes[at]);
        else
            streamed_copy(to[at], from[at], sizes[at]);
}

/* NOTE [ Mailboxes ]
 * A mailbox has one writer and one reader. Its messages lie one behind the other in a ring, each after a
 * line that says what it is. Only the writer moves `written`, only the reader moves `read`, and neither
 * waits for the other: what finds no room goes another way, and the reader is told in a table.
 *
 *     box     written | read | away[number % AWAYS] | ring of lines
 *     record  number, tag, size | the message, up to a whole line
 *
 * Messages are numbered, so that the reader knows whether the next one lies in the ring or went another
 * way. A process that has nothing to read sleeps at its bell, of which it has one for all its boxes.
 */
enum { MAIL_LOOKS = 100, AWAYS = 4096 };

typedef struct {
    _Atomic uint64_t written;
    char line0[LINE - sizeof(uint64_t)];
    _Atomic uint64_t read;
    char line1[LINE - sizeof(uint64_t)];
    _Atomic uint32_t away[AWAYS]; /* 1 + the tag of a message that went another way */
    char ring[];
} Box;

typedef struct {
    _Atomic uint32_t rung;
    _Atomic uint32_t sleeps;
} Bell;

typedef struct {
    uint64_t number, tag, size;
    char line[LINE - 3 * sizeof(uint64_t)];
} Record;

uint64_t mailbox_bytes(uint64_t capacity) { return sizeof(Box) + capacity; }

static uint64_t lines(uint64_t size) { return (size + LINE - 1) / LINE * LINE; }

static void ring_bell(Bell *bell)
{
    atomic_fetch_add(&bell->rung, 1);
    if (atomic_load(&bell->sleeps)) /* not private: it is another process's */
        syscall(SYS_futex, &bell->rung, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void sleep_at(Bell *bell, uint32_t seen, int milliseconds)
{
    struct timespec most = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    atomic_store(&bell->sleeps, 1);
    syscall(SYS_futex, &bell->rung, FUTEX_WAIT, seen, &most, NULL, 0);
    atomic_store(&bell->sleeps, 0);
}

/* 1 if the message lies in the box, 0 if it has to go another way, -1 if that cannot be told now. */
int mailbox_put(Box *box, uint64_t capacity, Bell *bell, uint64_t number, uint64_t tag,
                const char *message, uint64_t size)
{
    const uint64_t at = atomic_load_explicit(&box->written, memory_order_relaxed);
    const uint64_t used = at - atomic_load_explicit(&box->read, memory_order_acquire);
    if (used + LINE + lines(size) > capacity) {
        _Atomic uint32_t *away = &box->away[number % AWAYS];
        if (atomic_load_explicit(away, memory_order_acquire))
            return -1;
        atomic_store_explicit(away, (uint32_t)tag + 1, memory_order_release);
        ring_bell(bell);
        return 0;
    }
    Record *record = (Record *)(box->ring + at % capacity); /* whole lines never break at the end */
    record->number = number;
    record->tag = tag;
    record->size = size;
    const uint64_t begin = (at + LINE) % capacity;
    const uint64_t first = size < capacity - begin ? size : capacity - begin;
    memcpy(box->ring + begin, message, first);
    memcpy(box->ring, message + first, size - first);
    atomic_store_explicit(&box->written, at + LINE + lines(size), memory_order_release);
    ring_bell(bell);
    return 1;
}

enum { TAKEN, OTHER, AWAY, NOTHING };

/* Wait for the message with a number. Take it if it has the tag; else tell its tag and size.
 *
 * AWAY: it went another way. NOTHING: it has not come for so many milliseconds. */
int mailbox_take(Box *box, uint64_t capacity, Bell *bell, uint64_t number, uint64_t tag, char *into,
                 uint64_t size, int milliseconds, uint64_t *found_tag, uint64_t *found_size)
{
    const uint64_t at = atomic_load_explicit(&box->read, memory_order_relaxed);
    _Atomic uint32_t *away = &box->away[number % AWAYS];
    for (int look = 0, slept = 0;; look++) {
        const uint32_t seen = atomic_load(&bell->rung);
        if (atomic_load_explicit(&box->written, memory_order_acquire) != at) {
            const Record *record = (const Record *)(box->ring + at % capacity);
            if (record->number == number) {
                *found_tag = record->tag;
                *found_size = record->size;
                if (record->tag != tag || record->size != size)
                    return OTHER;
                const uint64_t begin = (at + LINE) % capacity;
                const uint64_t first = size < capacity - begin ? size : capacity - begin;
                memcpy(into, box->ring + begin, first);
                memcpy(into + first, box->ring, size - first);
                atomic_store_explicit(&box->read, at + LINE + lines(size), memory_order_release);
                return TAKEN;
            }
        }
        const uint32_t mark = atomic_load_explicit(away, memory_order_acquire);
        if (mark) {
            *found_tag = mark - 1;
            atomic_store_explicit(away, 0, memory_order_release);
            return AWAY;
        }
        if (look < MAIL_LOOKS)
            continue;
        if (slept)
            return NOTHING;
        sleep_at(bell, seen, milliseconds);
        /* It may have been another box's bell; only time that passed in silence counts. */
        slept = atomic_load(&bell->rung) == seen;
    }
}
