/* Records -> tensors for a whole batch, without the interpreter.

   Optional: native.py finds what this was compiled to; without it the same is done in Python. Every
   function works on memory that its caller owns, keeps nothing once it returns (`egeria_help` does so
   when it is told to), and runs without the GIL. What came from the disk is not believed: each size is
   bounded by the bytes at hand before it is used. The bytes of a record: docs/format.md. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || UINTPTR_MAX != UINT64_MAX
#error "only where numbers lie as on the disk, and a size has 64 bits"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 /* which alone can choose at load */
#define VECTORISED __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

enum { CHECKSUM_BYTES = 8, PREFIX_BYTES = 16, NUM_FIELDS_AT = 11, LAYOUT_BYTES_AT = 12 };
enum { RAW, ZSTD, SPLIT, BITMAP };
enum { BITMAP_HEAD_BYTES = 16, MOST_PLANES = 4, PAGES_AT_ONCE = 256, BEHIND_BYTES = 1 << 30 };
enum { ABSENT, TRUSTED, VERIFIED };
enum { MARK_BITS = 7, TURN_BITS = 6 };
enum { LOOKED_AT = 64, MOST_DOUBTS = 4096, MOST_ASKED_BYTES = 1 << 18 };
enum { TAKEN_NS = 8000, MOST_PATIENCE = 64, ALONE_EVERY = 16, SPINS = 1 << 12 };
enum { KEPT_BYTES = 16 << 20 }; /* as in native.py */

static const uint64_t AS_THEY_ARE = 1ull << 63;

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
typedef uint64_t __attribute__((aligned(1), may_alias)) u64;

/* Undo the cutting into planes, and the rotation that brought the sign to the lowest bit. */
#define JOIN(TYPE, BITS, ...)                                                            \
    for (int64_t i = 0; i < n; i++) {                                                    \
        const TYPE v = (TYPE)(__VA_ARGS__);                                              \
        ((TYPE *)out)[i] = floating ? (TYPE)((TYPE)(v >> 1) | (TYPE)(v << (BITS - 1))) : v; \
    }

VECTORISED static void join(const uint8_t *const *plane, int64_t n, int width, int floating,
                            uint8_t *out) {
    const uint8_t *a = plane[0], *b = plane[1], *c = plane[2], *d = plane[3];
    if (width == 1) JOIN(uint8_t, 8, a[i])
    if (width == 2) JOIN(u16, 16, a[i] | (uint16_t)b[i] << 8)
    if (width == 4) JOIN(u32, 32, ((const u16 *)a)[i] | (uint32_t)b[i] << 16 | (uint32_t)c[i] << 24)
    if (width == 8)
        JOIN(u64, 64, ((const u32 *)a)[i] | (uint64_t)((const u16 *)b)[i] << 32
                          | (uint64_t)c[i] << 48 | (uint64_t)d[i] << 56)
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

/* Fill `out` with the values where a bit is set (the highest of a byte first), else with zeros. Up
   to VALUES_BEYOND values more than the bits mark are read, never used. */
#define EXPAND_ONE_BY_ONE(TYPE)                                            \
    for (; i < n; i++) {                                                   \
        const TYPE bit = (TYPE)(bits[i >> 3] >> (7 - (i & 7)) & 1);        \
        ((TYPE *)out)[i] = ((const TYPE *)values)[k] & (TYPE)(0 - bit);    \
        k += (int64_t)bit;                                                 \
    }

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
    EXPAND_ONE_BY_ONE(TYPE)

VECTORISED static void expand(const uint8_t *bits, const uint8_t *values, int64_t n, int width,
                              uint8_t *out) {
    int64_t i = 0, k = 0;
    if (width == 1) EXPAND_ONE_BY_ONE(uint8_t)
    if (width == 2) { EXPAND(words8, u16) }
    if (width == 4) { EXPAND(longs8, u32) }
    if (width == 8) EXPAND_ONE_BY_ONE(u64)
}

VECTORISED static uint64_t count_bits(const uint8_t *bits, int64_t n) {
    uint64_t count = 0;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) count += (uint64_t)__builtin_popcountll(word(bits + i / 8));
    for (; i < n; i++) count += bits[i >> 3] >> (7 - (i & 7)) & 1;
    return count;
}

