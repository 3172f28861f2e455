// cc -std=gnu11 -O2 -fplt -fno-builtin -fvisibility=hidden -foptimize-sibling-calls -Wl,-z,now -Wl,-z,nodelete -ldl
// -fplt and -z now keep the counter off its own hooks, see danger 4.
/* Live malloc bytes of the running process, exact, attached at any time.
 *
 * Idea. A dynamically linked object calls malloc through a pointer in a table of its own (the
 * GOT), filled in by the loader. Attaching walks all loaded objects and points these entries at
 * the counting functions below; detaching walks again and points them back. A block counts with
 * malloc_usable_size when it comes and when it goes, so nothing is stored per block, and one older
 * than the attach takes off, when freed, what it once took.
 *
 * NOTE [ Dangers ]
 *  1. RELRO. Entries of a fully bound object lie in pages the loader made read-only: open the page,
 *     store, close it. A RELRO page found open belongs to an object another thread is loading:
 *     never close it, and leave it to that thread's dlopen (a full walk, asked for by Python under
 *     its interpreter lock, does write to it).
 *  2. Order. glibc holds its loader lock while dl_iterate_phdr calls back, so walks never overlap.
 *     The wanted state is read under that lock, hence the last walk leaves every object in it.
 *  3. PLT. An entry not bound yet points back into its own object and is known by the name of its
 *     symbol only. A bound one is known by its value, which covers aliases (__libc_malloc) and
 *     leaves private allocators alone. IRELATIVE entries (ifunc) do not occur: malloc is none.
 *  4. The true functions are what the loader put into this library's entries, which are never
 *     patched. dlsym may instead return the PLT of a non-PIE executable, which leads back here:
 *     endless recursion. Hence -fplt, -z now, and no address of a true function is taken here.
 *  5. Twice. glibc's reallocarray calls realloc through libc's own entry, so ours goes through
 *     counted_realloc and leaves only the report of an overflow to the true one.
 *  6. dlopen searches the RUNPATH of its caller. A name without a slash is passed on by a tail
 *     call, which keeps the return address; what it loads is patched at the next reading.
 *  7. A copy of a counting function's address may outlive the detach: they check `counting`, and
 *     this library is never unloaded.
 * Not seen: mmap called directly (Python's small-object arenas, thread stacks), the loader's own
 * blocks, allocators that do not call malloc, pointers to malloc copied before the attach.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT, POINTER = R_X86_64_64 };
#elif defined(__aarch64__)
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT, POINTER = R_AARCH64_ABS64 };
#else
#error "the malloc counter knows x86-64 and aarch64 only"
#endif

#define EXPORT __attribute__((visibility("default")))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define RELAXED memory_order_relaxed
#define LOAD(x) atomic_load_explicit(&(x), RELAXED)
#define STORE(x, value) atomic_store_explicit(&(x), (value), RELAXED)

/* ---- Counting: the part that runs at every malloc ---- */

static struct {
    _Atomic int64_t live, peak;
    _Atomic int64_t curve_minimum; /* INT64_MAX while no curve is recorded */
    _Atomic bool counting;
} count __attribute__((aligned(64))) = {.curve_minimum = INT64_MAX};

static struct {
    struct event {
        _Atomic int64_t time_ns; /* written last; 0 = not written yet */
        int64_t live;
    } *events;
    size_t capacity;
    _Atomic size_t next;
    _Atomic int writers; /* threads inside record(): the buffer must stay */
    _Atomic bool on;
} curve;

static __attribute__((noinline)) void record(int64_t live) {
    atomic_fetch_add(&curve.writers, 1);
    size_t i = atomic_load(&curve.on) ? atomic_fetch_add(&curve.next, 1) : SIZE_MAX;
    if (i < curve.capacity) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        curve.events[i].live = live;
        atomic_store(&curve.events[i].time_ns, now.tv_sec * INT64_C(1000000000) + now.tv_nsec);
    }
    atomic_fetch_sub(&curve.writers, 1);
}

static inline void account(int64_t delta) {
    if (UNLIKELY(!LOAD(count.counting)) || delta == 0) return;
    int64_t live = atomic_fetch_add_explicit(&count.live, delta, RELAXED) + delta;
    int64_t peak = LOAD(count.peak);
    while (live > peak && !atomic_compare_exchange_weak_explicit(&count.peak, &peak, live,
                                                                 RELAXED, RELAXED)) continue;
    if (UNLIKELY((delta < 0 ? -delta : delta) >= LOAD(count.curve_minimum))) record(live);
}

