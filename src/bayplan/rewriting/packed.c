// cc -std=c11 -O3 -Wall -Wextra
/* One bit for each number, eight to a byte, the first number in the lowest bit.
 *
 * One pass over memory each, so that both take about as long as reading what they read. Where the
 * processor has registers for eight numbers, these do all but the last few; elsewhere, and for
 * those, a plain loop does the same.
 */
#include <stddef.h>
#include <stdint.h>

enum { LANES = 8 };

#ifdef __x86_64__
#include <immintrin.h>
#define WIDE __attribute__((target("avx2")))

WIDE static size_t pack_eights(const float *values, size_t count, float threshold, uint8_t *bits)
{
    const __m256 limit = _mm256_set1_ps(threshold);
    size_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        const __m256 passed = _mm256_cmp_ps(_mm256_loadu_ps(values + at), limit, _CMP_NLE_UQ);
        bits[at / LANES] = (uint8_t)_mm256_movemask_ps(passed);
    }
    return at;
}

WIDE static size_t pass_eights(const uint32_t *gradient, const uint8_t *bits, size_t count, uint32_t *result)
{
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    size_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        const __m256i byte = _mm256_set1_epi32(bits[at / LANES]);
        const __m256i passed = _mm256_cmpeq_epi32(_mm256_and_si256(byte, places), places);
        const __m256i numbers = _mm256_loadu_si256((const __m256i *)(gradient + at));
        _mm256_storeu_si256((__m256i *)(result + at), _mm256_and_si256(numbers, passed));
    }
    return at;
}
#endif

/* Whether each number is above the threshold, or is none. */
void pack_above(const float *values, size_t count, float threshold, uint8_t *bits)
{
    size_t at = 0;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2"))
        at = pack_eights(values, count, threshold, bits);
#endif
    for (; at < count; at += LANES) {
        unsigned byte = 0;
        for (size_t bit = 0; bit < LANES && at + bit < count; bit++)
            byte |= (unsigned)!(values[at + bit] <= threshold) << bit;
        bits[at / LANES] = (uint8_t)byte;
    }
}

static void pass_row(const uint32_t *gradient, const uint8_t *bits, size_t first, size_t count, uint32_t *result)
{
    size_t at = 0;
#define PASS_ONE(at) result[at] = gradient[at] & -(uint32_t)(bits[(first + at) / LANES] >> (first + at) % LANES & 1)
    for (; at < count && (first + at) % LANES; at++)
        PASS_ONE(at);
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2"))
        at += pass_eights(gradient + at, bits + (first + at) / LANES, count - at, result + at);
#endif
    for (; at < count; at++)
        PASS_ONE(at);
}

/* The gradients whose bit is set, as they are, and zeros. Rows of gradients are `step` numbers apart,
 * those of bits and results follow each other; `result` may be `gradient` where all do. */
void pass_gradient(const uint32_t *gradient, size_t step, const uint8_t *bits, size_t num_rows, size_t count,
                   uint32_t *result)
{
    for (size_t row = 0; row < num_rows; row++)
        pass_row(gradient + row * step, bits, row * count, count, result + row * count);
}
