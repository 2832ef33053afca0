/* Records -> tensors for a whole batch, and raw tensors -> records, without the interpreter.

   Optional: native.py finds what this was compiled to; without it raw and zstd records are read in
   Python. Every function works on memory that its caller owns, keeps nothing once it returns, and runs
   without the GIL. What came from the disk is not believed: each size is bounded by the bytes at hand
   before it is used, or an address is made of it. The bytes of a record: docs/format.md. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || UINTPTR_MAX != UINT64_MAX
#error "only where numbers lie as on the disk, and a size has 64 bits"
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 /* which alone can choose at load */
#define VECTORISED __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

enum { CHECKSUM_BYTES = 8, SIZE_AT = 8, KEY_BYTES_AT = 14, HEAD_BYTES = 16 };
enum { RAW, ZSTD, SPLIT, BITMAP };
enum { BITMAP_HEAD_BYTES = 16, MOST_PLANES = 4, MOST_FIELDS = 255, MOST_HEAD_BYTES = 4096 };
enum { ABSENT, INTACT, DAMAGED, UNREADABLE }; /* as in native.py */

static const uint64_t AS_THEY_ARE = 1ull << 63;
static const uint64_t STORED = ~0ull >> 8; /* of an entry; its highest byte is the codec */

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

/* See decode_field. */
int egeria_decode(const struct decoder *with, int codec, const uint8_t *from, uint64_t size,
                  uint8_t *room, uint8_t *out, int64_t num_bytes) {
    return decode_field(with, (uint64_t)codec, from, size, room, out, num_bytes);
}

/* -- reading -------------------------------------------------------------------------------- */

/* A tensor of fixed size that all records hold; row i of it begins at out + i * num_bytes. */
struct column {
    uint8_t *out;
    int64_t num_bytes, width, floating;
};

struct batch {
    int64_t descriptor;   /* of the file */
    uint64_t seed;        /* of the checksums: the generation and the layout */
    int64_t num_fields;
    const struct column *columns;
    const uint64_t *places, *sizes; /* of each record */
    const uint8_t *keys;            /* one behind the other */
    const uint64_t *key_ends;
    const int64_t *rows;            /* of the columns */
    uint8_t *found;                 /* how each was read; only what is ABSENT is looked for */
    uint8_t *room;                  /* for decoding, then for a whole record */
    uint64_t decode_bytes, room_bytes;
    hash_fn *hash;
    zstd_fn *zstd;
    void *context;
    int64_t waits;                  /* for the disk; else what is not in memory stays ABSENT */
};

static uint64_t aligned(uint64_t size) { return (size + 7) & ~7ull; }

/* Where the entries of a record begin, if it is of this size and this key; 0 if not. */
static uint64_t entries_at(const struct batch *of, int64_t i, const uint8_t *head) {
    const uint64_t first = i ? of->key_ends[i - 1] : 0, key_bytes = of->key_ends[i] - first;
    uint32_t size;
    uint16_t its_key_bytes;
    memcpy(&size, head + SIZE_AT, sizeof size);
    memcpy(&its_key_bytes, head + KEY_BYTES_AT, sizeof its_key_bytes);
    if (size != of->sizes[i] || its_key_bytes != key_bytes) return 0;
    if (memcmp(head + HEAD_BYTES, of->keys + first, key_bytes)) return 0;
    return HEAD_BYTES + aligned(key_bytes);
}

/* Bytes of a record before its payload. */
static uint64_t head_bytes(const struct batch *of, int64_t i) {
    const uint64_t first = i ? of->key_ends[i - 1] : 0;
    return HEAD_BYTES + aligned(of->key_ends[i] - first) + 8 * (uint64_t)of->num_fields;
}

/* Read what these say; ABSENT if it is not in memory and this does not wait, INTACT if all of it was
   read. */
static int read_all(const struct batch *of, struct iovec *into, int count, uint64_t place,
                    uint64_t size) {
    for (;;) {
        const ssize_t done = preadv2((int)of->descriptor, into, count, (off_t)place,
                                     of->waits ? 0 : RWF_NOWAIT);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return of->waits ? UNREADABLE : ABSENT;
        if ((uint64_t)done == size) return INTACT;
        if (!done) return of->waits ? DAMAGED : ABSENT; /* the file ends here */
        place += (uint64_t)done, size -= (uint64_t)done;
        for (size_t left = (size_t)done; left;) {
            const size_t taken = left < into->iov_len ? left : into->iov_len;
            into->iov_base = (uint8_t *)into->iov_base + taken;
            into->iov_len -= taken, left -= taken;
            if (!into->iov_len) into++, count--;
        }
        while (count && !into->iov_len) into++, count--;
    }
}