static inline int64_t size_of(void *block) { return (int64_t)malloc_usable_size(block); }

static inline void *counted(void *block) {
    if (block) account(size_of(block));
    return block;
}

static void *counted_malloc(size_t size) { return counted(malloc(size)); }
static void *counted_calloc(size_t n, size_t size) { return counted(calloc(n, size)); }
static void *counted_memalign(size_t align, size_t size) { return counted(memalign(align, size)); }
static void *counted_aligned_alloc(size_t a, size_t n) { return counted(aligned_alloc(a, n)); }
static void *counted_valloc(size_t size) { return counted(valloc(size)); }
static void *counted_pvalloc(size_t size) { return counted(pvalloc(size)); }

static int counted_posix_memalign(void **block, size_t align, size_t size) {
    int error = posix_memalign(block, align, size); /* on error *block is not ours to read */
    if (!error) counted(*block);
    return error;
}

static void counted_free(void *block) {
    if (block) account(-size_of(block)); /* before: once freed, its size is gone */
    free(block);
}

static void *counted_realloc(void *old, size_t size) {
    int64_t old_size = old ? size_of(old) : 0;
    void *block = realloc(old, size);
    if (block)
        account(size_of(block) - old_size);
    else if (old && size == 0) /* freed; for any other size it failed and `old` lives on */
        account(-old_size);
    return block;
}

static void *counted_reallocarray(void *old, size_t n, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(n, size, &bytes)) return reallocarray(old, n, size); /* danger 5 */
    return counted_realloc(old, bytes);
}

/* ---- Patching: which entry of which object points where ---- */

static void *counted_dlopen(const char *file, int mode);

#define HOOK(name) {#name, counted_##name, 0}
static struct hook {
    const char *name;
    void *hook, *real;
} hooks[] = {
    HOOK(malloc), HOOK(free), HOOK(calloc), HOOK(realloc), HOOK(reallocarray), HOOK(valloc),
    HOOK(posix_memalign), HOOK(aligned_alloc), HOOK(memalign), HOOK(pvalloc), HOOK(dlopen),
};
enum { NUM_HOOKS = sizeof hooks / sizeof *hooks };

static _Atomic bool hooked;            /* the wanted state of all entries */
static _Atomic size_t synced_objects;  /* leading objects that are in it, */
static unsigned long long synced_subs; /* as long as nothing is unloaded */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for users and the curve's buffer */
static int users;

struct object {
    uintptr_t base, low, high, relro_low, relro_high;
    const ElfW(Sym) *symbols;
    const char *strings;
    struct { const ElfW(Rela) *first; size_t num; } tables[2];
};

struct walk {
    size_t index, first; /* objects before `first` are in the wanted state already */
    bool is_full;
    int num_patched, num_failed;
};

static struct object describe(const struct dl_phdr_info *info) {
    struct object object = {.base = info->dlpi_addr, .low = UINTPTR_MAX};
    const ElfW(Dyn) *dynamic = NULL;
    size_t page = (size_t)getpagesize(), relative = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + segment->p_vaddr, end = start + segment->p_memsz;
        if (segment->p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)start;
        if (segment->p_type == PT_LOAD && start < object.low) object.low = start;
        if (segment->p_type == PT_LOAD && end > object.high) object.high = end;
        if (segment->p_type == PT_GNU_RELRO) { /* rounded as the loader does */
            object.relro_low = start & ~(page - 1);
            object.relro_high = end & ~(page - 1);
        }
    }
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        ElfW(Addr) value = dynamic->d_un.d_ptr; /* glibc made addresses absolute */
        switch (dynamic->d_tag) {
            case DT_SYMTAB: object.symbols = (void *)value; break;
            case DT_STRTAB: object.strings = (void *)value; break;
            case DT_RELA: object.tables[0].first = (void *)value; break;
            case DT_RELASZ: object.tables[0].num = value / sizeof(ElfW(Rela)); break;
            case DT_RELACOUNT: relative = value; break;
            case DT_JMPREL: object.tables[1].first = (void *)value; break;
            case DT_PLTRELSZ: object.tables[1].num = value / sizeof(ElfW(Rela)); break;
        }
    }
    object.tables[0].first += relative; /* these have no symbol */
    object.tables[0].num -= relative;
    return object;
}

