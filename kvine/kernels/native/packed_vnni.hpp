// Products with packed weights by VNNI, which multiplies bytes without a sign with bytes that have one and adds up four
// products in 32 bits. Those of x have the sign. A weight that has one is stored, or made, larger by an offset, and what
// that adds is taken away: the offset times the sum of x.
#pragma once

#include <immintrin.h>

#include "packed_avx2.hpp"

namespace {

// What VNNI has of 256 bits under two names, and of 512 bits.
#ifdef __AVXVNNI__
inline __m256i add_products(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#endif
inline __m256i fill_ints(std::int32_t x, __m256i) { return _mm256_set1_epi32(x); }
inline __m256i add_ints(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }

#ifdef __AVX512VNNI__
inline __m512i add_products(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline __m512i fill_ints(std::int32_t x, __m512i) { return _mm512_set1_epi32(x); }
inline __m512i add_ints(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

struct PackedAvx512 {
    static constexpr int width = 16;
    using Floats = __m512;
    using Ints = __m512i;
    using Weights = Stored<width>::Weights;

    static Floats fill(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Floats v) { _mm512_storeu_ps(to, v); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }

    static Floats halves(const std::byte* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }

    static Floats bytes(const std::byte* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
};
#endif

template <class Base>
struct PackedVnni : Base {
    using typename Base::Ints;
    using typename Base::Weights;

    template <Packing packing>
    static constexpr int kOffset = kvine::is_signed(packing) ? 1 << (kvine::bits_of(packing) - 1) : 0;

    template <Packing packing>
    static Weights unpack(const std::byte* group, int vector) {
        using Bytes = Stored<Base::width>;
        Weights weights = Bytes::template unpack<packing>(group, vector);
        if constexpr (kvine::bits_of(packing) == 8)  // another number with the highest bit than without, by 128
            for (auto& w : weights.of_inputs) w ^= Bytes::fill(128);
        return weights;
    }

    template <Packing packing>
    static Ints dot(const Weights& weights, const std::int8_t* q, int part, const std::int32_t* halves) {
        constexpr int chunks = 8 / kParts<packing>;
        std::int32_t first = 0;
        if constexpr (kvine::is_signed(packing))
            first = -kOffset<packing> * (kParts<packing> == 2 ? halves[part] : halves[0] + halves[1]);
        Ints sums[2] = {fill_ints(first, Ints{}), Ints{}};  // two, for each waits for the one before
        for (int c = part * chunks; c < (part + 1) * chunks; ++c) {
            std::int32_t four;
            std::memcpy(&four, q + 4 * c, sizeof four);
            const auto w = reinterpret_cast<Ints>(weights.of_inputs[c]);
            sums[c % 2] = add_products(sums[c % 2], w, fill_ints(four, Ints{}));
        }
        return add_ints(sums[0], sums[1]);
    }
};

}  // namespace
