/* The hot loops of the contract's torch code in one pass over memory each. torch's code is the definition: the
 * start-up certificate tries every function here against it, and a run uses only those that leave its bits.
 *
 * No fast-math: float products below are exact (a power of two), and no two of them are contracted. Strides are
 * in elements, `size_t` words wrap modulo 2^64. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { COLUMNS = 2048, TREE_COLUMNS = 256, TREE_LEAVES = 64 };

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u, SECOND = 0xD1B54A32D192ED03u;
static const float INT64_LIMIT = 9223372036854775808.0f; /* 2^63: what is not below it has no integer */

static inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Of two NaN torch hands on the second; compilers swap the operands of + as they like, so there are two alike then. */
static inline float sum_of(float a, float b) { return (b != b ? b : a) + b; }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Round n leaf elements to units and add them; update the largest magnitude's bits and both counts. */
static inline void add_run(uint64_t *restrict total, const float *restrict leaf, int64_t n, float unit,
                           uint32_t *restrict largest, uint32_t *restrict nonzero, uint32_t *restrict kept) {
    uint32_t top = *largest, full = 0, units = 0;
    for (int64_t i = 0; i < n; i++) {
        float x = leaf[i], whole = rintf(x * unit);
        uint32_t magnitude;
        memcpy(&magnitude, &x, sizeof x);
        magnitude &= 0x7FFFFFFFu; /* as integers, magnitudes keep their order, and NaN lies above infinity */
        top = magnitude > top ? magnitude : top;
        full += magnitude != 0;
        units += !(whole == 0.0f);
        /* Converting what does not fit is undefined in C; x86's instruction gives this integer, as torch does. */
        int64_t fixed = fabsf(whole) < INT64_LIMIT ? (int64_t)whole : INT64_MIN;
        total[i] += (uint64_t)fixed;
    }
    *largest = top, *nonzero += full, *kept += units;
}

/* Add leaves [outer, count, rows, n], in units of 1 / unit, to total [outer, rows, n]; n elements lie together.
 * most: the largest magnitude, NaN where one is; counts: what is not zero, and what of it rounded to zero. */
void rlsp_add_leaves(int64_t *total, const float *leaves, const int64_t shape[4], const int64_t strides[3],
                     float unit, float *most, int64_t counts[2]) {
    const int64_t outer = shape[0], count = shape[1], rows = shape[2], n = shape[3];
    /* Outer runs that lie between two rows are read with them, in the order of memory. */
    const int64_t beside = strides[0] < strides[2] ? outer : 1;
    const int64_t room = COLUMNS / (smaller(n, COLUMNS) * beside), together = room > 1 ? room : 1;
    uint32_t largest = 0;
    int64_t nonzero = 0, kept = 0;
    for (int64_t first = 0; first < outer; first += beside)
        for (int64_t row = 0; row < rows; row += together)
            for (int64_t column = 0; column < n; column += COLUMNS) {
                const int64_t width = smaller(COLUMNS, n - column), end = smaller(row + together, rows);
                for (int64_t leaf = 0; leaf < count; leaf++) {
                    const float *from = leaves + leaf * strides[1] + column;
                    uint32_t full = 0, units = 0;
                    for (int64_t r = row; r < end; r++)
                        for (int64_t o = first; o < first + beside; o++)
                            add_run((uint64_t *)total + (o * rows + r) * n + column,
                                    from + o * strides[0] + r * strides[2], width, unit, &largest, &full, &units);
                    nonzero += full, kept += units;
                }
            }
    memcpy(most, &largest, sizeof largest);
    counts[0] = nonzero, counts[1] = nonzero - kept;
}

/* Add to sums [shards, 2] the two streams of hashes of every shard, `size` adjacent bytes each. */
void rlsp_shard_hashes(uint64_t *sums, const unsigned char *bytes, int64_t shards, int64_t size) {
    for (int64_t shard = 0; shard < shards; shard++, bytes += size) {
        const uint64_t words = (uint64_t)size / 8, rest = (uint64_t)size % 8;
        uint64_t first = 0, second = 0;
        for (uint64_t i = 0; i < words; i++) {
            uint64_t word;
            memcpy(&word, bytes + 8 * i, 8);
            first += mix64(word ^ ((i + 1) * GOLDEN));
            second += mix64(word ^ ((i + 1) * SECOND));
        }
        if (rest) {
            uint64_t word = 0;
            memcpy(&word, bytes + 8 * words, rest);
            first += mix64(word ^ ((words + 1) * GOLDEN));
            second += mix64(word ^ ((words + 1) * SECOND));
        }
        sums[2 * shard] += first, sums[2 * shard + 1] += second;
    }
}

#define ROW_DIGEST(name, integer)                                                                                  \
    static void name(uint64_t *digests, const integer *rows, int64_t count, int64_t n, int64_t stride,             \
                     uint64_t first) {                                                                             \
        uint64_t keys[COLUMNS];                                                                                    \
        for (int64_t column = 0; column < n; column += COLUMNS) {                                                  \
            const int64_t width = smaller(COLUMNS, n - column);                                                    \
            for (int64_t i = 0; i < width; i++) keys[i] = mix64((first + (uint64_t)(column + i + 1)) * GOLDEN);    \
            for (int64_t row = 0; row < count; row++) {                                                            \
                const integer *words = rows + row * stride + column;                                               \
                uint64_t sum = 0;                                                                                  \
                for (int64_t i = 0; i < width; i++) sum += mix64((uint64_t)(int64_t)words[i] ^ keys[i]);           \
                digests[row] += sum;                                                                               \
            }                                                                                                      \
        }                                                                                                          \
    }
ROW_DIGEST(digest_16, int16_t)
ROW_DIGEST(digest_32, int32_t)

/* Add to digests [count] the hashes of rows of n words of 2 or 4 bytes, keyed by the index, which starts at first. */
void rlsp_row_digest(uint64_t *digests, const void *rows, int64_t bytes, int64_t count, int64_t n, int64_t stride,
                     int64_t first) {
    if (bytes == 2) digest_16(digests, rows, count, n, stride, (uint64_t)first);
    else digest_32(digests, rows, count, n, stride, (uint64_t)first);
}

/* Sum leaves [count, n], count at most TREE_LEAVES, by the balanced tree of adjacent pairs into out [n]. */
void rlsp_tree_sum(float *restrict out, const float *restrict leaves, int64_t count, int64_t n, int64_t stride) {
    float sums[TREE_LEAVES / 2][TREE_COLUMNS];
    for (int64_t column = 0; column < n; column += TREE_COLUMNS) {
        const int64_t width = smaller(TREE_COLUMNS, n - column);
        const float *from = leaves + column;
        int64_t left = count;
        for (int64_t pair = 0; pair < left / 2; pair++) {
            const float *a = from + 2 * pair * stride, *b = a + stride;
            for (int64_t i = 0; i < width; i++) sums[pair][i] = sum_of(a[i], b[i]);
        }
        if (left % 2) memcpy(sums[left / 2], from + (left - 1) * stride, (size_t)width * sizeof *from);
        for (left = (left + 1) / 2; left > 1; left = (left + 1) / 2) {
            for (int64_t pair = 0; pair < left / 2; pair++) {
                const float *a = sums[2 * pair], *b = sums[2 * pair + 1];
                for (int64_t i = 0; i < width; i++) sums[pair][i] = sum_of(a[i], b[i]);
            }
            if (left % 2) memmove(sums[left / 2], sums[left - 1], (size_t)width * sizeof *from);
        }
        memcpy(out + column, sums[0], (size_t)width * sizeof *out);
    }
}