static struct hook *hook_by_name(const struct object *object, const ElfW(Rela) *entry) {
    const ElfW(Sym) *symbol = &object->symbols[ELF64_R_SYM(entry->r_info)];
    for (int h = 0; symbol->st_shndx == SHN_UNDEF && h < NUM_HOOKS; h++)
        if (!strcmp(object->strings + symbol->st_name, hooks[h].name)) return &hooks[h];
    return NULL;
}

/* What the entry should hold instead, or NULL to leave it as it is. */
static void *replacement(const struct object *object, const ElfW(Rela) *entry, uintptr_t value) {
    bool is_patch = LOAD(hooked), is_slot = ELF64_R_TYPE(entry->r_info) == JUMP_SLOT;
    bool is_unbound = is_slot && value >= object->low && value < object->high; /* danger 3 */
    struct hook *hook = is_patch && is_unbound ? hook_by_name(object, entry) : NULL;
    for (int h = 0; !hook && h < NUM_HOOKS; h++)
        if ((void *)value == (is_patch ? hooks[h].real : hooks[h].hook)) hook = &hooks[h];
    return !hook ? NULL : is_patch ? hook->hook : hook->real;
}

/* Asks the kernel by an atomic "add 0": no fault, no change. */
static bool is_writable(uintptr_t address) {
    static uint32_t unused;
    int add_zero = FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0);
    return syscall(SYS_futex, &unused, FUTEX_WAKE_OP_PRIVATE, 0, 0, address, add_zero) >= 0;
}

static void store(const struct object *object, uintptr_t slot, void *value, struct walk *walk) {
    size_t page = (size_t)getpagesize();
    void *start = (void *)(slot & ~(page - 1));
    bool is_relro = slot >= object->relro_low && slot < object->relro_high;
    bool is_open = is_writable(slot);
    if (is_relro && is_open && !walk->is_full) return; /* danger 1 */
    if (is_open || (is_relro && !mprotect(start, page, PROT_READ | PROT_WRITE))) {
        __atomic_store_n((void **)slot, value, __ATOMIC_RELEASE);
        if (!is_open) mprotect(start, page, PROT_READ);
        walk->num_patched++;
    } else
        walk->num_failed++;
}

static void sync_entry(const struct object *object, const ElfW(Rela) *entry, struct walk *walk) {
    unsigned type = ELF64_R_TYPE(entry->r_info);
    uintptr_t slot = object->base + entry->r_offset, here = (uintptr_t)&users;
    bool holds_function = type == JUMP_SLOT || type == GLOB_DAT || type == POINTER;
    if (!holds_function || slot % sizeof(void *)) return;
    bool is_self = here >= object->low && here < object->high; /* danger 4 */
    struct hook *hook = is_self ? hook_by_name(object, entry) : NULL;
    if (hook) hook->real = *(void **)slot;
    void *value = is_self ? NULL : replacement(object, entry, *(uintptr_t *)slot);
    if (value) store(object, slot, value, walk);
}

static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    struct walk *walk = data;
    (void)size;
    if (walk->index == 0) { /* danger 2: all of this happens under the loader's lock */
        if (walk->is_full || info->dlpi_subs != synced_subs) walk->first = 0;
        else if (walk->first > LOAD(synced_objects)) walk->first = LOAD(synced_objects);
        synced_subs = info->dlpi_subs;
    }
    if (walk->index++ < walk->first) return 0;
    STORE(synced_objects, walk->index);
    if (info->dlpi_addr && info->dlpi_addr == getauxval(AT_BASE)) return 0; /* ld.so */
    struct object object = describe(info);
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; i < object.tables[t].num; i++)
            sync_entry(&object, &object.tables[t].first[i], walk);
    return 0;
}

/* Brings the objects from `first` on, and any that was missed, into the wanted state. */
static struct walk sync_from(size_t first) {
    struct walk walk = {.first = first, .is_full = first == 0};
    dl_iterate_phdr(visit, &walk);
    return walk;
}