struct decoder {
    zstd_fn *zstd;
    void *context;
    int64_t width;
    int64_t floating;
};

/* Return `promised` bytes that were stored in `stored` bytes, packed or not; NULL if they are not.
   What is packed goes to `room`. */
static const uint8_t *unpacked(const struct decoder *with, const uint8_t *from, uint64_t stored,
                               int packed, uint64_t promised, uint8_t *room) {
    if (!packed) return stored == promised ? from : NULL;
    if (!promised) return NULL;
    return with->zstd(with->context, room, promised, from, stored) == promised ? room : NULL;
}

/* Numbers of bytes in a plane, lowest first. */
static const int PLANES[9][MOST_PLANES] = {
    [1] = {1}, [2] = {1, 1}, [4] = {2, 1, 1}, [8] = {4, 2, 1, 1}};

/* Join `n` elements from planes. room: n * width bytes. */
static int decode_planes(const struct decoder *with, const uint8_t *from, uint64_t size, int64_t n,
                         uint8_t *room, uint8_t *out) {
    const int *bytes = PLANES[with->width];
    const uint8_t *plane[MOST_PLANES] = {0};
    uint64_t num_planes = 0, at, left;
    while (num_planes < MOST_PLANES && bytes[num_planes]) num_planes++;
    if (size < 8 * num_planes) return 0;
    at = 8 * num_planes, left = size - at;
    for (uint64_t i = 0; i < num_planes; i++) {
        const uint64_t head = word(from + 8 * i), stored = head >> 1;
        const uint64_t promised = (uint64_t)n * (uint64_t)bytes[i];
        if (stored > left) return 0;
        plane[i] = unpacked(with, from + at, stored, head & 1, promised, room);
        if (!plane[i]) return 0;
        room += promised, at += stored, left -= stored;
    }
    if (left) return 0;
    join(plane, n, (int)with->width, (int)with->floating, out);
    return 1;
}

/* room: see `egeria_decode`; for planes, values and some more, and marks, in this order. */
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
    if (!bits || count_bits(bits, n) != count) return 0;
    from += BITMAP_HEAD_BYTES + stored, size -= BITMAP_HEAD_BYTES + stored;
    if (!decode_planes(&as, from, size, (int64_t)count, room, values)) return 0;
    expand(bits, values, n, (int)with->width, out);
    return 1;
}

/* Decode one field to exactly `num_bytes` bytes. room: 3 * num_bytes + 80 bytes. */
static int decode_field(const struct decoder *with, uint64_t codec, const uint8_t *from,
                        uint64_t size, uint8_t *room, uint8_t *out, int64_t num_bytes) {
    const uint64_t promised = (uint64_t)num_bytes;
    if (codec == RAW && size == promised) return memcpy(out, from, promised) != NULL;
    if (codec == ZSTD) return unpacked(with, from, size, 1, promised, out) != NULL;
    if (codec == SPLIT) return decode_planes(with, from, size, num_bytes / with->width, room, out);
    if (codec == BITMAP) return decode_bitmap(with, from, size, room, out, num_bytes);
    return 0;
}

/* Decode a field of each of n records into rows of `num_bytes` at out + rows[i] * num_bytes.
   starts, sizes: of the encoded fields in `records`, all within it. found: 1 for those that are
   what they promise. */
void egeria_decode(const struct decoder *with, int codec, int64_t n, const uint8_t *records,
                   const int64_t *starts, const int64_t *sizes, uint8_t *out, const int64_t *rows,
                   int64_t num_bytes, uint8_t *room, uint8_t *found) {
    for (int64_t i = 0; i < n; i++)
        found[i] = (uint8_t)decode_field(with, (uint64_t)codec, records + starts[i],
                                         (uint64_t)sizes[i], room, out + rows[i] * num_bytes,
                                         num_bytes);
}

