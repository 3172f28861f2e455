/* Messages between two processes of one host, in memory that both see.
 *
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
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, LOOKS = 100, AWAYS = 4096 };

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
        if (look < LOOKS)
            continue;
        if (slept)
            return NOTHING;
        sleep_at(bell, seen, milliseconds);
        /* It may have been another box's bell; only time that passed in silence counts. */
        slept = atomic_load(&bell->rung) == seen;
    }
}
