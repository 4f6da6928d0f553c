// `Lanes` of AVX2 with FMA and F16C (lanes.hpp).
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "lanes.hpp"
#include "turn_avx2.hpp"

namespace {

struct Avx2 {
    static constexpr int width = 8;
    using Floats = __m256;
    using Ints = __m256i;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static Floats fill(float x) { return _mm256_set1_ps(x); }
    static void store(float* to, Floats v) { _mm256_storeu_ps(to, v); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
    static Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }

    static Floats scaled(Floats v, Floats shifted) {
        const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), power));
    }
    static Floats from(Floats least, Floats x, Floats v) {
        return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), v);
    }

    static float greatest(Floats v) {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }

    static float sum(Floats v) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
    }

    static void sums(Floats a, Floats b, Floats c, Floats d, float* to) {
        const auto fold = [](Floats v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); };
        const auto fold_two = [](__m128 v, __m128 w) { return _mm_add_ps(_mm_movelh_ps(v, w), _mm_movehl_ps(w, v)); };
        const __m128 ab = fold_two(fold(a), fold(b)), cd = fold_two(fold(c), fold(d));
        _mm_storeu_ps(to, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
    }

    template <class Format>
    static constexpr int place(int i) {
        return std::is_same_v<Format, Bf16> ? i % width * 2 + i / width : i;
    }

    template <class Format>
    static Pair<Avx2> widen(const std::byte* stored) {
        if constexpr (std::is_same_v<Format, Fp32>) {
            const auto* floats = reinterpret_cast<const float*>(stored);
            return {_mm256_loadu_ps(floats), _mm256_loadu_ps(floats + width)};
        } else if constexpr (std::is_same_v<Format, Bf16>) {
            // Even places and odd places apart: one instruction for eight, where widening in order takes two.
            const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(stored));
            const __m256i odd = _mm256_and_si256(all, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
            return {_mm256_castsi256_ps(_mm256_slli_epi32(all, 16)), _mm256_castsi256_ps(odd)};
        } else {
            const auto* halves = reinterpret_cast<const __m128i*>(stored);
            return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
        }
    }

    template <class Format>
    static void turn(const std::byte* const* rows, std::int64_t at, float* to) {
        turn_avx2<Format, 4 * width>(rows, at, to);
    }

    // For packed blocks (sealed_attend.hpp).
    static constexpr bool kTables = false;  // 8 numbers are too few for one

    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Ints bytes(const std::byte* from) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    static Ints bytes_twice(const std::byte* from) {
        std::int32_t half;
        std::memcpy(&half, from, sizeof half);
        return _mm256_cvtepu8_epi32(_mm_set1_epi32(half));
    }
    template <int Bits>
    static Ints shifted(Ints ints) {
        return Bits ? _mm256_srli_epi32(ints, Bits) : ints;
    }
    template <int First, int Second>
    static Ints shifted(Ints ints) {
        return _mm256_srlv_epi32(ints, _mm256_setr_epi32(First, First, First, First, Second, Second, Second, Second));
    }
    template <int Bits>
    static Floats floats(Ints ints) {
        if constexpr (Bits < 8) ints = _mm256_and_si256(ints, _mm256_set1_epi32((1 << Bits) - 1));
        return _mm256_cvtepi32_ps(ints);
    }
};

}  // namespace
