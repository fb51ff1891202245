/* Fused CPU kernels, compiled on the user's machine (see cpu_kernels.py).

   siammm_nearest: the H components with the highest x.w for every row. A tile of int8 products stays in the cache while
   its highest are picked as candidates. float32 scores these until the rest cannot reach the H-th best score
   (eightbit.py has the bound). Rows that this does not settle are marked.
   siammm_nearest_by_floats: the same for x.w + b in float32 alone, for CPUs without int8 instructions and for biases.
   siammm_shares: the softmax and the logsumexp of short rows.
   siammm_sums: the sum of weights of each component, and the weighted sum of its rows.

   Threads take parts of the work as they become free. No result depends on which thread took what; only the sums depend
   on the number of threads, because it changes the order of additions.

   Legend: n rows, k components, d columns, h neighbours; x rows, w components. */

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* ---- vectors: what int32 and float32 have in common ---- */

/* The highest lane. */
#define DEFINE_HIGHEST(vector, number, width) \
    INLINE number vector##_highest(vector a) { \
        number lane[width], best; \
        vector##_store(lane, a); \
        best = lane[0]; \
        for (int i = 1; i < width; i++) best = lane[i] > best ? lane[i] : best; \
        return best; \
    }

/* The h-th highest lane of some vectors, or less where some are equal; at least ``bound``. Skips the lowest number. */
#define DEFINE_HTH_HIGHEST(vector, number, lowest) \
    INLINE number vector##_hth_highest(vector *left, int vectors, int64_t h, number bound) { \
        for (int64_t i = 0; i < h; i++) { \
            vector best = left[0]; \
            for (int v = 1; v < vectors; v++) best = vector##_max(best, left[v]); \
            number highest = vector##_highest(best); \
            if (highest == lowest) break; \
            bound = highest; \
            best = vector##_all(highest); \
            for (int v = 0; v < vectors; v++) left[v] = vector##_without(left[v], best); \
        } \
        return bound; \
    }

/* Vectors for any CPU, slow: only tests use them. */
#define DEFINE_PLAIN(vector, number, width, lowest) \
    typedef struct { number lane[width]; } __attribute__((may_alias, packed, aligned(1))) vector; \
    INLINE vector vector##_load(const void *p) { return *(const vector *)p; } \
    INLINE void vector##_store(void *p, vector a) { memcpy(p, &a, sizeof a); } \
    INLINE vector vector##_all(number b) { \
        vector a; \
        for (int i = 0; i < width; i++) a.lane[i] = b; \
        return a; \
    } \
    INLINE vector vector##_max(vector a, vector b) { \
        for (int i = 0; i < width; i++) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; \
        return a; \
    } \
    INLINE uint32_t vector##_at_least(vector a, vector b) { \
        uint32_t mask = 0; \
        for (int i = 0; i < width; i++) mask |= (uint32_t)(a.lane[i] >= b.lane[i]) << i; \
        return mask; \
    } \
    INLINE vector vector##_without(vector a, vector b) { \
        for (int i = 0; i < width; i++) a.lane[i] = a.lane[i] == b.lane[i] ? lowest : a.lane[i]; \
        return a; \
    }

/* ---- vectors of int32, as wide as the CPU's int8 instructions ---- */

/* Tests build all three kinds, with NARROW and without the CPU's own instructions. */
#if defined(__AVX512VNNI__) && !defined(NARROW)

#define PLAIN 0
#define LANES 16
#define TILE_ROWS 6
#define TILE_VECTORS 4
typedef __m512i ints;
INLINE ints ints_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void ints_store(void *p, ints a) { _mm512_storeu_si512(p, a); }
INLINE ints ints_all(int32_t a) { return _mm512_set1_epi32(a); }
INLINE ints ints_max(ints a, ints b) { return _mm512_max_epi32(a, b); }
INLINE int32_t ints_highest(ints a) { return _mm512_reduce_max_epi32(a); }
INLINE uint32_t ints_at_least(ints a, ints b) { return _mm512_cmpge_epi32_mask(a, b); }
INLINE ints ints_without(ints a, ints b) { return _mm512_mask_set1_epi32(a, _mm512_cmpeq_epi32_mask(a, b), INT32_MIN); }
/* acc += the sum of four products of unsigned and signed bytes, in each lane. In assembly, because compilers move the
   sums of the intrinsic in and out of memory, which takes twice as long. */
#define ADD_PRODUCTS(acc, bytes, four) __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(bytes), "v"(four))

#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))

