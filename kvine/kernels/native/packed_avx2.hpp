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

    static Floats scales(const std::byte* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }

    template <Packing packing>
    static Weights unpack(const std::byte* group, int half) {
        Weights weights;
        const auto chunk = [&](int c) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + c * 64 + half * 32));
        };
        if constexpr (packing == kvine::k8Bit) {
            for (int c = 0; c < 8; ++c) weights.of_inputs[c] = chunk(c);
        } else {
            const __m256i lower = _mm256_set1_epi8(15);
            for (int c = 0; c < 4; ++c) {
                const __m256i both = chunk(c);
                weights.of_inputs[2 * c] = _mm256_and_si256(both, lower);
                weights.of_inputs[2 * c + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), lower);
            }
        }
        return weights;
    }

    template <Packing packing>
    static Ints dot(const Weights& weights, const std::int8_t* q) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i sum = _mm256_setzero_si256();
        for (int c = 0; c < 8; ++c) {
            std::int32_t four;
            std::memcpy(&four, q + 4 * c, sizeof four);
            const __m256i x = _mm256_set1_epi32(four), w = weights.of_inputs[c];
            if constexpr (packing == kvine::k8Bit) {
                // Bytes with a sign are multiplied as sizes, the signs going to x: 2 * 128 * 127 fits into 16 bits.
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
            } else {
                sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));  // at most 8 * 2 * 15 * 127
            }
        }
        return packing == kvine::k8Bit ? sum : _mm256_madd_epi16(sum, ones);
    }
};

}  // namespace
