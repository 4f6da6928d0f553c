// The number formats that weights and activations come in, as scalars: bf16, fp16 and fp32, each from and to fp32.
//
// Everything here has internal linkage. The file is compiled into units with different instruction sets, and a function
// that the linker could share between them might bring AVX-512 to a CPU without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

inline float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Fp32 {
    using Stored = float;
    static constexpr std::int64_t size = 4;
    static float widen(float stored) { return stored; }
    static float round(float value) { return value; }
};

struct Bf16 {
    using Stored = std::uint16_t;
    static constexpr std::int64_t size = 2;
    static float widen(std::uint16_t stored) { return from_bits(std::uint32_t{stored} << 16); }

    // To nearest, ties to even; a NaN stays one, whichever bits it had.
    static std::uint16_t round(float value) {
        const std::uint32_t bits = to_bits(value);
        if (value != value) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
        return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

struct Fp16 {
    using Stored = std::uint16_t;
    static constexpr std::int64_t size = 2;
    static constexpr float max = 65504;

    // The 15 bits without the sign, read as fp32, are the value times 2^-112, denormals too; infinity and NaN are not.
    static float widen(std::uint16_t stored) {
        const float magnitude = from_bits((stored & 0x7fffu) << 13) * 0x1p112f;
        const std::uint32_t special = (stored & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
        return from_bits(to_bits(magnitude) | special | (std::uint32_t{stored} & 0x8000u) << 16);
    }

    // To nearest, ties to even: for normal numbers by carrying in integers, for denormals by the rounding of an addition
    // whose last place is 2^-24.
    static std::uint16_t round(float value) {
        const std::uint32_t bits = to_bits(value);
        const std::uint32_t sign = bits >> 16 & 0x8000u;
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        std::uint32_t rounded;
        if (magnitude > 0x7f800000u) {
            rounded = 0x7e00u;
        } else if (magnitude >= 0x477ff000u) {  // 65,520 and more
            rounded = 0x7c00u;
        } else if (magnitude >= 0x38800000u) {  // 2^-14, the least normal fp16
            rounded = (magnitude - 0x38000000u + 0x0fffu + (magnitude >> 13 & 1u)) >> 13;
        } else {
            rounded = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
        }
        return static_cast<std::uint16_t>(sign | rounded);
    }
};

// Tensors of a mapped file may lie at any address, so that they are not to be dereferenced.
template <class Format>
inline float load_scalar(const std::byte* from) {
    typename Format::Stored stored;
    std::memcpy(&stored, from, sizeof stored);
    return Format::widen(stored);
}

template <class Format>
inline void store_scalar(std::byte* to, float value) {
    const typename Format::Stored stored = Format::round(value);
    std::memcpy(to, &stored, sizeof stored);
}

}  // namespace