/* -- serving -------------------------------------------------------------------------------- */

/* A tensor that all records hold. */
struct field {
    int64_t num_bytes;
    int64_t width; /* of an element */
    int64_t floating;
};

/* What is the same from batch to batch. */
struct source {
    int64_t descriptor; /* of the file */
    const uint8_t *map;
    uint64_t map_bytes;
    hash_fn *hash;
    zstd_fn *zstd;
    uint64_t identity; /* of the generation */
    uint64_t variant;
    const uint8_t *head; /* that the records should have, but for checksum and lengths */
    uint64_t head_bytes;
    int64_t num_fields;
    const struct field *fields;
    const uint64_t *table; /* span of each sample by its ID; NULL where the batch has spans */
    uint64_t table_rows;
    uint64_t room_bytes; /* that decoding needs besides */
    struct pace *pace;
    int64_t doubts; /* how many trusted records more are looked at before they are touched */
};

/* How long records of one layout take, and whether help was of any. Any thread may note it. */
struct pace {
    _Atomic int64_t record_ns;  /* for one thread; 0: not known */
    _Atomic int64_t patience;   /* how many batches are served alone after help was of none */
    _Atomic int64_t alone;      /* how many more are */
    _Atomic int64_t num_helped; /* records that helpers served */
};

/* A span is a record's place, with the mark of the round in which it was verified in the lowest
   bits, and its size; a size of 0 if there is none. */
struct batch {
    const int64_t *numbers;     /* sample IDs; NULL where they are no integers: */
    const uint64_t *key_hashes; /* of their keys */
    const uint64_t *spans;
    const int64_t *rows; /* of `out` for each record; NULL: in this order */
    uint8_t *const *out; /* per field */
    uint64_t mark;       /* of the round of trust; what has another one is verified again */
    uint64_t turn;       /* which part of what is trusted is verified again */
    int64_t written;     /* the file's time of modification, in ns; -1 if it does not matter */
    uint8_t *found;      /* how each record was served */
    uint64_t *places;    /* and from where */
};

/* Whether all pages of it are in memory. What is not would be read by touching it, and where the
   disk cannot read it, or the file was cut short, that is a signal which ends the process. */
static int is_resident(const uint8_t *begin, uint64_t num_bytes, uint64_t page) {
    unsigned char resident[PAGES_AT_ONCE];
    uintptr_t at = (uintptr_t)begin & ~(uintptr_t)(page - 1);
    const uintptr_t end = (uintptr_t)begin + num_bytes;
    while (at < end) {
        uint64_t pages = (end - at + page - 1) / page;
        if (pages > PAGES_AT_ONCE) pages = PAGES_AT_ONCE;
        if (mincore((void *)at, pages * page, resident)) return 0;
        for (uint64_t i = 0; i < pages; i++)
            if (!(resident[i] & 1)) return 0;
        at += pages * page;
    }
    return 1;
}

/* Whether the system says what of a file is in memory. Of a page far behind its end it must say that
   it is not; some say of all that it is: gVisor, and Linux of a file that the caller may not write. */
int egeria_can_tell(int fd, uint64_t num_bytes) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t far_behind = (num_bytes + BEHIND_BYTES) & ~(page - 1);
    unsigned char resident = 1;
    void *mapped = mmap(NULL, page, PROT_READ, MAP_SHARED, fd, (off_t)far_behind);
    if (mapped == MAP_FAILED) return 0;
    if (mincore(mapped, page, &resident)) resident = 1;
    munmap(mapped, page);
    return !(resident & 1);
}

static uint64_t key_hash(const struct source *from, const struct batch *of, int64_t i) {
    if (!of->numbers) return of->key_hashes[i];
    uint8_t key[13] = {'i'};
    const uint64_t number = (uint64_t)of->numbers[i] ^ 1ull << 63;
    for (int j = 0; j < 4; j++) key[1 + j] = (uint8_t)(from->variant >> (24 - 8 * j));
    for (int j = 0; j < 8; j++) key[5 + j] = (uint8_t)(number >> (56 - 8 * j));
    return from->hash(key, sizeof key, 0);
}

