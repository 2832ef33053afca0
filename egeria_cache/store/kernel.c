/* Records -> tensors for a whole batch, without the interpreter.

   Optional: codecs.py finds what this was compiled to; without it raw and zstd records are read in
   Python. Every function works on memory that its caller owns, keeps nothing once it returns, and runs
   without the GIL. What came from the disk is not believed: each size is bounded by the bytes at hand
   before it is used, or an address is made of it. The bytes of a record: docs/format.md. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 /* which alone can choose at load */
#define VECTORISED __attribute__((target_clones("arch=x86-64-v3", "default")))
enum { LIBRARY_BYTES = 240 }; /* as many are hashed by the library, more while they are copied */
#else
#define VECTORISED
enum { LIBRARY_BYTES = INT32_MAX };
#endif

enum { CHECKSUM_BYTES = 8, HEAD_BYTES = 16, BITMAP_HEAD_BYTES = 16, MOST_HEAD_BYTES = 4096 };
enum { RAW, ZSTD, SPLIT, BITMAP };
enum { ABSENT, INTACT, DAMAGED, UNREADABLE }; /* as in codecs.py */

static const uint64_t AS_THEY_ARE = 1ull << 63, STORED = ~0ull >> 8; /* of a field, not its codec */

typedef uint64_t hash_fn(const void *data, size_t num_bytes, uint64_t seed);
typedef size_t zstd_fn(void *context, void *out, size_t room, const void *data, size_t num_bytes);

static uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* -- decoding ------------------------------------------------------------------------------- */

typedef uint16_t __attribute__((aligned(1), may_alias)) u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32;

/* Undo the cutting into planes, and the rotation that brought the sign to the lowest bit. */
#define JOIN(TYPE, BITS, ...)                                                            \
    for (int64_t i = 0; i < n; i++) {                                                    \
        const TYPE v = (TYPE)(__VA_ARGS__);                                              \
        ((TYPE *)out)[i] = floating ? (TYPE)((TYPE)(v >> 1) | (TYPE)(v << (BITS - 1))) : v; \
    }

VECTORISED static void join(const uint8_t *const *plane, int64_t n, int width, int floating,
                            uint8_t *out) {
    const uint8_t *a = plane[0], *b = plane[1], *c = plane[2];
    if (width == 2) JOIN(u16, 16, a[i] | (uint16_t)b[i] << 8)
    if (width == 4) JOIN(u32, 32, ((const u16 *)a)[i] | (uint32_t)b[i] << 16 | (uint32_t)c[i] << 24)
}

/* Per byte of a bitmap, for each of its bits, the highest first: how many are set before it; UNSET
   if it is not set itself. */
enum { UNSET = 0x80, VALUES_BEYOND = 8 };
static uint8_t order[256][8];

__attribute__((constructor)) static void number_bits(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, k = 0; bit < 8; bit++)
            order[byte][bit] = byte >> (7 - bit) & 1 ? (uint8_t)k++ : UNSET;
}

typedef uint8_t bytes8 __attribute__((vector_size(8)));
typedef uint16_t words8 __attribute__((vector_size(16)));
typedef uint32_t longs8 __attribute__((vector_size(32)));

/* Fill `out` with the values where a bit is set (the highest of a byte first), else with zeros; return
   how many are set. Up to VALUES_BEYOND values more than these are read, never used. */
#define EXPAND(VECTOR, TYPE)                                               \
    for (; i + 8 <= n; i += 8) {                                           \
        bytes8 narrow;                                                     \
        VECTOR some;                                                       \
        memcpy(&narrow, order[bits[i >> 3]], sizeof narrow);               \
        memcpy(&some, values + k * (int64_t)sizeof(TYPE), sizeof some);    \
        const VECTOR which = __builtin_convertvector(narrow, VECTOR);      \
        some = __builtin_shuffle(some, which) & (VECTOR)(which != UNSET);  \
        memcpy(out + i * (int64_t)sizeof(TYPE), &some, sizeof some);       \
        k += __builtin_popcount(bits[i >> 3]);                             \
    }                                                                      \
    for (; i < n; i++) {                                                   \
        const TYPE bit = (TYPE)(bits[i >> 3] >> (7 - (i & 7)) & 1);        \
        ((TYPE *)out)[i] = ((const TYPE *)values)[k] & (TYPE)(0 - bit);    \
        k += (int64_t)bit;                                                 \
    }

