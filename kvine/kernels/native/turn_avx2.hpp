// Turning 8 rows of 16 numbers, in AVX2 with F16C: also what AVX-512 does, for which a tile of 16 rows would be too many
// exchanges for too little.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "lanes.hpp"

namespace {

// Units of 4 bytes at byte `at` of 8 rows: the first 4 of each row as 4 vectors, one of each unit.
inline void turn_units(const std::byte* const* rows, std::int64_t at, __m256 (&units)[4]) {
    __m256 pairs[4];  // rows i and i + 4
    for (int i = 0; i < 4; ++i) {
        const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
        pairs[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(low),
                                        _mm_loadu_ps(reinterpret_cast<const float*>(rows[i + 4] + at)), 1);
    }
    const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(pairs[0], pairs[1]));
    const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(pairs[2], pairs[3]));
    const __m256d high01 = _mm256_castps_pd(_mm256_unpackhi_ps(pairs[0], pairs[1]));
    const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(pairs[2], pairs[3]));
    units[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low01, low23));
    units[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low01, low23));
    units[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high01, high23));
    units[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high01, high23));
}

// Two numbers of 2 bytes in each unit, widened: those in the lower halves, and those in the upper ones.
template <class Format>
void split_units(__m256 units, __m256& even, __m256& odd) {
    const __m256i all = _mm256_castps_si256(units);
    if constexpr (std::is_same_v<Format, Bf16>) {
        even = _mm256_castsi256_ps(_mm256_slli_epi32(all, 16));
        odd = _mm256_castsi256_ps(_mm256_and_si256(all, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    } else {
        const __m256i lower = _mm256_and_si256(all, _mm256_set1_epi32(0xffff)), upper = _mm256_srli_epi32(all, 16);
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, upper), _MM_SHUFFLE(3, 1, 2, 0));
        even = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
        odd = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    }
}

// Number d of row k goes to to[d * Stride + k].
template <class Format, int Stride>
void turn_avx2(const std::byte* const* rows, std::int64_t at, float* to) {
    constexpr int kUnitDims = 4 / Format::size;
    for (int first = 0; first < kTurnedDims; first += 4 * kUnitDims) {
        __m256 units[4];
        turn_units(rows, at + first * Format::size, units);
        for (int u = 0; u < 4; ++u) {
            float* place = to + (first + u * kUnitDims) * Stride;
            if constexpr (kUnitDims == 1) {
                _mm256_storeu_ps(place, units[u]);
            } else {
                __m256 even, odd;
                split_units<Format>(units[u], even, odd);
                _mm256_storeu_ps(place, even);
                _mm256_storeu_ps(place + Stride, odd);
            }
        }
    }
}

}  // namespace