#define PLAIN 0
#define LANES 8
#define TILE_ROWS 4
#define TILE_VECTORS 2
typedef __m256i ints;
INLINE ints ints_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void ints_store(void *p, ints a) { _mm256_storeu_si256(p, a); }
INLINE ints ints_all(int32_t a) { return _mm256_set1_epi32(a); }
INLINE ints ints_max(ints a, ints b) { return _mm256_max_epi32(a, b); }
DEFINE_HIGHEST(ints, int32_t, LANES)
INLINE uint32_t ints_at_least(ints a, ints b) {
    return 0xff & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a)));
}
INLINE ints ints_without(ints a, ints b) {
    return _mm256_blendv_epi8(a, _mm256_set1_epi32(INT32_MIN), _mm256_cmpeq_epi32(a, b));
}
#if defined(__AVXVNNI__)
#define ADD_PRODUCTS(acc, bytes, four) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(bytes), "x"(four))
#else
#define ADD_PRODUCTS(acc, bytes, four) __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(bytes), "v"(four))
#endif

#else

#define PLAIN 1
#define LANES 8
#define TILE_ROWS 2
#define TILE_VECTORS 1
DEFINE_PLAIN(ints, int32_t, LANES, INT32_MIN)
DEFINE_HIGHEST(ints, int32_t, LANES)
INLINE ints added_products(ints acc, ints bytes, ints four) {
    uint8_t a[4 * LANES];
    int8_t b[4 * LANES];
    memcpy(a, &bytes, sizeof a);
    memcpy(b, &four, sizeof b);
    for (int i = 0; i < 4 * LANES; i++) acc.lane[i / 4] += (int32_t)a[i] * b[i];
    return acc;
}
#define ADD_PRODUCTS(acc, bytes, four) acc = added_products(acc, bytes, four)

#endif

DEFINE_HTH_HIGHEST(ints, int32_t, INT32_MIN)

#define TILE_COLUMNS (LANES * TILE_VECTORS)
/* Rows that meet a tile of components while it is in the L1 cache. */
#define BLOCK 48
/* Components whose products with a block of rows are held at once: 192 KB of the L2 cache. */
#define PANEL 1024
/* Column c is in group c mod GROUPS. The H-th highest of the groups' maxima is a bound on the H-th highest of all. */
#define GROUPS 64
#define GROUP_VECTORS (GROUPS / LANES)
#define MAX_NEIGHBOURS 32
#define MAX_COLUMNS (1 << 14)
/* Candidates of a row at most; a row with more needs a full search. */
#define PICKED 256
/* The product of padding columns: lower than any real product (at least -2^14 * 255 * 127) less the largest slack
   (2^29). */
#define NOWHERE (INT32_MIN / 2)

/* ---- threads ---- */

#ifndef SHARED_THREADS
#define SHARED_THREADS 1
#endif

typedef struct {
    void (*work)(void *job, int64_t *next);
    void *job;
    int64_t next;
} team;

static void member(void *argument) {
    team *of = argument;
    of->work(of->job, &of->next);
}

static void *member_alone(void *argument) {
    member(argument);
    return NULL;
}

/* From torch's copy of OpenMP, if it is in the process. torch's threads spin for some milliseconds after an operation,
   and other threads would compete with them for the cores. */
extern void GOMP_parallel(void (*work)(void *), void *job, unsigned n_threads, unsigned flags) __attribute__((weak));

/* Let n_threads threads, including this one, take parts until none is left. */
static void together(void (*work)(void *, int64_t *), void *job, int n_threads) {
    enum { MOST = 256 };
    team all = {work, job, 0};
    if (n_threads > 1 && SHARED_THREADS && GOMP_parallel) {
        GOMP_parallel(member, &all, (unsigned)n_threads, 0);
        return;
    }
    pthread_t other[MOST];
    int started = 0;
    while (started < n_threads - 1 && started < MOST && !pthread_create(&other[started], NULL, member_alone, &all))
        started++;
    member(&all);
    while (started) pthread_join(other[--started], NULL);
}

