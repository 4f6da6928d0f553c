// Where a packed weight's numbers are within a group (kernels.hpp): written and read one output at a time.
#pragma once

#include "kernels.hpp"

namespace kvine {

// The plane of the bits beyond four: so many inputs, 4 apart, share a byte of it.
constexpr int inputs_in_a_byte(Packing packing) { return 8 / (bits_of(packing) - 4); }

// Writes the 32 numbers of one output.
template <Packing packing>
void put_numbers(const std::uint8_t* q, int output, std::byte* group) {
    std::byte* to = group + output * 4;
    for (int chunk = 0; chunk < (bits_of(packing) == 8 ? 8 : 4); ++chunk, to += 64)
        for (int j = 0; j < 4; ++j) {
            const int fours = (q[chunk % 4 * 8 + j] & 15) | q[chunk % 4 * 8 + 4 + j] << 4;
            to[j] = static_cast<std::byte>(bits_of(packing) == 8 ? q[chunk * 4 + j] : fours);
        }
    if constexpr (bits_of(packing) == 5 || bits_of(packing) == 6) {
        constexpr int bits = bits_of(packing) - 4, count = inputs_in_a_byte(packing);
        for (int plane = 0; plane < bits; ++plane, to += 64)
            for (int j = 0; j < 4; ++j) {
                int byte = 0;
                for (int c = 0; c < count; ++c) byte |= (q[(plane * count + c) * 4 + j] >> 4) << c * bits;
                to[j] = static_cast<std::byte>(byte);
            }
    }
}

// One of them, as stored.
inline int number_at(Packing packing, const std::byte* group, int output, int input) {
    const auto byte = [&](int chunk) { return std::to_integer<int>(group[chunk * 64 + output * 4 + input % 4]); };
    const int chunk = input / 4, bits = bits_of(packing) - 4;
    if (bits == 4) return byte(chunk);
    const int lower = byte(chunk / 2) >> (chunk % 2 * 4) & 15;
    if (bits == 0) return lower;
    const int count = inputs_in_a_byte(packing);
    return lower | (byte(4 + chunk / count) >> (chunk % count * bits) & ((1 << bits) - 1)) << 4;
}

}  // namespace kvine
