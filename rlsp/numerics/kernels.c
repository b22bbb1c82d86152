/* The hot loops of the contract's torch code in one pass over memory each. torch's code is the definition: the
 * start-up certificate tries every function here against it, and a run uses only those that leave its bits.
 *
 * No fast-math: float products below are exact (a power of two), and no two of them are contracted. Strides are
 * in elements, `size_t` words wrap modulo 2^64. */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { COLUMNS = 2048, TREE_COLUMNS = 256, TREE_LEAVES = 64, KEYS = 32, HEAD = 256, QUERIES = 31, ROWS = 4 };
enum { LANES = 8, CHAINS = 4, LEVELS = 4, LEVEL_STEPS = 16 }; /* of torch's sum over a row of float32 */

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

/* Uniform numbers of columns first … first + n − 1 for every key: odd multiples of 2^-24. */
void rlsp_uniforms(float *out, const uint64_t *keys, int64_t count, int64_t n, int64_t first) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < n; i++) {
            const uint64_t word = mix64(keys[row] ^ mix64((uint64_t)(first + 1 + i) * GOLDEN));
            out[row * n + i] = (float)(int32_t)(word >> 40 | 1) * 0x1p-24f;
        }
}

/* Sum x[i]² over a row in the order of torch's vectorised sum: CHAINS × LANES running sums, folded into a level above
 * after every LEVEL_STEPS (as long as a row has below 2^14 elements). */