/* Whether a record is what its checksum says, which covers its head, its key and the generation. */
static int is_intact(const struct source *from, uint64_t key, const uint8_t *record,
                     uint64_t size) {
    uint32_t layout_bytes;
    memcpy(&layout_bytes, record + LAYOUT_BYTES_AT, sizeof layout_bytes);
    const uint64_t head = PREFIX_BYTES + 8ull * record[NUM_FIELDS_AT] + layout_bytes;
    if (head > size) return 0;
    const uint64_t of_head = from->hash(record + CHECKSUM_BYTES, head - CHECKSUM_BYTES, 0);
    return from->hash(record + head, size - head, of_head ^ key ^ from->identity) == word(record);
}

/* Decode what lies behind a head that is like all others'. */
static int decode_record(const struct source *from, void *context, const uint8_t *record,
                         uint64_t size, uint8_t *const *out, int64_t row, uint8_t *room) {
    const uint64_t lengths = PREFIX_BYTES + 8 * (uint64_t)from->num_fields;
    uint64_t at = from->head_bytes;
    if (size < at) return 0;
    if (memcmp(record + CHECKSUM_BYTES, from->head, PREFIX_BYTES - CHECKSUM_BYTES)) return 0;
    if (memcmp(record + lengths, from->head + lengths - CHECKSUM_BYTES, at - lengths)) return 0;
    for (int64_t j = 0; j < from->num_fields; j++) {
        const struct field *field = from->fields + j;
        const struct decoder with = {from->zstd, context, field->width, field->floating};
        const uint64_t entry = word(record + PREFIX_BYTES + 8 * j);
        const uint64_t codec = entry >> 56, stored = entry & ~0ull >> 8;
        if (stored > size - at) return 0;
        if (!decode_field(&with, codec, record + at, stored, room,
                          out[j] + row * field->num_bytes, field->num_bytes))
            return 0;
        at += stored;
    }
    return at == size;
}

static const uint64_t *span_of(const struct source *from, const struct batch *of, int64_t i) {
    static const uint64_t nowhere[2] = {0, 0};
    if (!from->table) return of->spans + 2 * i;
    const uint64_t number = (uint64_t)of->numbers[i];
    return number < from->table_rows ? from->table + 2 * number : nowhere;
}

/* Look up, while the record before it is copied, where the pages of a record are: that takes as long
   as copying them. */
static void ask_for(const struct source *from, const struct batch *of, int64_t i, uint64_t page) {
    const uint64_t *span = span_of(from, of, i);
    const uint64_t place = __atomic_load_n(span, __ATOMIC_RELAXED);
    const uint64_t size = __atomic_load_n(span + 1, __ATOMIC_RELAXED);
    for (uint64_t at = 0; at < size && at < MOST_ASKED_BYTES; at += page)
        __builtin_prefetch(from->map + place + at);
}

/* Whether a record is in memory. Where the system seems to keep the file there, of those that were
   read before only some are looked at. */
static int is_at_hand(struct source *from, const uint8_t *record, uint64_t size, int must_look,
                      uint64_t page) {
    const int64_t doubts = __atomic_load_n(&from->doubts, __ATOMIC_RELAXED);
    if (!must_look && doubts <= 0) return 1;
    const int is_there = is_resident(record, size, page);
    if (!is_there || doubts > 0)
        __atomic_store_n(&from->doubts, is_there ? doubts - 1 : MOST_DOUBTS, __ATOMIC_RELAXED);
    return is_there;
}

/* Where a file is touched that was cut short meanwhile, or that the disk cannot read, the system
   sends a signal, which would end the process: the thread that reads goes on behind that record.
   Every other SIGBUS is left to whoever would have had it. */
