// Products with packed weights by AVX2; also what AVX-512 without VNNI uses.
#pragma once

#include <immintrin.h>

#include "multiply_packed.hpp"
#include "packed_stored.hpp"

namespace {

struct PackedAvx2 {
    static constexpr int width = 8;
    using Floats = __m256;
    using Ints = __m256i;
    using Weights = Stored<width>::Weights;

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
    static Weights unpack(const std::byte* group, int vector) {
        Weights weights = Stored<width>::unpack<packing>(group, vector);
        if constexpr (kvine::bits_of(packing) == 6)
            for (auto& w : weights.of_inputs) w = as_words(_mm256_sub_epi8(as_bytes(w), _mm256_set1_epi8(32)));
        return weights;
    }

    template <Packing packing>
    static Ints dot(const Weights& weights, const std::int8_t* q, int part, const std::int32_t*) {
        constexpr int chunks = 8 / kParts<packing>, pairs = std::min(kPairsIn16Bits<packing>, chunks);
        __m256i sum = _mm256_setzero_si256();
        for (int first = part * chunks; first < (part + 1) * chunks; first += pairs) {
            __m256i in_16_bits = _mm256_setzero_si256();
            for (int c = first; c < first + pairs; ++c) {
                std::int32_t four;
                std::memcpy(&four, q + 4 * c, sizeof four);
                const __m256i products = multiply<packing>(as_bytes(weights.of_inputs[c]), _mm256_set1_epi32(four));
                in_16_bits = _mm256_add_epi16(in_16_bits, products);
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(in_16_bits, _mm256_set1_epi16(1)));
        }
        return sum;
    }

  private:
    static __m256i as_bytes(Stored<width>::Words words) { return reinterpret_cast<__m256i>(words); }
    static Stored<width>::Words as_words(__m256i bytes) { return reinterpret_cast<Stored<width>::Words>(bytes); }

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