static inline float sum_of_squares(const float *x, int64_t n) {
    enum { WIDE = CHAINS * LANES };
    float levels[LEVELS][WIDE] = {{0}};
    const int64_t steps = n / WIDE;
    int64_t step = 0;
    while (step + LEVEL_STEPS <= steps) {
        for (int j = 0; j < LEVEL_STEPS; j++, step++)
            for (int i = 0; i < WIDE; i++) levels[0][i] += x[step * WIDE + i] * x[step * WIDE + i];
        for (int level = 1; level < LEVELS; level++) {
            for (int i = 0; i < WIDE; i++) levels[level][i] += levels[level - 1][i], levels[level - 1][i] = 0;
            if (step & ((LEVEL_STEPS - 1) << (4 * level))) break;
        }
    }
    for (; step < steps; step++)
        for (int i = 0; i < WIDE; i++) levels[0][i] += x[step * WIDE + i] * x[step * WIDE + i];
    for (int level = 1; level < LEVELS; level++)
        for (int i = 0; i < WIDE; i++) levels[0][i] += levels[level][i];
    float *lanes = levels[0], sum = 0;
    int64_t at = steps * WIDE;
    for (; at + LANES <= n; at += LANES)
        for (int i = 0; i < LANES; i++) lanes[i] += x[at + i] * x[at + i];
    for (int chain = 1; chain < CHAINS; chain++)
        for (int i = 0; i < LANES; i++) lanes[i] += lanes[chain * LANES + i];
    for (; at < n; at++) sum += x[at] * x[at];
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

/* Normalise rows [count, n] by their root mean square and multiply by weight: float32 in and out. */
void rlsp_rms_norm(float *out, float *reciprocals, const float *rows, const float *weight, int64_t count, int64_t n,
                   float epsilon) {
    for (int64_t row = 0; row < count; row++, rows += n, out += n) {
        const float reciprocal = 1 / sqrtf(sum_of_squares(rows, n) / (float)n + epsilon);
        reciprocals[row] = reciprocal;
        for (int64_t i = 0; i < n; i++) out[i] = rows[i] * reciprocal * weight[i];
    }
}

static inline float larger(float a, float b) { return a <= b ? b : a; } /* NaN where a is */

/* Multiply a row [depth] by w [depth, KEYS], rows `stride` apart: one chain of fused additions a column, as the
 * BLAS has it for depths up to its block. */
static inline void row_product(float *restrict out, const float *row, const float *w, int64_t depth, int64_t stride) {
    float sums[KEYS] = {0};
    for (int64_t k = 0; k < depth; k++)
        for (int i = 0; i < KEYS; i++) sums[i] = fmaf(row[k], w[k * stride + i], sums[i]);
    memcpy(out, sums, sizeof sums);
}

/* As row_product, for the last columns, fewer than KEYS. */
static inline void short_product(float *restrict out, const float *row, const float *w, int64_t depth, int64_t stride,
                                 int64_t columns) {
    float sums[KEYS] = {0};
    for (int64_t k = 0; k < depth; k++)
        for (int64_t i = 0; i < columns; i++) sums[i] = fmaf(row[k], w[k * stride + i], sums[i]);
    memcpy(out, sums, (size_t)columns * sizeof *out);
}

/* As row_product, for ROWS rows, `row_stride` apart, whose results lie `apart`: w is read once for all. */
static inline void rows_product(float *restrict out, int64_t apart, const float *rows, int64_t row_stride,
                                const float *w, int64_t depth, int64_t stride) {
    float a[KEYS] = {0}, b[KEYS] = {0}, c[KEYS] = {0}, d[KEYS] = {0};
    for (int64_t k = 0; k < depth; k++) {
        const float *row = rows + k, *from = w + k * stride;
        for (int i = 0; i < KEYS; i++) {
            a[i] = fmaf(row[0], from[i], a[i]);
            b[i] = fmaf(row[row_stride], from[i], b[i]);
            c[i] = fmaf(row[2 * row_stride], from[i], c[i]);
            d[i] = fmaf(row[3 * row_stride], from[i], d[i]);
        }
    }
    memcpy(out, a, sizeof a), memcpy(out + apart, b, sizeof b);
    memcpy(out + 2 * apart, c, sizeof c), memcpy(out + 3 * apart, d, sizeof d);
}

/* Multiply rows [count, shards, depth] by w [shards, depth, n] into out [shards, count, n]. */
void rlsp_few_rows(float *out, const float *rows, const float *w, const int64_t shape[4]) {
    const int64_t shards = shape[0], count = shape[1], depth = shape[2], n = shape[3];
    for (int64_t shard = 0; shard < shards; shard++, w += depth * n)
        for (int64_t column = 0; column < n; column += KEYS)
            for (int64_t i = 0; i < count; i++) {
                const float *row = rows + (i * shards + shard) * depth;
                float *to = out + (shard * count + i) * n + column;
                if (column + KEYS > n) short_product(to, row, w + column, depth, n, n - column);
                else if (i + ROWS > count) row_product(to, row, w + column, depth, n);
                else rows_product(to, n, row, shards * depth, w + column, depth, n), i += ROWS - 1;
            }
}

/* Put keys and values [count, sequences, heads, d] to positions [count, sequences] of a cache for `room` blocks:
 * keys [sequences, heads, room, d, KEYS], values [sequences, heads, room, KEYS, d]. */
void rlsp_store(float *keys, float *values, const float *new_keys, const float *new_values, const int64_t *positions,
                const int64_t shape[4], int64_t room) {
    const int64_t count = shape[0], sequences = shape[1], heads = shape[2], d = shape[3];
    for (int64_t i = 0; i < count * sequences; i++) {
        const int64_t block = positions[i] / KEYS, place = positions[i] % KEYS, sequence = i % sequences;
        for (int64_t head = 0; head < heads; head++, new_keys += d, new_values += d) {
            const int64_t at = ((sequence * heads + head) * room + block) * d * KEYS;
            for (int64_t k = 0; k < d; k++) keys[at + k * KEYS + place] = new_keys[k];
            memcpy(values + at + place * d, new_values, (size_t)d * sizeof *values);
        }
    }
}

/* Attend queries [heads, count, d] to cached keys [heads, blocks, d, KEYS], heads `apart` floats apart: the first
 * half, up to exp. out [heads, count, blocks, KEYS + 1]: score − maximum so far, and the maximum's decay; zeros
 * behind a query's last block. */
void rlsp_cached_scores(float *out, const float *queries, const float *keys, const int64_t *positions,
                        const int64_t shape[4], int64_t apart, float scale, float masked) {
    const int64_t heads = shape[0], count = shape[1], blocks = shape[2], d = shape[3];
    for (int64_t head = 0; head < heads; head++) {
        float tops[QUERIES];
        for (int64_t i = 0; i < count; i++) tops[i] = masked;
        for (int64_t j = 0; j < blocks; j++) {
            const float *block = keys + head * apart + j * KEYS * d;
            for (int64_t i = 0; i < count; i++) {
                const int64_t row = head * count + i, seen = positions[row] - j * KEYS + 1;
                float *scores = out + (row * blocks + j) * (KEYS + 1);
                if (seen <= 0) {
                    memset(scores, 0, (KEYS + 1) * sizeof *scores);
                    continue;
                }
                row_product(scores, queries + row * d, block, d, KEYS);
                const float old = tops[i];
                float most = masked, lanes[LANES];
                for (int key = 0; key < KEYS; key++) scores[key] = key < seen ? scores[key] * scale : masked;
                for (int k = 0; k < LANES; k++) lanes[k] = masked;
                for (int key = 0; key < KEYS; key += LANES)
                    for (int k = 0; k < LANES; k++) lanes[k] = larger(scores[key + k], lanes[k]);
                for (int k = 0; k < LANES; k++) most = larger(lanes[k], most);
                if (j > 0) most = larger(old, most);
                for (int key = 0; key < KEYS; key++) scores[key] -= most;
                scores[KEYS] = old - most;
                tops[i] = most;
            }
        }
    }
}

/* The second half: weights as rlsp_cached_scores left them, after exp; values [heads, blocks, KEYS, d]. */
void rlsp_cached_values(float *out, const float *weights, const float *values, const int64_t *positions,
                        const int64_t shape[4], int64_t apart) {
    const int64_t heads = shape[0], count = shape[1], blocks = shape[2], d = shape[3];
    for (int64_t row = 0; row < heads * count; row++) {
        float state[HEAD] = {0}, total = 0;
        for (int64_t j = 0; j < blocks && positions[row] >= j * KEYS; j++) {
            const float *given = weights + (row * blocks + j) * (KEYS + 1), decay = given[KEYS];
            const float *block = values + row / count * apart + j * KEYS * d;
            const int64_t seen = positions[row] - j * KEYS + 1;
            float own[KEYS], lanes[LANES] = {0}, sum = 0;
            for (int key = 0; key < KEYS; key++) own[key] = key < seen ? given[key] : 0;
            for (int i = 0; i < LANES; i++)
                lanes[i] = own[i] + own[LANES + i] + own[2 * LANES + i] + own[3 * LANES + i];
            for (int i = 0; i < LANES; i++) sum += lanes[i];
            total = total * decay + sum;
            for (int64_t first = 0; first < d; first += KEYS) {
                float part[KEYS];
                if (first + KEYS <= d) row_product(part, own, block + first, KEYS, d);
                else short_product(part, own, block + first, KEYS, d, d - first);
                for (int64_t i = first; i < d && i < first + KEYS; i++)
                    state[i] = state[i] * decay + part[i - first];
            }
        }
        for (int64_t i = 0; i < d; i++) out[row * d + i] = state[i] / total;
    }
}

/* One layer's weights, matrices turned as rlsp_few_rows takes them, and its cache as rlsp_store fills it. The norms
 * of queries and keys are null where there is none. */
typedef struct {
    const float *attention_norm, *qkv, *query_norm, *key_norm, *projection, *mlp_norm, *fc1, *fc2;
    float *keys, *values;
} Layer;

/* One new token of every sequence on its way through the layers: shapes, where it stands, and room to work in.
 * A float holds a number of the model's dtype wherever torch's code rounds to it. */
typedef struct {
    int64_t sequences, hidden, shards, groups, queries, d, ffn, room, blocks, bfloat16;
    float epsilon, scale, masked;
    const float *cosine, *sine;      /* [sequences, d / 2] */
    const int64_t *positions, *seen; /* [sequences], and the same for every head's query */
    float *stream, *rows;            /* [sequences, hidden] */
    float *wide, *leaves;            /* of columns; [shards, sequences, hidden] */
    float *query, *key, *value;      /* [sequences, groups, queries or 1, d] */
    float *weights, *gates;          /* of attention; [sequences, ffn], up to exp and after it */
} Step;

/* Round to the model's dtype, half to even. */
static inline void round_to(int64_t bfloat16, float *x, int64_t n) {
    for (int64_t i = 0; bfloat16 && i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
        if (x[i] == x[i]) memcpy(x + i, &bits, sizeof bits);
    }
}

/* Normalise the residual stream into rows. */
static void norm_stream(const Step *step, const float *weight) {
    float reciprocal;
    for (int64_t i = 0; i < step->sequences; i++)
        rlsp_rms_norm(step->rows + i * step->hidden, &reciprocal, step->stream + i * step->hidden, weight, 1,
                      step->hidden, step->epsilon);
    round_to(step->bfloat16, step->rows, step->sequences * step->hidden);
}

/* Multiply the rows by a column-parallel weight, `width` wide over all shards. */
static void column(const Step *step, const float *weight, int64_t width) {
    rlsp_few_rows(step->wide, step->rows, weight, (int64_t[]){1, step->sequences, step->hidden, width});
    round_to(step->bfloat16, step->wide, step->sequences * width);
}

/* Multiply x [sequences, depth] by a row-parallel weight, sum its leaves, and add to the residual stream. */
static void row(const Step *step, const float *x, const float *weight, int64_t depth) {
    const int64_t n = step->sequences * step->hidden;
    rlsp_few_rows(step->leaves, x, weight,
                  (int64_t[]){step->shards, step->sequences, depth / step->shards, step->hidden});
    rlsp_tree_sum(step->rows, step->leaves, step->shards, n, n);
    round_to(step->bfloat16, step->rows, n);
    for (int64_t i = 0; i < n; i++) step->stream[i] += step->rows[i];
    round_to(step->bfloat16, step->stream, n);
}

/* Normalise a head where there is a norm, and rotate it by its sequence's position. */
static void rotated(const Step *step, float *restrict out, const float *head, const float *norm, int64_t sequence) {
    const int64_t half = step->d / 2;
    const float *cosine = step->cosine + sequence * half, *sine = step->sine + sequence * half;
    float normed[HEAD], reciprocal;
    if (norm) rlsp_rms_norm(normed, &reciprocal, head, norm, 1, step->d, step->epsilon), head = normed;
    for (int64_t i = 0; i < half; i++) {
        out[i] = head[i] * cosine[i] - head[half + i] * sine[i];
        out[half + i] = head[half + i] * cosine[i] + head[i] * sine[i];
    }
    round_to(step->bfloat16, out, step->d);
}

/* The first part of a layer, up to attention's exp. */
void rlsp_layer_scores(const Layer *layer, const Step *step) {
    const int64_t queries = step->queries, d = step->d, heads = step->sequences * step->groups;
    norm_stream(step, layer->attention_norm);
    column(step, layer->qkv, step->groups * (queries + 2) * d);
    for (int64_t i = 0; i < heads; i++) {
        const float *group = step->wide + i * (queries + 2) * d;
        const int64_t sequence = i / step->groups;
        for (int64_t j = 0; j < queries; j++)
            rotated(step, step->query + (i * queries + j) * d, group + j * d, layer->query_norm, sequence);
        rotated(step, step->key + i * d, group + queries * d, layer->key_norm, sequence);
        memcpy(step->value + i * d, group + (queries + 1) * d, (size_t)d * sizeof *group);
    }
    rlsp_store(layer->keys, layer->values, step->key, step->value, step->positions,
               (int64_t[]){1, step->sequences, step->groups, d}, step->room);
    rlsp_cached_scores(step->weights, step->query, layer->keys, step->seen,
                       (int64_t[]){heads, queries, step->blocks, d}, step->room * KEYS * d, step->scale, step->masked);
}

/* The second, from there to the gate's exp. */
void rlsp_layer_gates(const Layer *layer, const Step *step) {
    const int64_t heads = step->sequences * step->groups, shard = step->ffn / step->shards;
    rlsp_cached_values(step->query, step->weights, layer->values, step->seen,
                       (int64_t[]){heads, step->queries, step->blocks, step->d}, step->room * KEYS * step->d);
    round_to(step->bfloat16, step->query, heads * step->queries * step->d);
    row(step, step->query, layer->projection, step->groups * step->queries * step->d);
    norm_stream(step, layer->mlp_norm);
    column(step, layer->fc1, 2 * step->ffn);
    for (int64_t i = 0; i < step->sequences * step->shards; i++)
        for (int64_t j = 0; j < shard; j++) step->gates[i * shard + j] = -step->wide[2 * i * shard + j];
}

/* The third, from there to the end. */
void rlsp_layer_end(const Layer *layer, const Step *step) {
    const int64_t shard = step->ffn / step->shards;
    for (int64_t i = 0; i < step->sequences * step->shards; i++) {
        const float *gate = step->wide + 2 * i * shard, *up = gate + shard;
        for (int64_t j = 0; j < shard; j++)
            step->gates[i * shard + j] = gate[j] / (1 + step->gates[i * shard + j]) * up[j];
    }
    round_to(step->bfloat16, step->gates, step->sequences * step->ffn);
    row(step, step->gates, layer->fc2, step->ffn);
}
