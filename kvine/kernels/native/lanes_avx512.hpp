// `Lanes` of AVX-512F (lanes.hpp).
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "lanes.hpp"
#include "turn_avx2.hpp"

namespace {

struct Avx512 {
    static constexpr int width = 16;
    using Floats = __m512;
    using Ints = __m512i;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static Floats fill(float x) { return _mm512_set1_ps(x); }
    static void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }

    static Floats scaled(Floats v, Floats shifted) {
        const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), power));
    }
    static Floats from(Floats least, Floats x, Floats v) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), v);
    }

    static float greatest(Floats v) { return _mm512_reduce_max_ps(v); }
    static float sum(Floats v) { return _mm512_reduce_add_ps(v); }

    static void sums(Floats a, Floats b, Floats c, Floats d, float* to) {
        const auto fold_two = [](Floats v, Floats w) {
            return _mm512_add_ps(_mm512_shuffle_f32x4(v, w, 0x44), _mm512_shuffle_f32x4(v, w, 0xee));
        };
        const Floats ab = fold_two(a, b), cd = fold_two(c, d);
        Floats all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
        all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
        all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
        const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
        _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));
    }

    template <class Format>
    static constexpr int place(int i) {
        return std::is_same_v<Format, Bf16> ? i % width * 2 + i / width : i;
    }

    template <class Format>
    static Pair<Avx512> widen(const std::byte* stored) {
        if constexpr (std::is_same_v<Format, Fp32>) {
            const auto* floats = reinterpret_cast<const float*>(stored);
            return {_mm512_loadu_ps(floats), _mm512_loadu_ps(floats + width)};
        } else if constexpr (std::is_same_v<Format, Bf16>) {
            // Even places and odd places apart: one instruction for sixteen, where widening in order takes two.
            const __m512i all = _mm512_loadu_si512(stored);
            const __m512i odd = _mm512_and_si512(all, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
            return {_mm512_castsi512_ps(_mm512_slli_epi32(all, 16)), _mm512_castsi512_ps(odd)};
        } else {
            const auto* halves = reinterpret_cast<const __m256i*>(stored);
            return {_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
        }
    }

    template <class Format>
    static void turn(const std::byte* const* rows, std::int64_t at, float* to) {
        turn_avx2<Format, 4 * width>(rows, at, to);
    }

    // For packed blocks (sealed_attend.hpp).
    static constexpr bool kTables = true;

    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Ints bytes(const std::byte* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static Ints bytes_twice(const std::byte* from) {
        const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(half, half));
    }
    template <int Bits>
    static Ints shifted(Ints ints) {
        return Bits ? _mm512_srli_epi32(ints, Bits) : ints;
    }
    template <int First, int Second>
    static Ints shifted(Ints ints) {
        constexpr int a = First, b = Second;
        return _mm512_srlv_epi32(ints, _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b));
    }
    template <int Bits>
    static Floats floats(Ints ints) {
        if constexpr (Bits < 8) ints = _mm512_and_si512(ints, _mm512_set1_epi32((1 << Bits) - 1));
        return _mm512_cvtepi32_ps(ints);
    }
    static Floats look_up(Floats table, Ints places) { return _mm512_permutexvar_ps(places, table); }
    static Floats counted(int mask) {
        const __m512i all = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_cvtepi32_ps(_mm512_and_si512(all, _mm512_set1_epi32(mask)));
    }
};

}  // namespace