VECTORISED static int64_t expand(const uint8_t *bits, const uint8_t *values, int64_t n, int width,
                              uint8_t *out) {
    int64_t i = 0, k = 0;
    if (width == 2) { EXPAND(words8, u16) }
    if (width == 4) { EXPAND(longs8, u32) }
    return k;
}

struct decoder {
    zstd_fn *zstd;
    void *context;
    int64_t width, floating;
};

/* Return what was stored, if it is `promised` bytes, else NULL; what is packed goes to `room`. */
static const uint8_t *unpacked(const struct decoder *with, const uint8_t *from, uint64_t stored,
                               int packed, uint64_t promised, uint8_t *room) {
    if (!packed || !promised) return !packed && stored == promised ? from : NULL;
    return with->zstd(with->context, room, promised, from, stored) == promised ? room : NULL;
}

/* Join `n` elements from planes. room: n * width bytes. */
static int decode_planes(const struct decoder *with, const uint8_t *from, uint64_t size, int64_t n,
                         uint8_t *room, uint8_t *out) {
    const uint8_t *plane[3] = {0};
    const uint64_t num_planes = with->width == 4 ? 3 : with->width == 2 ? 2 : 0;
    uint64_t at = 8 * num_planes, left = size - at;
    if (!num_planes || size < at) return 0;
    for (uint64_t i = 0; i < num_planes; i++) {
        const uint64_t head = word(from + 8 * i), stored = head >> 1;
        const uint64_t promised = (uint64_t)n << (num_planes == 3 && !i); /* 2, 1, 1 or 1, 1 bytes */
        if (stored > left) return 0;
        plane[i] = unpacked(with, from + at, stored, head & 1, promised, room);
        if (!plane[i]) return 0;
        room += promised, at += stored, left -= stored;
    }
    if (left) return 0;
    join(plane, n, (int)with->width, (int)with->floating, out);
    return 1;
}

/* room: for planes, values and some more, and marks, in this order. */
static int decode_bitmap(const struct decoder *with, const uint8_t *from, uint64_t size,
                         uint8_t *room, uint8_t *out, int64_t num_bytes) {
    const int64_t n = num_bytes / with->width;
    if (size < BITMAP_HEAD_BYTES || !n) return 0;
    struct decoder as = *with;
    if (word(from) & AS_THEY_ARE) as.floating = 0; /* not rotated */
    const uint64_t count = word(from) & ~AS_THEY_ARE, head = word(from + 8), stored = head >> 1;
    uint8_t *const values = room + num_bytes;
    uint8_t *const marks = values + num_bytes + VALUES_BEYOND * with->width;
    if (count > (uint64_t)n || stored > size - BITMAP_HEAD_BYTES) return 0;
    const uint8_t *bits = unpacked(with, from + BITMAP_HEAD_BYTES, stored, head & 1,
                                   (uint64_t)(n + 7) / 8, marks);
    from += BITMAP_HEAD_BYTES + stored, size -= BITMAP_HEAD_BYTES + stored;
    if (!bits || !decode_planes(&as, from, size, (int64_t)count, room, values)) return 0;
    return expand(bits, values, n, (int)with->width, out) == (int64_t)count;
}

/* Decode one field to exactly `num_bytes` bytes. room: 3 * num_bytes + 80 bytes. */
int egeria_decode(const struct decoder *with, int codec, const uint8_t *from, uint64_t size,
                  uint8_t *room, uint8_t *out, int64_t num_bytes) {
    const uint64_t promised = (uint64_t)num_bytes;
    if (codec == RAW && size == promised) return memcpy(out, from, promised) != NULL;
    if (codec == ZSTD) return unpacked(with, from, size, 1, promised, out) != NULL;
    if (codec == SPLIT) return decode_planes(with, from, size, num_bytes / with->width, room, out);
    if (codec == BITMAP) return decode_bitmap(with, from, size, room, out, num_bytes);
    return 0;
}

/* -- copying and hashing -------------------------------------------------------------------- */