static __thread __attribute__((tls_model("initial-exec"))) volatile struct {
    const uint8_t *map;
    uint64_t map_bytes; /* 0 while this thread reads nothing */
    sigjmp_buf *back;
} touched;
static struct sigaction others;
static volatile sig_atomic_t is_handed_over;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)context;
    if ((uint64_t)((const uint8_t *)info->si_addr - touched.map) < touched.map_bytes)
        siglongjmp(*touched.back, 1);
    /* faulthandler ends by what was there before it, which may be this one: not twice. */
    const struct sigaction end = {.sa_handler = SIG_DFL};
    sigaction(number, is_handed_over ? &end : &others, NULL);
    is_handed_over = 1;
    if (info->si_code <= 0) raise(number); /* else it happens again */
}

/* Handle the signal, unless that is so: others may have come between. */
static void handle_bus_errors(void) {
    static int is_busy;
    const struct sigaction ours = {
        .sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now)) return;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus_error) return;
    if (__atomic_exchange_n(&is_busy, 1, __ATOMIC_ACQUIRE)) return; /* another thread does */
    others = now, is_handed_over = 0;
    sigaction(SIGBUS, &ours, NULL);
    __atomic_store_n(&is_busy, 0, __ATOMIC_RELEASE);
}

/* Whether the file is as it was then; always, where that does not matter. */
static int is_unchanged(const struct source *from, const struct batch *of) {
    struct stat now;
    if (of->written < 0) return 1;
    if (fstat((int)from->descriptor, &now)) return 0;
    return now.st_mtim.tv_sec * 1000000000ll + now.st_mtim.tv_nsec == of->written;
}

/* A batch that is being served; each thread takes some records of it after the other. */
struct work {
    struct source *from;
    const struct batch *of;
    int64_t count, step;
    int64_t next;
    int64_t num_served, num_verified;
};

/* What one thread does of it. */
struct part {
    struct source *from;
    const struct batch *of;
    int64_t end;
    int64_t num_served, num_verified;
    void *context;
    uint8_t *room;
    uint64_t page;
};

static __attribute__((noinline)) void serve_one(struct part *part, int64_t i) {
    struct source *const from = part->from;
    const struct batch *const of = part->of;
    /* Read once: other threads set spans meanwhile. Half of one and half of another is found out by
       the checksum, or by the record's own length. */
    const uint64_t *span = span_of(from, of, i);
    const uint64_t marked = __atomic_load_n(span, __ATOMIC_RELAXED);
    const uint64_t size = __atomic_load_n(span + 1, __ATOMIC_RELAXED);
    const uint64_t place = marked & ~(uint64_t)MARK_BITS;
    const uint64_t mixed = place * 0x9E3779B97F4A7C15ull >> (64 - TURN_BITS);
    const int is_trusted = (marked & MARK_BITS) == of->mark;
    const int must_verify = !is_trusted || mixed == of->turn;
    const int must_look = must_verify || i % LOOKED_AT == 0;
    const uint8_t *record = from->map + place;
    of->found[i] = ABSENT;
    if (i + 1 < part->end) ask_for(from, of, i + 1, part->page);
    if (size < PREFIX_BYTES || place > from->map_bytes || size > from->map_bytes - place) return;
    if (!is_at_hand(from, record, size, must_look, part->page)) return;
    if (must_verify && !is_intact(from, key_hash(from, of, i), record, size)) return;
    if (!decode_record(from, part->context, record, size, of->out, of->rows ? of->rows[i] : i,
                       part->room))
        return;
    of->found[i] = is_trusted ? TRUSTED : VERIFIED;
    of->places[i] = place;
    part->num_verified += !is_trusted, part->num_served++;
}

/* Take records of a batch until all are taken; return how many were served. room: of one thread. */
static int64_t take_part(struct work *work, void *context, uint8_t *room) {
    struct source *const from = work->from;
    struct part part = {from, work->of, 0, 0, 0, context, room, (uint64_t)sysconf(_SC_PAGESIZE)};
    volatile int64_t at = 0; /* as it was, where the signal comes */
    sigjmp_buf back;
    if (sigsetjmp(back, 0)) {
        __atomic_store_n(&from->doubts, MOST_DOUBTS, __ATOMIC_RELAXED);
        at = at + 1;
    }
    touched.map = from->map, touched.back = &back, touched.map_bytes = from->map_bytes;
    for (;; at = at + 1) {
        if (at >= part.end) {
            at = __atomic_fetch_add(&work->next, work->step, __ATOMIC_RELAXED);
            if (at >= work->count) break;
            part.end = at + work->step < work->count ? at + work->step : work->count;
        }
        serve_one(&part, at);
    }
    touched.map_bytes = 0;
    __atomic_fetch_add(&work->num_served, part.num_served, __ATOMIC_RELAXED);
    __atomic_fetch_add(&work->num_verified, part.num_verified, __ATOMIC_RELAXED);
    return part.num_served;
}

