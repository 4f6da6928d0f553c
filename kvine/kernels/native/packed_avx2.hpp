// Products with packed weights by AVX2; also what the AVX-512 path uses.
#pragma once

#include <immintrin.h>

#include "multiply_packed.hpp"

namespace {

struct PackedAvx2 {
    static constexpr int width = 8;
    using Floats = __m256;
    using Ints = __m256i;
    struct Weights {
        __m256i of_inputs[8];  // 4 inputs of each of the 8 outputs
    };

    static Floats fill(float x) { return _mm256_set1_ps(x); }
    static Floats load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Floats v) { _mm256_storeu_ps(to, v); }
    static Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }

    static Floats halves(const std::byte* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }

    static Floats bytes(const std::byte* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
    }

    template <Packing packing>
    static Weights unpack(const std::byte* group, int half) {
        constexpr int bits = kvine::bits_of(packing);
        Weights weights;
        const auto chunk = [&](int c) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + c * 64 + half * 32));
        };
        if constexpr (bits == 8) {
            for (int c = 0; c < 8; ++c) weights.of_inputs[c] = chunk(c);
        } else {
            const __m256i lower = _mm256_set1_epi8(15);
            for (int c = 0; c < 4; ++c) {
                const __m256i both = chunk(c);
                weights.of_inputs[2 * c] = _mm256_and_si256(both, lower);
                weights.of_inputs[2 * c + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), lower);
            }
        }
        if constexpr (bits == 5 || bits == 6) add_upper_bits<bits - 4>(chunk, weights);
        if constexpr (bits == 6)
            for (__m256i& w : weights.of_inputs) w = _mm256_sub_epi8(w, _mm256_set1_epi8(32));
        return weights;
    }

    // Shifts the bits beyond four to where they belong: a plane has those of 8 / bits chunks side by side.
    template <int bits, class Chunk>
    static void add_upper_bits(const Chunk& chunk, Weights& weights) {
        constexpr int count = 8 / bits;
        const __m256i upper = _mm256_set1_epi8(((1 << bits) - 1) << 4);
        for (int plane = 0; plane < bits; ++plane) {
            const __m256i all = chunk(4 + plane);
            for (int c = 0; c < count; ++c) {
                const int left = 4 - c * bits;
                const __m256i there = left >= 0 ? _mm256_slli_epi16(all, left) : _mm256_srli_epi16(all, -left);
                __m256i& w = weights.of_inputs[plane * count + c];
                w = _mm256_or_si256(w, _mm256_and_si256(there, upper));
            }
        }
    }

    template <Packing packing>
    static Ints dot(const Weights& weights, const std::int8_t* q, int part) {
        constexpr int chunks = 8 / kParts<packing>, pairs = std::min(kPairsIn16Bits<packing>, chunks);
        __m256i sum = _mm256_setzero_si256();
        for (int first = part * chunks; first < (part + 1) * chunks; first += pairs) {
            __m256i in_16_bits = _mm256_setzero_si256();
            for (int c = first; c < first + pairs; ++c) {
                std::int32_t four;
                std::memcpy(&four, q + 4 * c, sizeof four);
                const __m256i products = multiply<packing>(weights.of_inputs[c], _mm256_set1_epi32(four));
                in_16_bits = _mm256_add_epi16(in_16_bits, products);
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(in_16_bits, _mm256_set1_epi16(1)));
        }
        return sum;
    }

    // Bytes with a sign are multiplied as sizes, the signs going to x.
    template <Packing packing>
    static __m256i multiply(__m256i w, __m256i x) {
        if constexpr (kvine::is_signed(packing)) {
            return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        } else {
            return _mm256_maddubs_epi16(w, x);
        }
    }
};

}  // namespace