/* As in XXH3: where in the secret the keys of its steps are, what sums are multiplied with. */
enum { LINE_BYTES = 64, BLOCK_LINES = 16, MERGE_KEY = 11, LAST_KEY = 121, SCRAMBLE_KEY = 128 };
static const uint64_t PRIME = 0x9E3779B185EBCA87;
static const uint32_t SMALL_PRIME = 0x9E3779B1;
static const uint64_t SECRET[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
typedef uint64_t lanes __attribute__((vector_size(LINE_BYTES / 2)));

/* Copy a line, and add it to the sums. */
static inline void add_line(lanes *sums, uint8_t *to, const uint8_t *from, const uint8_t *secret) {
    for (int i = 0; i < 2; i++) {
        const size_t at = i * sizeof(lanes);
        lanes some, key;
        memcpy(&some, from + at, sizeof some);
        memcpy(&key, secret + at, sizeof key);
        memcpy(to + at, &some, sizeof some);
        sums[i] += __builtin_shuffle(some, (lanes){1, 0, 3, 2});
        key ^= some;
        sums[i] += (key & UINT32_MAX) * (key >> 32);
    }
}

/* Copy more than 240 bytes and return their XXH3-64: they are read once, while what comes next is
   fetched to the caches. 128 rows of 32 KiB take 0.25 ms; memcpy, then the library's hash, 0.37. */
VECTORISED static uint64_t copy_hashed(uint8_t *to, const uint8_t *from, uint64_t size,
                                       uint64_t seed, const uint8_t *next) {
    lanes sums[] = {{0xC2B2AE3D, PRIME, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9},
                    {0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, SMALL_PRIME}};
    const uint64_t num_lines = (size - 1) / LINE_BYTES, whole = num_lines * LINE_BYTES;
    uint64_t words[24], sum = size * PRIME;
    const uint8_t *const secret = (const uint8_t *)words;
    for (int i = 0; i < 24; i++) words[i] = SECRET[i] + (i % 2 ? -seed : seed);
    for (uint64_t n = 0; n < num_lines; n++) {
        const uint64_t at = n * LINE_BYTES, turn = n % BLOCK_LINES;
        __builtin_prefetch(next + at, 0, 2);
        add_line(sums, to + at, from + at, secret + 8 * turn);
        for (int i = 0; i < 2 && turn == BLOCK_LINES - 1; i++) {
            lanes key;
            memcpy(&key, secret + SCRAMBLE_KEY + i * sizeof key, sizeof key);
            sums[i] = (sums[i] ^ sums[i] >> 47 ^ key) * SMALL_PRIME;
        }
    }
    memcpy(to + whole, from + whole, size - whole);
    add_line(sums, to + size - LINE_BYTES, to + size - LINE_BYTES, secret + LAST_KEY);
    for (int i = 0; i < 8; i += 2) {
        const uint8_t *const at = secret + MERGE_KEY + 8 * i;
        const lanes half = sums[i / 4];
        const uint64_t one = half[i % 4] ^ word(at), other = half[i % 4 + 1] ^ word(at + 8);
        const unsigned __int128 product = (unsigned __int128)one * other;
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9;
    return sum ^ sum >> 32;
}

/* -- reading -------------------------------------------------------------------------------- */

/* A tensor of fixed size that all records hold; row i of it begins at out + i * num_bytes. */
struct column {
    uint8_t *out;
    int64_t num_bytes, width, floating;
};

struct entry {
    uint64_t place; /* in the file */
    uint32_t size, block;
};

struct batch {
    const uint8_t *map; /* of the file */
    uint64_t map_bytes;
    int64_t descriptor; /* of the file */
    uint64_t seed;      /* of the checksums: the generation and the layout */
    const struct column *columns;
    int64_t num_fields;
    const struct entry *entries; /* of each record */
    const uint8_t *keys;         /* one behind the other */
    const uint16_t *key_bytes;   /* of each */
    uint8_t *found;              /* how each was read; ABSENT before */
    uint8_t *room;               /* of each of two threads: for decoding, then for a whole record */
    void *context, *other;       /* of zstd; without the other, one thread reads all */
    uint64_t decode_bytes, room_bytes;
    hash_fn *hash;
    zstd_fn *zstd;
    int64_t waits, count;        /* for the disk, else what is not in memory stays ABSENT; records */
    int64_t *num_drawn;          /* of those that a thread has read or will */
};

/* Where a mapped file was cut short, or the disk cannot read it, touching it is a signal that ends the
   process. A copy that meets it ends there; every other one is left to whoever would have had it. */
static __thread __attribute__((tls_model("initial-exec"))) sigjmp_buf *volatile copying;
static struct sigaction others;
static volatile sig_atomic_t is_handed_over;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    if (copying && info->si_code > 0) siglongjmp(*copying, 1); /* by a fault; nobody sent it */
    /* faulthandler ends by what was there before it, which may be this one: not twice. */
    const struct sigaction end = {.sa_handler = SIG_DFL};
    sigaction(number, is_handed_over ? &end : &others, NULL);
    is_handed_over = 1;
    if (info->si_code <= 0) raise(number); /* else it happens again */
}

/* Handle the signal, unless that is so: others may have come between. */
static void handle_bus_errors(void) {
    const struct sigaction ours = {
        .sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now)) return;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus_error) return;
    others = now, is_handed_over = 0;
    sigaction(SIGBUS, &ours, NULL);
}