static __attribute__((noinline)) void *dlopen_and_patch(const char *file, int mode) {
    size_t first = LOAD(synced_objects); /* new ones come behind; another thread's walk may */
    void *handle = dlopen(file, mode);   /* pass them while they are only half loaded */
    int error = errno;
    if (handle) sync_from(first);
    errno = error;
    return handle;
}

static void *counted_dlopen(const char *file, int mode) {
    if (!LOAD(hooked) || !file || !strchr(file, '/') || strchr(file, '$'))
        return dlopen(file, mode); /* danger 6: stays a tail call */
    return dlopen_and_patch(file, mode);
}

/* ---- Called from Python ---- */

static int patch_all(void) {
    sync_from(0); /* changes nothing but hooks[].real: this library comes last in a walk */
    for (int h = 0; h < NUM_HOOKS; h++)
        if (!hooks[h].real) return -ENOSYS;
    STORE(hooked, true);
    struct walk walk = sync_from(0);
    if (walk.num_patched && !walk.num_failed) return 0;
    STORE(hooked, false);
    sync_from(0);
    return walk.num_failed ? -EACCES : -ENOENT;
}

/* 0, or -errno with nothing changed (EACCES: some entry cannot be written; ENOENT: no entry leads
 * to malloc, another tool holds them). A second attach joins the first. `*is_user` belongs to the
 * caller: whether a detach is due. Set here, so that an interrupt after the call loses nothing. */
EXPORT int counter_attach(int *is_user) {
    pthread_mutex_lock(&lock);
    int error = users ? 0 : patch_all();
    if (!error && users++ == 0) {
        STORE(count.live, 0), STORE(count.peak, 0);
        STORE(count.counting, true);
    }
    *is_user = !error;
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT void counter_stop_curve(void) {
    STORE(count.curve_minimum, INT64_MAX);
    atomic_store(&curve.on, false);
}

EXPORT void counter_detach(int *is_user) {
    pthread_mutex_lock(&lock);
    if (*is_user && --users == 0) {
        counter_stop_curve();
        STORE(count.counting, false);
        STORE(hooked, false);
        sync_from(0);
    }
    *is_user = 0;
    pthread_mutex_unlock(&lock);
}

EXPORT int64_t counter_live(void) {
    if (LOAD(hooked)) sync_from(SIZE_MAX); /* what was loaded past dlopen_and_patch */
    return LOAD(count.live);
}

EXPORT void counter_reset_peak(void) { STORE(count.peak, counter_live()); }

EXPORT int64_t counter_peak(void) {
    int64_t live = counter_live(), peak = LOAD(count.peak);
    return peak > live ? peak : live; /* a reset may have raced with an allocation */
}

EXPORT int counter_start_curve(size_t capacity, int64_t minimum) {
    size_t bytes;
    if (__builtin_mul_overflow(capacity, sizeof(struct event), &bytes)) return -ENOMEM;
    struct event *events = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (events == MAP_FAILED) return -errno;
    pthread_mutex_lock(&lock);
    counter_stop_curve();
    while (atomic_load(&curve.writers)) sched_yield();
    if (curve.events) munmap(curve.events, curve.capacity * sizeof(struct event));
    curve.events = events;
    curve.capacity = capacity;
    STORE(curve.next, 0);
    atomic_store(&curve.on, true);
    STORE(count.curve_minimum, minimum);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Events that came; the first `capacity` of them were kept, the others dropped. */
EXPORT size_t counter_curve_events(void) { return LOAD(curve.next); }
EXPORT size_t counter_curve_capacity(void) { return curve.capacity; }

/* Copies up to `num` kept events and returns how many. Sorts them by time, as threads may have
 * taken their places in the buffer in a slightly different order. */
EXPORT size_t counter_read_curve(int64_t *times_ns, int64_t *live, size_t num) {
    size_t n = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num && i < curve.capacity; i++) {
        int64_t time = atomic_load(&curve.events[i].time_ns);
        if (!time) continue; /* taken by a thread that has not written it yet */
        size_t at = n++;
        for (; at > 0 && times_ns[at - 1] > time; at--) {
            times_ns[at] = times_ns[at - 1];
            live[at] = live[at - 1];
        }
        times_ns[at] = time;
        live[at] = curve.events[i].live;
    }
    pthread_mutex_unlock(&lock);
    return n;
}