/* -- helpers -------------------------------------------------------------------------------- */

/* Threads that sleep until a batch is worth dividing. Whoever asks them goes on at once, and waits
   in the end for those alone that have come meanwhile, until each is done with what it took. */
struct helpers {
    pthread_mutex_t lock;
    pthread_cond_t asked, left;
    struct work *work; /* NULL if there is none */
    int64_t num_threads;
    int64_t worth_ns;   /* a batch that takes less is not divided; 0: every one is */
    int64_t num_wanted; /* that may still come */
    _Atomic int64_t num_inside;
    int64_t is_over;
};

uint64_t egeria_helpers_bytes(void) { return sizeof(struct helpers); }

void egeria_begin_helpers(struct helpers *with, int64_t num_threads, int64_t worth_ns) {
    memset(with, 0, sizeof *with);
    with->num_threads = num_threads, with->worth_ns = worth_ns;
    pthread_mutex_init(&with->lock, NULL);
    pthread_cond_init(&with->asked, NULL);
    pthread_cond_init(&with->left, NULL);
}

/* Send all home. */
void egeria_end_helpers(struct helpers *with) {
    pthread_mutex_lock(&with->lock);
    with->is_over = 1;
    pthread_cond_broadcast(&with->asked);
    pthread_mutex_unlock(&with->lock);
}

/* Help until the end, as one thread. context: zstd's. */
void egeria_help(struct helpers *with, void *context) {
    uint8_t *room = NULL;
    uint64_t room_bytes = 0;
    sigset_t others_handle; /* all but its own faults */
    sigfillset(&others_handle);
    sigdelset(&others_handle, SIGBUS), sigdelset(&others_handle, SIGSEGV);
    sigdelset(&others_handle, SIGILL), sigdelset(&others_handle, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &others_handle, NULL);
    pthread_mutex_lock(&with->lock);
    while (!with->is_over) {
        struct work *work = with->work;
        if (!work || !with->num_wanted) {
            pthread_cond_wait(&with->asked, &with->lock);
            continue;
        }
        with->num_wanted--, with->num_inside++;
        pthread_mutex_unlock(&with->lock);
        if (work->from->room_bytes > room_bytes) {
            free(room);
            room_bytes = work->from->room_bytes;
            if (!(room = malloc(room_bytes))) room_bytes = 0;
        }
        if (room_bytes >= work->from->room_bytes)
            work->from->pace->num_helped += take_part(work, context, room);
        if (room_bytes > KEPT_BYTES) free(room), room = NULL, room_bytes = 0;
        pthread_mutex_lock(&with->lock);
        with->num_inside--;
        pthread_cond_signal(&with->left);
    }
    pthread_mutex_unlock(&with->lock);
    free(room);
}

/* Ask for help; whether it may come. */
static int ask_helpers(struct helpers *with, struct work *work, int64_t num_wanted) {
    pthread_mutex_lock(&with->lock); /* which nobody holds while they work */
    const int is_free = !with->work && !with->is_over; /* another thread may have asked */
    if (is_free) {
        with->work = work, with->num_wanted = num_wanted;
        if (num_wanted == 1) pthread_cond_signal(&with->asked);
        else pthread_cond_broadcast(&with->asked);
    }
    pthread_mutex_unlock(&with->lock);
    return is_free;
}