/* Copy from the map; whether it could be read. Nothing else touches it, and this once: what is
   verified is what is used, whoever writes to the file meanwhile. A long field is hashed from `sum`
   on; `next` is where something is read after it. */
static __attribute__((noinline)) int copied(uint8_t *to, const uint8_t *from, uint64_t size,
                                            uint64_t *sum, const uint8_t *next) {
    sigjmp_buf back;
    const int failed = sigsetjmp(back, 0);
    if (!failed) {
        copying = &back;
        __asm__ volatile("" ::: "memory");
        if (size > LIBRARY_BYTES && sum) *sum = copy_hashed(to, from, size, *sum, next);
        else memcpy(to, from, size);
        __asm__ volatile("" ::: "memory");
    }
    copying = NULL;
    return !failed;
}

/* Copy a record, what is raw to its row and the rest to the room; verify it, and decode it. */
static int read_one(const struct batch *of, int64_t i, uint64_t place, const uint8_t *key,
                    const uint8_t *next) {
    const uint64_t size = of->entries[i].size, key_bytes = of->key_bytes[i];
    const uint64_t fields = HEAD_BYTES + ((key_bytes + 7) & ~7ull);
    const uint64_t start = fields + 8 * (uint64_t)of->num_fields;
    const uint8_t *const record = of->map + place;
    uint8_t head[MOST_HEAD_BYTES], *const room = of->room + of->decode_bytes;
    const uint32_t sizes[] = {(uint32_t)size, (uint32_t)key_bytes};
    if (start > sizeof head || size < start || size > of->room_bytes - of->decode_bytes)
        return DAMAGED;
    __builtin_prefetch(next, 0, 2);
    if (!copied(head, record, start, NULL, NULL)) return UNREADABLE;
    if (memcmp(head + CHECKSUM_BYTES, sizes, sizeof sizes)) return DAMAGED;
    if (memcmp(head + HEAD_BYTES, key, key_bytes)) return DAMAGED;
    uint64_t at = start, sum = of->hash(head + CHECKSUM_BYTES, start - CHECKSUM_BYTES, of->seed);
    for (int64_t j = 0; j < of->num_fields; j++) {
        const struct column *column = of->columns + j;
        const uint64_t field = word(head + fields + 8 * (uint64_t)j), stored = field & STORED;
        const int is_raw = field == (uint64_t)column->num_bytes;
        uint8_t *const to = is_raw ? column->out + i * column->num_bytes : room + at;
        if (stored > size - at) return DAMAGED;
        if (!copied(to, record + at, stored, &sum, next + at)) return UNREADABLE;
        if (stored <= LIBRARY_BYTES) sum = of->hash(to, stored, sum);
        at += stored;
    }
    if (at != size || sum != word(head)) return DAMAGED;
    at = start;
    for (int64_t j = 0; j < of->num_fields; j++) {
        const struct column *column = of->columns + j;
        const struct decoder with = {of->zstd, of->context, column->width, column->floating};
        const uint64_t field = word(head + fields + 8 * (uint64_t)j), stored = field & STORED;
        if (field != (uint64_t)column->num_bytes
            && !egeria_decode(&with, (int)(field >> 56), room + at, stored, of->room,
                              column->out + i * column->num_bytes, column->num_bytes))
            return DAMAGED;
        at += stored;
    }
    return INTACT;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* How often this thread has waited for a disk. */
static int64_t num_waits(void) {
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_majflt;
}

/* Where a record lies, if it is all in the part of the map that there is; else no place in it. */
static uint64_t place_of(const struct batch *of, int64_t i) {
    const uint64_t place = of->entries[i].place, size = of->entries[i].size, end = of->map_bytes;
    return place && place <= end && size <= end - place ? place : end;
}

/* Whether the beginning of a record had to be waited for; it is in memory then. */
static int was_waited_for(const uint8_t *record, int64_t waits_before) {
    const int64_t before_ns = now_ns();
    uint8_t byte;
    return copied(&byte, record, sizeof byte, NULL, NULL) /* memory takes no 4 us */
           && now_ns() - before_ns > 4000 && num_waits() > waits_before;
}

/* Read what no other thread has drawn. Where a record was not in memory, all that are left are asked
   for at once, before they are waited for; or they stay ABSENT, if this does not wait. */
static void read_drawn(const struct batch *of) {
    const uint8_t *key = of->keys;
    const int64_t waits_before = num_waits(), some = of->count / 16 + 1;
    for (int64_t i = 0, first = 0, end = 0, is_asked_for = 0; i < of->count; key += of->key_bytes[i++]) {
        if (i == end)
            first = __atomic_fetch_add(of->num_drawn, some, __ATOMIC_RELAXED), end = first + some;
        if (i < first || !of->entries[i].size) continue;
        const uint64_t place = place_of(of, i);
        if (place < of->map_bytes && !is_asked_for && was_waited_for(of->map + place, waits_before)) {
            is_asked_for = 1;
            if (!of->waits) break;
            for (const struct entry *one = of->entries + i; one < of->entries + of->count; one++)
                if (one->size)
                    (void)posix_fadvise((int)of->descriptor, (off_t)one->place, one->size,
                                        POSIX_FADV_WILLNEED);
        }
        const uint8_t *next = of->map + place_of(of, i + 1 < of->count ? i + 1 : i);
        of->found[i] = DAMAGED;
        if (place < of->map_bytes) of->found[i] = (uint8_t)read_one(of, i, place, key, next);
    }
}

/* A process has one helper at a time, which is not waited for until it has a core: whoever comes
   second, it to begin or its reader to end, makes way for the next one. */
static enum { FREE, WANTED, MET } helper_is;
static struct batch helped;

static void *help(void *nothing) {
    if (__sync_fetch_and_add(&helper_is, 1) == WANTED) read_drawn(&helped);
    else __atomic_store_n(&helper_is, FREE, __ATOMIC_RELEASE);
    return nothing;
}

/* Read records, each of which holds all columns, to the rows of the same numbers. */
void egeria_read(struct batch *of) {
    struct stat file;
    sigset_t bus_error, before;
    pthread_t helper;
    int64_t num_drawn = 0;
    of->num_drawn = &num_drawn;
    if (fstat((int)of->descriptor, &file) || !of->map) of->map_bytes = 0;
    else if ((uint64_t)file.st_size < of->map_bytes) of->map_bytes = (uint64_t)file.st_size;
    handle_bus_errors();
    sigemptyset(&bus_error), sigaddset(&bus_error, SIGBUS); /* which kills where it is blocked */
    pthread_sigmask(SIG_UNBLOCK, &bus_error, &before);
    int is_helped = of->other && __sync_bool_compare_and_swap(&helper_is, FREE, WANTED);
    if (is_helped) {
        helped = *of, helped.room += of->room_bytes, helped.context = of->other;
        if (pthread_create(&helper, NULL, help, NULL)) is_helped = helper_is = FREE;
    }
    read_drawn(of);
    if (is_helped && __sync_fetch_and_add(&helper_is, 1) == WANTED) pthread_detach(helper);
    else if (is_helped)
        pthread_join(helper, NULL), __atomic_store_n(&helper_is, FREE, __ATOMIC_RELEASE);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* See SHAPE in codecs.py. */
const uint64_t egeria_shape[] = {14, sizeof(struct batch) / sizeof(uint64_t)};