INLINE int64_t taken(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

INLINE void fail(int *failed) { __atomic_store_n(failed, 1, __ATOMIC_RELAXED); }

/* A thread's own memory; NULL, and the job fails, if there is none. */
static void *allocated(int64_t bytes, int *failed) {
    void *memory = NULL;
    if (!posix_memalign(&memory, 64, (size_t)bytes)) return memory;
    fail(failed);
    return NULL;
}

/* ---- the nearest components by int8 products ---- */

typedef struct {
    int64_t n, k, d, h;
    const float *x;
    const int8_t *x_code;
    const float *w;
    const uint8_t *packed;
    const float *scale, *reach; /* a score is at most product * scale + reach, for the int8 product */
    const int32_t *slack; /* products more than this below the H-th highest cannot matter */
    float *score;
    int64_t *index;
    uint8_t *doubtful;
    int failed;
} search;

typedef struct {
    int32_t product[BLOCK * PANEL], maxima[BLOCK][GROUPS];
    int32_t picked_index[BLOCK][PICKED], picked_product[BLOCK][PICKED];
    int picked[BLOCK], too_many[BLOCK];
    int32_t bound[BLOCK], least[BLOCK], offset[BLOCK];
    int8_t code[]; /* of a block of rows */
} scratch;

INLINE int64_t fours(int64_t d) { return (d + 3) / 4; }
INLINE int64_t padded(int64_t k) { return (k + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS; }

/* Whether there are int8 instructions; if not, float32 is faster. */
int siammm_multiplies_bytes(void) { return !PLAIN; }

int64_t siammm_packed_bytes(int64_t k, int64_t d) { return padded(k) * fours(d) * 4; }

/* Components in the order in which they are multiplied: by tile, by four columns, by component. Adding 128 makes them
   unsigned, which the instruction needs of one factor; it adds the same to all products of a row. */
void siammm_pack(const int8_t *w_code, int64_t k, int64_t d, uint8_t *packed) {
    int64_t d4 = fours(d);
    memset(packed, 128, (size_t)siammm_packed_bytes(k, d));
    for (int64_t c = 0; c < k; c++) {
        uint8_t *to = packed + c / TILE_COLUMNS * TILE_COLUMNS * d4 * 4 + c % TILE_COLUMNS * 4;
        for (int64_t j = 0; j < d; j++)
            to[j / 4 * TILE_COLUMNS * 4 + j % 4] = (uint8_t)w_code[c * d + j] ^ 0x80;
    }
}

/* The products of TILE_ROWS rows with one tile of components, and the maxima of the groups so far. */
INLINE void multiply(const int8_t *code, const uint8_t *packed, int64_t d4, int32_t *product, int32_t *maxima) {
    ints sum[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = ints_all(0);
    for (int64_t i = 0; i < d4; i++) {
        ints bytes[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; v++) bytes[v] = ints_load(packed + (i * TILE_VECTORS + v) * LANES * 4);
        for (int r = 0; r < TILE_ROWS; r++) {
            int32_t four;
            memcpy(&four, code + (i * TILE_ROWS + r) * 4, 4);
            ints all = ints_all(four);
            for (int v = 0; v < TILE_VECTORS; v++) ADD_PRODUCTS(sum[r][v], bytes[v], all);
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            int32_t *highest = maxima + r * GROUPS + v * LANES;
            ints_store(product + r * PANEL + v * LANES, sum[r][v]);
            ints_store(highest, ints_max(ints_load(highest), sum[r][v]));
        }
}

/* The last tile, where some columns are padding. */
static void multiply_last(
    const int8_t *code, const uint8_t *packed, int64_t d4, int32_t *product, int32_t *maxima, int64_t columns
) {
    int32_t ignored[TILE_ROWS * GROUPS];
    for (int i = 0; i < TILE_ROWS * GROUPS; i++) ignored[i] = INT32_MIN;
    multiply(code, packed, d4, product, ignored);
    for (int r = 0; r < TILE_ROWS; r++) {
        for (int64_t c = 0; c < columns; c++) {
            int32_t here = product[r * PANEL + c], *highest = maxima + r * GROUPS + c;
            *highest = here > *highest ? here : *highest;
        }
        for (int64_t c = columns; c < TILE_COLUMNS; c++) product[r * PANEL + c] = NOWHERE;
    }
}

/* The rows of a block in the order in which they are multiplied: by TILE_ROWS rows, by four columns, by row. */
static void lay_out(const search *job, int64_t first, int rows, scratch *own) {
    int64_t d4 = fours(job->d);
    memset(own->code, 0, (size_t)(BLOCK * d4 * 4));
    for (int r = 0; r < rows; r++) {
        const int8_t *from = job->x_code + (first + r) * job->d;
        int8_t *to = own->code + (r / TILE_ROWS * TILE_ROWS * d4 + r % TILE_ROWS) * 4;
        int32_t sum = 0;
        int64_t j = 0;
        for (; j + 4 <= job->d; j += 4) memcpy(to + j * TILE_ROWS, from + j, 4);
        for (; j < job->d; j++) to[j / 4 * 4 * TILE_ROWS + j % 4] = from[j];
        for (j = 0; j < job->d; j++) sum += from[j];
        own->offset[r] = 128 * sum;
        own->picked[r] = own->too_many[r] = 0;
    }
}

/* The h-th highest of the groups' maxima, or less where some are equal. A group without components has INT32_MIN. */
static int32_t lower_bound(const int32_t *maxima, int64_t h) {
    ints left[GROUP_VECTORS];
    for (int v = 0; v < GROUP_VECTORS; v++) left[v] = ints_load(maxima + v * LANES);
    return ints_hth_highest(left, GROUP_VECTORS, h, NOWHERE);
}

/* Drop candidates that later panels have shown to be too low. */
static void weed(scratch *own, int r, int32_t least) {
    int kept = 0;
    for (int i = 0; i < own->picked[r]; i++)
        if (own->picked_product[r][i] >= least) {
            own->picked_index[r][kept] = own->picked_index[r][i];
            own->picked_product[r][kept++] = own->picked_product[r][i];
        }
    own->picked[r] = kept;
}

/* Add the components of a panel whose products are high enough to the candidates. */
static void pick(scratch *own, int r, int64_t first, int64_t columns, int64_t h, int32_t slack) {
    const int32_t *product = own->product + r * PANEL;
    /* Never lower than before, since dropped candidates stay dropped. (Equal maxima count once, so it could fall.) */
    int32_t bound = lower_bound(own->maxima[r], h);
    own->bound[r] = first && own->bound[r] > bound ? own->bound[r] : bound;
    own->least[r] = own->bound[r] - slack;
    if (first) weed(own, r, own->least[r]);
    ints threshold = ints_all(own->least[r]);
    int count = own->picked[r];
    for (int64_t start = 0; start < columns; start += 64) {
        uint64_t mask = 0;
        for (int v = 0; v < 64 / LANES; v++)
            mask |= (uint64_t)ints_at_least(ints_load(product + start + v * LANES), threshold) << (v * LANES);
        while (mask) {
            int64_t c = start + __builtin_ctzll(mask);
            mask &= mask - 1;
            if (count == PICKED) {
                own->too_many[r] = 1;
                return;
            }
            own->picked_index[r][count] = (int32_t)(first + c);
            own->picked_product[r][count++] = product[c];
        }
    }
    own->picked[r] = count;
}

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));

INLINE float dot(const float *a, const float *b, int64_t d) {
    floats sum[4] = {{0}, {0}, {0}, {0}};
    int64_t j = 0;
    for (; j + 64 <= d; j += 64)
        for (int v = 0; v < 4; v++)
            sum[v] += *(const floats *)(a + j + 16 * v) * *(const floats *)(b + j + 16 * v);
    for (; j + 16 <= d; j += 16) sum[0] += *(const floats *)(a + j) * *(const floats *)(b + j);
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0;
    for (; j < d; j++) total += a[j] * b[j];
#if defined(__AVX512F__)
    return total + _mm512_reduce_add_ps((__m512)sum[0]);
#else
    float lane[16];
    memcpy(lane, &sum[0], sizeof lane);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return total + lane[0];
#endif
}

/* Insert a scored component among the best; of equal scores the first component comes first. */
INLINE void place(float *score, int64_t *index, int64_t h, float new_score, int64_t new_index) {
    if (!(new_score > score[h - 1] || (new_score == score[h - 1] && new_index < index[h - 1]))) return;
    int64_t at = h - 1;
    for (; at && (new_score > score[at - 1] || (new_score == score[at - 1] && new_index < index[at - 1])); at--) {
        score[at] = score[at - 1];
        index[at] = index[at - 1];
    }
    score[at] = new_score;
    index[at] = new_index;
}

/* Score the candidates: first those above the bound, then those that could still be among the best. */
static void decide(const search *job, const scratch *own, int64_t row, int r) {
    float *score = job->score + row * job->h;
    int64_t *index = job->index + row * job->h;
    const float *x = job->x + row * job->d;
    double scale = job->scale[row], reach = job->reach[row];
    for (int64_t i = 0; i < job->h; i++) {
        score[i] = -FLT_MAX;
        index[i] = INT64_MAX;
    }
    job->doubtful[row] = 1;
    if (own->too_many[r]) return;
    for (int i = 0; i < own->picked[r]; i++)
        if (own->picked_product[r][i] >= own->bound[r]) {
            int64_t c = own->picked_index[r][i];
            place(score, index, job->h, dot(x, job->w + c * job->d, job->d), c);
        }
    for (int i = 0; i < own->picked[r]; i++) {
        int32_t product = own->picked_product[r][i];
        if (product < own->bound[r] && (product - own->offset[r]) * scale + reach >= score[job->h - 1]) {
            int64_t c = own->picked_index[r][i];
            place(score, index, job->h, dot(x, job->w + c * job->d, job->d), c);
        }
    }
    int32_t rest = own->least[r] - 1; /* the highest product of those that are no candidates */
    int settled = score[job->h - 1] > (rest - own->offset[r]) * scale + reach;
    job->doubtful[row] = !settled || index[job->h - 1] == INT64_MAX; /* too few, where scores are NaN */
}

static void nearest_of_blocks(void *argument, int64_t *next) {
    search *job = argument;
    int64_t d4 = fours(job->d), n_blocks = (job->n + BLOCK - 1) / BLOCK, block;
    scratch *own = allocated((int64_t)sizeof *own + BLOCK * d4 * 4, &job->failed);
    while (own && (block = taken(next)) < n_blocks) {
        int64_t start = block * BLOCK;
        int rows = (int)(job->n - start < BLOCK ? job->n - start : BLOCK);
        lay_out(job, start, rows, own);
        for (int i = 0; i < BLOCK * GROUPS; i++) (&own->maxima[0][0])[i] = INT32_MIN;
        for (int64_t first = 0; first < job->k; first += PANEL) {
            int64_t columns = job->k - first < PANEL ? job->k - first : PANEL;
            for (int64_t c = 0; c < columns; c += TILE_COLUMNS) {
                const uint8_t *packed = job->packed + (first + c) * d4 * 4;
                for (int r = 0; r < rows; r += TILE_ROWS) {
                    const int8_t *from = own->code + r * d4 * 4;
                    int32_t *to = own->product + r * PANEL + c, *maxima = own->maxima[r] + c % GROUPS;
                    if (c + TILE_COLUMNS <= columns)
                        multiply(from, packed, d4, to, maxima);
                    else
                        multiply_last(from, packed, d4, to, maxima, columns - c);
                }
            }
            /* pick() takes 64 columns at a time. */
            for (int64_t c = padded(columns); c % 64; c++)
                for (int r = 0; r < rows; r++) own->product[r * PANEL + c] = NOWHERE;
            for (int r = 0; r < rows; r++)
                if (!own->too_many[r]) pick(own, r, first, columns, job->h, job->slack[start + r]);
        }
        for (int r = 0; r < rows; r++) {
            if (r + 1 < rows)
                for (int i = 0; i < own->picked[r + 1]; i++)
                    if (own->picked_product[r + 1][i] >= own->bound[r + 1])
                        for (int64_t j = 0; j < job->d; j += 16)
                            __builtin_prefetch(job->w + own->picked_index[r + 1][i] * job->d + j);
            decide(job, own, start + r, r);
        }
    }
    free(own);
}

/* 0, or 1 without memory or for wrong sizes: k must be at least 2 * h, h at most 32, d at most 2^14. ``packed`` comes
   from siammm_pack; slack must be at most 2^29. */
int siammm_nearest(
    int64_t n, int64_t k, int64_t d, int64_t h, const float *x, const int8_t *x_code, const float *w,
    const uint8_t *packed, const float *scale, const float *reach, const int32_t *slack, float *score, int64_t *index,
    uint8_t *doubtful, int n_threads
) {
    search job = {n, k, d, h, x, x_code, w, packed, scale, reach, slack, score, index, doubtful, 0};
    if (h < 1 || h > MAX_NEIGHBOURS || k < 2 * h || d > MAX_COLUMNS) return 1;
    together(nearest_of_blocks, &job, n_threads);
    return job.failed;
}

/* ---- the nearest components in float32 ---- */

/* Vectors of float32, as wide as the CPU's fused multiply-add. Tests build all three kinds. */
#define DEFINE_REALS(mm) \
    INLINE reals reals_load(const float *p) { return mm##_loadu_ps(p); } \
    INLINE void reals_store(float *p, reals a) { mm##_storeu_ps(p, a); } \
    INLINE reals reals_all(float a) { return mm##_set1_ps(a); } \
    INLINE reals reals_sum(reals a, reals b) { return mm##_add_ps(a, b); } \
    INLINE reals reals_product_sum(reals a, reals b, reals c) { return mm##_fmadd_ps(a, b, c); } \
    INLINE reals reals_max(reals a, reals b) { return mm##_max_ps(a, b); }

#if defined(__AVX512F__) && !defined(NARROW)

#define FUSED 1
#define WIDTH 16
#define STRIP_ROWS 6
#define STRIP_VECTORS 4
typedef __m512 reals;
DEFINE_REALS(_mm512)
INLINE uint32_t reals_at_least(reals a, reals b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE reals reals_without(reals a, reals b) {
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), _mm512_set1_ps(-INFINITY));
}

#elif defined(__AVX2__) && defined(__FMA__)

#define FUSED 1
#define WIDTH 8
#define STRIP_ROWS 6
#define STRIP_VECTORS 2
typedef __m256 reals;
DEFINE_REALS(_mm256)
INLINE uint32_t reals_at_least(reals a, reals b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
INLINE reals reals_without(reals a, reals b) {
    return _mm256_blendv_ps(a, _mm256_set1_ps(-INFINITY), _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}

#else

#define FUSED 0
#define WIDTH 8
#define STRIP_ROWS 2
#define STRIP_VECTORS 1
DEFINE_PLAIN(reals, float, WIDTH, -INFINITY)
INLINE reals reals_sum(reals a, reals b) {
    for (int i = 0; i < WIDTH; i++) a.lane[i] += b.lane[i];
    return a;
}
INLINE reals reals_product_sum(reals a, reals b, reals c) {
    for (int i = 0; i < WIDTH; i++) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}

#endif

DEFINE_HIGHEST(reals, float, WIDTH)
DEFINE_HTH_HIGHEST(reals, float, -INFINITY)

#define STRIP (WIDTH * STRIP_VECTORS)
/* Rows that meet a strip of components while it is in the cache. */
#define MANY_ROWS 48
/* Components whose scores of these rows are held at once: 96 KB of the L2 cache. */
#define SCORED 512
/* Columns that are multiplied before the next strip: 16 KB of it in the L1 cache for vectors of 8, 64 KB in the L2
   cache for vectors of 16; fewer columns were slower. */
#define DEPTH 256

typedef struct {
    int64_t n, k, d, h;
    const float *x, *packed, *bias;
    float *score;
    int64_t *index;
    int failed;
} full_search;

INLINE int64_t in_strips(int64_t k) { return (k + STRIP - 1) / STRIP * STRIP; }

/* Whether there is a fused multiply-add; if not, torch is faster. */
int siammm_multiplies_floats(void) { return FUSED; }

int64_t siammm_packed_floats(int64_t k, int64_t d) { return in_strips(k) * (d + 1); }

/* Components in the order in which they are multiplied: by strip, by column, by component. Then their biases, minus
   infinity for padding. bias may be NULL. */
void siammm_pack_floats(const float *w, const float *bias, int64_t k, int64_t d, float *packed) {
    int64_t places = in_strips(k);
    float *added = packed + places * d;
    for (int64_t c = 0; c < places; c++) {
        float *to = packed + c / STRIP * STRIP * d + c % STRIP;
        for (int64_t j = 0; j < d; j++) to[j * STRIP] = c < k ? w[c * d + j] : 0;
        added[c] = c >= k ? -INFINITY : bias ? bias[c] : 0;
    }
}

/* Add the products of some columns of STRIP_ROWS rows and some vectors of a strip to the scores; at last the bias. */
INLINE void multiply_vectors(
    const float *const x[STRIP_ROWS], const float *w, int64_t depth, float *score, int first, const float *bias,
    const int vectors
) {
    reals sum[STRIP_ROWS][STRIP_VECTORS];
    for (int r = 0; r < STRIP_ROWS; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = first ? reals_all(0) : reals_load(score + r * SCORED + v * WIDTH);
    for (int64_t j = 0; j < depth; j++) {
        reals part[STRIP_VECTORS];
        for (int v = 0; v < vectors; v++) part[v] = reals_load(w + j * STRIP + v * WIDTH);
        for (int r = 0; r < STRIP_ROWS; r++) {
            reals all = reals_all(x[r][j]);
            for (int v = 0; v < vectors; v++) sum[r][v] = reals_product_sum(all, part[v], sum[r][v]);
        }
    }
    for (int r = 0; r < STRIP_ROWS; r++)
        for (int v = 0; v < vectors; v++) {
            reals of = bias ? reals_sum(sum[r][v], reals_load(bias + v * WIDTH)) : sum[r][v];
            reals_store(score + r * SCORED + v * WIDTH, of);
        }
}

/* The same by number of components; the last strip need not be full. Each case keeps its sums in registers. */
INLINE void multiply_floats(
    const float *const x[STRIP_ROWS], const float *w, int64_t depth, float *score, int first, const float *bias,
    int64_t columns
) {
    if (columns > (STRIP_VECTORS - 1) * WIDTH)
        multiply_vectors(x, w, depth, score, first, bias, STRIP_VECTORS);
    else if (columns > 2 * WIDTH)
        multiply_vectors(x, w, depth, score, first, bias, STRIP_VECTORS < 3 ? STRIP_VECTORS : 3);
    else if (columns > WIDTH)
        multiply_vectors(x, w, depth, score, first, bias, STRIP_VECTORS < 2 ? STRIP_VECTORS : 2);
    else
        multiply_vectors(x, w, depth, score, first, bias, 1);
}

/* A score that at least h of these reach: the h-th highest of the groups' maxima, or less where some are equal. */
static float reached_by(const float *score, int64_t columns, int64_t h) {
    reals left[GROUPS / WIDTH];
    for (int v = 0; v < GROUPS / WIDTH; v++) left[v] = reals_load(score + v * WIDTH);
    for (int64_t start = GROUPS; start < columns; start += GROUPS)
        for (int v = 0; v < GROUPS / WIDTH; v++) left[v] = reals_max(left[v], reals_load(score + start + v * WIDTH));
    return reals_hth_highest(left, GROUPS / WIDTH, h, -INFINITY);
}

/* Insert the scores of a row that are high enough among its best. */
static void keep_best(
    const float *score, int64_t first, int64_t columns, int64_t h, float *best_score, int64_t *best_index
) {
    /* After the first panel the best so far are the bound. Minus infinity is padding. */
    float bound = first ? best_score[h - 1] : reached_by(score, columns, h);
    reals threshold = reals_all(bound > -FLT_MAX ? bound : -FLT_MAX);
    for (int64_t start = 0; start < columns; start += 64) {
        uint64_t mask = 0;
        for (int v = 0; v < 64 / WIDTH; v++)
            mask |= (uint64_t)reals_at_least(reals_load(score + start + v * WIDTH), threshold) << (v * WIDTH);
        for (; mask; mask &= mask - 1) {
            int64_t c = start + __builtin_ctzll(mask);
            place(best_score, best_index, h, score[c], first + c);
        }
    }
}

static void nearest_by_floats(void *argument, int64_t *next) {
    full_search *job = argument;
    int64_t d = job->d, h = job->h, n_blocks = (job->n + MANY_ROWS - 1) / MANY_ROWS, block;
    int64_t parts = (d + DEPTH - 1) / DEPTH, depth = (d + parts - 1) / parts;
    float *score = allocated((int64_t)sizeof(float) * MANY_ROWS * SCORED, &job->failed);
    while (score && (block = taken(next)) < n_blocks) {
        int64_t start = block * MANY_ROWS;
        int rows = (int)(job->n - start < MANY_ROWS ? job->n - start : MANY_ROWS);
        float *best_score = job->score + start * h;
        int64_t *best_index = job->index + start * h;
        for (int64_t i = 0; i < rows * h; i++) {
            best_score[i] = -INFINITY;
            best_index[i] = INT64_MAX;
        }
        for (int64_t first = 0; first < job->k; first += SCORED) {
            int64_t columns = job->k - first < SCORED ? job->k - first : SCORED;
            for (int64_t j = 0; j < d; j += depth)
                for (int64_t c = 0; c < columns; c += STRIP)
                    for (int r = 0; r < rows; r += STRIP_ROWS) {
                        /* Rows are read in place: packing costs more than it gains. Row r stands in for rows beyond. */
                        const float *x[STRIP_ROWS];
                        for (int i = 0; i < STRIP_ROWS; i++)
                            x[i] = job->x + (start + r + (r + i < rows ? i : 0)) * d + j;
                        multiply_floats(
                            x, job->packed + (first + c) * d + j * STRIP, d - j < depth ? d - j : depth,
                            score + r * SCORED + c, j == 0, j + depth < d ? NULL : job->bias + first + c, columns - c
                        );
                    }
            /* keep_best() takes 64 columns at a time. */
            for (int64_t c = (columns + WIDTH - 1) / WIDTH * WIDTH; c % 64; c++)
                for (int r = 0; r < rows; r++) score[r * SCORED + c] = -INFINITY;
            for (int r = 0; r < rows; r++)
                keep_best(score + r * SCORED, first, columns, h, best_score + r * h, best_index + r * h);
        }
        for (int r = 0; r < rows; r++)
            if (best_index[r * h + h - 1] == INT64_MAX) fail(&job->failed);
    }
    free(score);
}

/* 0, or 1 without memory, for a row with fewer than h finite scores, or for wrong sizes: d must be at least 1, k at
   least h, h at most 32. ``packed`` comes from siammm_pack_floats. */
int siammm_nearest_by_floats(
    int64_t n, int64_t k, int64_t d, int64_t h, const float *x, const float *packed, float *score, int64_t *index,
    int n_threads
) {
    full_search job = {n, k, d, h, x, packed, packed + in_strips(k) * d, score, index, 0};
    if (d < 1 || h < 1 || h > MAX_NEIGHBOURS || k < h) return 1;
    together(nearest_by_floats, &job, n_threads);
    return job.failed;
}

/* ---- sums by component ---- */

/* Each part of the rows has its own sums, which are added up at the end. If these would need more than SUMS_BYTES,
   there are fewer parts, and threads share the columns. */
#ifndef SUMS_BYTES
#define SUMS_BYTES ((int64_t)256 << 20)
#endif

typedef struct {
    int64_t n, k, d, h, row_parts, column_parts, width;
    const float *x;
    const int64_t *index;
    const float *weight;
    float *total, *more_totals; /* the first part writes to the result, the others to more_totals */
    double *count, *more_counts;
    int failed;
} sums;

INLINE float *total_of(const sums *job, int64_t part) {
    return part ? job->more_totals + (part - 1) * job->k * job->d : job->total;
}
INLINE double *count_of(const sums *job, int64_t part) {
    return part ? job->more_counts + (part - 1) * job->k : job->count;
}

INLINE void add(float *total, const float *x, float weight, int64_t d) {
    int64_t j = 0;
    for (; j + 16 <= d; j += 16) *(floats *)(total + j) += weight * *(const floats *)(x + j);
    for (; j < d; j++) total[j] += weight * x[j];
}

static void sums_of_parts(void *argument, int64_t *next) {
    sums *job = argument;
    int64_t part, h = job->h;
    while ((part = taken(next)) < job->row_parts * job->column_parts) {
        int64_t of_rows = part / job->column_parts, first = part % job->column_parts * job->width;
        int64_t width = job->d - first < job->width ? job->d - first : job->width;
        int64_t start = job->n * of_rows / job->row_parts * h, stop = job->n * (of_rows + 1) / job->row_parts * h;
        float *total = total_of(job, of_rows) + first;
        double *count = count_of(job, of_rows);
        int outside = 0;
        for (int64_t e = start; e < stop; e++) outside |= (uint64_t)job->index[e] >= (uint64_t)job->k;
        if (outside) {
            fail(&job->failed);
            continue;
        }
        for (int64_t i = start; i < stop; i += h) {
            const float *x = job->x + i / h * job->d + first;
            if (i + h < stop)
                for (int64_t e = i + h; e < i + 2 * h; e++)
                    for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(total + job->index[e] * job->d + j, 1);
            for (int64_t e = i; e < i + h; e++)
                add(total + job->index[e] * job->d, x, job->weight[e], width);
        }
        if (!first)
            for (int64_t e = start; e < stop; e++) count[job->index[e]] += job->weight[e];
    }
}

static void sums_of_sums(void *argument, int64_t *next) {
    enum { AT_ONCE = 64 }; /* components */
    sums *job = argument;
    int64_t block;
    while ((block = taken(next)) * AT_ONCE < job->k) {
        int64_t first = block * AT_ONCE, stop = first + AT_ONCE < job->k ? first + AT_ONCE : job->k;
        for (int64_t part = 1; part < job->row_parts; part++) {
            add(job->total + first * job->d, total_of(job, part) + first * job->d, 1.0f, (stop - first) * job->d);
            for (int64_t c = first; c < stop; c++) job->count[c] += count_of(job, part)[c];
        }
    }
}

/* 0, or 1 without memory or for an index out of range. total and count must hold zeros. */
int siammm_sums(
    int64_t n, int64_t k, int64_t d, int64_t h, const float *x, const int64_t *index, const float *weight, float *total,
    double *count, int n_threads
) {
    int64_t most = SUMS_BYTES / (k * d * (int64_t)sizeof(float)) + 1, worth = n * h / (2 * k) + 1;
    int64_t row_parts = n_threads < most ? n_threads : most;
    row_parts = row_parts < worth ? row_parts : worth;
    int64_t width = (d * row_parts + n_threads - 1) / n_threads;
    width = (width + 31) / 32 * 32; /* two cache lines, which are fetched together */
    int64_t column_parts = (d + width - 1) / width;
    sums job = {n, k, d, h, row_parts, column_parts, width, x, index, weight, total, NULL, count, NULL, 0};
    if (row_parts > 1) {
        job.more_totals = calloc((size_t)((row_parts - 1) * k * d), sizeof(float));
        job.more_counts = calloc((size_t)((row_parts - 1) * k), sizeof(double));
        job.failed = !job.more_totals || !job.more_counts;
    }
    if (!job.failed) {
        together(sums_of_parts, &job, n_threads);
        if (row_parts > 1) together(sums_of_sums, &job, n_threads);
    }
    free(job.more_totals);
    free(job.more_counts);
    return job.failed;
}

/* ---- shares ---- */

typedef struct {
    int64_t n, h;
    const float *logit;
    float *share, *log_sum;
} shares;

/* e^x for x <= 0, to the last bit or two of float32, down to the smallest subnormal number, and 0 below. */
INLINE float exponential(float x) {
    x = x < -104.0f ? -104.0f : x; /* whose exponential is rounded to 0 */
    float whole = x * 1.44269504f + 12582912.0f; /* adding and subtracting 1.5 * 2^23 rounds */
    int32_t power;
    memcpy(&power, &whole, 4);
    whole -= 12582912.0f;
    float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    float value = 1.0f / 5040;
    value = value * rest + 1.0f / 720;
    value = value * rest + 1.0f / 120;
    value = value * rest + 1.0f / 24;
    value = value * rest + 1.0f / 6;
    value = value * rest + 0.5f;
    value = value * rest + 1.0f;
    value = value * rest + 1.0f;
    /* 2 to this power, in two factors, since one could underflow. The lowest bits of ``power`` are its value. */
    power = (int32_t)((uint32_t)power << 23) >> 23;
    int32_t half = power / 2, bits[2] = {(half + 127) * (1 << 23), (power - half + 127) * (1 << 23)};
    float scale[2];
    memcpy(scale, bits, 8);
    return value * scale[0] * scale[1];
}

static void shares_of_blocks(void *argument, int64_t *next) {
    enum { ROWS = 1024 };
    shares *job = argument;
    int64_t block, h = job->h;
    while ((block = taken(next)) * ROWS < job->n) {
        int64_t start = block * ROWS, stop = start + ROWS < job->n ? start + ROWS : job->n;
        float *share = job->share + start * h;
        for (int64_t i = start; i < stop; i++) {
            float highest = job->logit[i * h];
            for (int64_t j = 1; j < h; j++) highest = job->logit[i * h + j] > highest ? job->logit[i * h + j] : highest;
            for (int64_t j = 0; j < h; j++) job->share[i * h + j] = job->logit[i * h + j] - highest;
            job->log_sum[i] = highest;
        }
        for (int64_t e = 0; e < (stop - start) * h; e++) share[e] = exponential(share[e]);
        for (int64_t i = start; i < stop; i++) {
            float sum = 0;
            for (int64_t j = 0; j < h; j++) sum += job->share[i * h + j];
            for (int64_t j = 0; j < h; j++) job->share[i * h + j] /= sum;
            job->log_sum[i] += logf(sum);
        }
    }
}

/* The softmax of every row, and the logarithm of the sum of its exponentials. */
void siammm_shares(int64_t n, int64_t h, const float *logit, float *share, float *log_sum, int n_threads) {
    shares job = {n, h, logit, share, log_sum};
    together(shares_of_blocks, &job, n_threads);
}