/* Wait for those that have come. */
static void dismiss_helpers(struct helpers *with) {
    pthread_mutex_lock(&with->lock);
    with->num_wanted = 0;
    pthread_mutex_unlock(&with->lock);
    /* Going to sleep takes longer than what they still have to do. */
    for (int i = 0; i < SPINS && with->num_inside; i++)
        continue;
    pthread_mutex_lock(&with->lock);
    while (with->num_inside) pthread_cond_wait(&with->left, &with->lock);
    with->work = NULL;
    pthread_mutex_unlock(&with->lock);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* How many should help with a batch: as many as each find enough to do. Where help was of none, as on
   a machine whose cores are busy, it is not asked for so soon again; now and then a batch is served
   alone to know what that takes. Other threads count, too: nothing depends on it. */
static int64_t num_wanted(struct pace *pace, const struct helpers *with, int64_t count) {
    if (!with || count < 2) return 0;
    if (!with->worth_ns) return with->num_threads;
    const int64_t wanted = pace->record_ns * count / with->worth_ns;
    if (wanted <= 0 || pace->alone-- > 0) return 0;
    return wanted < with->num_threads ? wanted : with->num_threads;
}

static void note_taken(struct pace *pace, int64_t count, int64_t taken_ns, int was_helped) {
    if (!was_helped) {
        const int64_t before = pace->record_ns, record_ns = 1 + taken_ns / count;
        pace->record_ns = before ? before + (record_ns - before) / 4 : record_ns;
    } else if (taken_ns < pace->record_ns * count) {
        pace->patience = 0;
        if (pace->alone < -ALONE_EVERY) pace->alone = 1;
    } else {
        pace->patience = pace->patience ? 2 * pace->patience : 1;
        if (pace->patience > MOST_PATIENCE) pace->patience = MOST_PATIENCE;
        pace->alone = pace->patience;
    }
}

/* Decode the records of a batch, as far as they are in memory, intact and laid out like the others.
   Return how many of them were not trusted before; -1 if one is absent. Where the file was written
   to before or meanwhile, nothing of it counts: -2.
   context: zstd's, for one thread. room: room_bytes. helpers: NULL if there are none. */
int64_t egeria_serve(struct source *from, const struct batch *of, int64_t count, void *context,
                     uint8_t *room, struct helpers *helpers) {
    struct work work = {.from = from, .of = of, .count = count};
    const int64_t begun_ns = now_ns(), wanted = num_wanted(from->pace, helpers, count);
    if (!is_unchanged(from, of)) return -2;
    handle_bus_errors();
    const int64_t record_ns = from->pace->record_ns;
    work.step = record_ns > 0 ? 1 + TAKEN_NS / record_ns : 1;
    const int is_helped = wanted && ask_helpers(helpers, &work, wanted);
    if (!is_helped) work.step = count;
    take_part(&work, context, room);
    if (is_helped) dismiss_helpers(helpers);
    if (!is_unchanged(from, of)) return -2;
    if (count) note_taken(from->pace, count, now_ns() - begun_ns, is_helped);
    return work.num_served == count ? work.num_verified : -1;
}

/* Bring records into memory: all are asked for, then each is waited for. Where the disk cannot read
   one, that is seen when it is read by itself. room: num_bytes bytes. */
void egeria_load(int fd, int64_t n, const uint64_t *spans, uint8_t *room, uint64_t num_bytes) {
    for (int64_t i = 0; i < n; i++)
        (void)posix_fadvise(fd, (off_t)(spans[2 * i] & ~(uint64_t)MARK_BITS),
                            (off_t)spans[2 * i + 1], POSIX_FADV_WILLNEED);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t place = spans[2 * i] & ~(uint64_t)MARK_BITS, end = place + spans[2 * i + 1];
        for (uint64_t at = place; at < end; at += num_bytes)
            if (pread(fd, room, end - at < num_bytes ? end - at : num_bytes, (off_t)at) <= 0)
                break;
    }
}

/* See SHAPE in native.py. */
const uint64_t egeria_shape[] = {5, sizeof(struct field), sizeof(struct source),
                                 sizeof(struct batch), sizeof(struct decoder),
                                 sizeof(struct pace)};