/* Read a record of raw tensors to where they belong. DAMAGED if it is another one than that. */
static int read_raw(const struct batch *of, int64_t i, uint64_t start) {
    uint8_t head[MOST_HEAD_BYTES];
    struct iovec into[MOST_FIELDS + 1] = {{head, start}};
    int count = 1;
    for (int64_t j = 0; j < of->num_fields; j++) {
        const struct column *column = of->columns + j;
        if (!column->num_bytes) continue;
        into[count++] = (struct iovec){column->out + of->rows[i] * column->num_bytes,
                                       (size_t)column->num_bytes};
    }
    const int how = read_all(of, into, count, of->places[i], of->sizes[i]);
    if (how != INTACT) return how;
    const uint64_t entries = entries_at(of, i, head);
    if (!entries) return DAMAGED;
    uint64_t sum = of->hash(head + CHECKSUM_BYTES, start - CHECKSUM_BYTES, of->seed);
    for (int64_t j = 0; j < of->num_fields; j++) {
        const struct column *column = of->columns + j;
        if (word(head + entries + 8 * (uint64_t)j) != (uint64_t)column->num_bytes) return DAMAGED;
        sum = of->hash(column->out + of->rows[i] * column->num_bytes, (size_t)column->num_bytes, sum);
    }
    return sum == word(head) ? INTACT : DAMAGED;
}

/* Read a record into the room, verify it, and decode it from there. */
static int read_any(const struct batch *of, int64_t i, uint64_t start) {
    const uint64_t size = of->sizes[i];
    uint8_t *const record = of->room + of->decode_bytes;
    if (size > of->room_bytes - of->decode_bytes) return DAMAGED;
    struct iovec into = {record, size};
    const int how = read_all(of, &into, 1, of->places[i], size);
    if (how != INTACT) return how;
    const uint64_t entries = entries_at(of, i, record);
    if (!entries) return DAMAGED;
    uint64_t at = start, sum = of->hash(record + CHECKSUM_BYTES, start - CHECKSUM_BYTES, of->seed);
    for (int64_t j = 0; j < of->num_fields; j++) {
        const uint64_t stored = word(record + entries + 8 * (uint64_t)j) & STORED;
        if (stored > size - at) return DAMAGED;
        sum = of->hash(record + at, stored, sum);
        at += stored;
    }
    if (at != size || sum != word(record)) return DAMAGED;
    at = start;
    for (int64_t j = 0; j < of->num_fields; j++) {
        const struct column *column = of->columns + j;
        const struct decoder with = {of->zstd, of->context, column->width, column->floating};
        const uint64_t entry = word(record + entries + 8 * (uint64_t)j), stored = entry & STORED;
        if (!decode_field(&with, entry >> 56, record + at, stored, of->room,
                          column->out + of->rows[i] * column->num_bytes, column->num_bytes))
            return DAMAGED;
        at += stored;
    }
    return INTACT;
}

static int read_one(const struct batch *of, int64_t i, uint64_t raw_bytes) {
    const uint64_t start = head_bytes(of, i);
    if (start > MOST_HEAD_BYTES || of->sizes[i] < start) return DAMAGED;
    if (of->sizes[i] != start + raw_bytes) return read_any(of, i, start);
    const int how = read_raw(of, i, start);
    return how == DAMAGED ? read_any(of, i, start) : how; /* encoded, and of the same size */
}

/* Read records of one layout, each of which holds all columns: what is in memory, then the rest, all
   of which is asked for before it is waited for. Return how many are INTACT. */
int64_t egeria_read(struct batch *of, int64_t count) {
    const int64_t waits = of->waits;
    int64_t num_intact = 0, num_left = 0;
    uint64_t raw_bytes = 0;
    for (int64_t j = 0; j < of->num_fields; j++) raw_bytes += (uint64_t)of->columns[j].num_bytes;
    of->waits = 0;
    for (int64_t i = 0; i < count; i++) {
        of->found[i] = (uint8_t)read_one(of, i, raw_bytes);
        num_intact += of->found[i] == INTACT, num_left += of->found[i] == ABSENT;
        if (num_left && !waits) break;
    }
    of->waits = waits;
    if (!num_left || !waits) return num_intact;
    for (int64_t i = 0; i < count; i++)
        if (of->found[i] == ABSENT)
            (void)posix_fadvise((int)of->descriptor, (off_t)of->places[i], (off_t)of->sizes[i],
                                POSIX_FADV_WILLNEED);
    for (int64_t i = 0; i < count; i++) {
        if (of->found[i] != ABSENT) continue;
        of->found[i] = (uint8_t)read_one(of, i, raw_bytes);
        num_intact += of->found[i] == INTACT;
    }
    return num_intact;
}

/* -- writing -------------------------------------------------------------------------------- */

struct source {
    const uint8_t *rows;
    int64_t num_bytes; /* of a row */
};

/* Put rows behind the heads of their records, which lie `stride` bytes from each other, and set the
   checksums. */
void egeria_pack(hash_fn *hash, uint64_t seed, uint8_t *records, int64_t stride, int64_t start,
                 int64_t count, const int64_t *picked, const struct source *sources,
                 int64_t num_fields) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t *const record = records + i * stride, *at = record + start;
        uint64_t sum = hash(record + CHECKSUM_BYTES, (size_t)(start - CHECKSUM_BYTES), seed);
        for (int64_t j = 0; j < num_fields; j++) {
            const int64_t num_bytes = sources[j].num_bytes;
            memcpy(at, sources[j].rows + picked[i] * num_bytes, (size_t)num_bytes);
            sum = hash(at, (size_t)num_bytes, sum);
            at += num_bytes;
        }
        memcpy(record, &sum, sizeof sum);
    }
}

/* See SHAPE in native.py. */
const uint64_t egeria_shape[] = {6, sizeof(struct column), sizeof(struct batch),
                                 sizeof(struct decoder), sizeof(struct source)};
