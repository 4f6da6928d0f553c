// A group's weights as they are stored (kernels.hpp), in vectors as GCC and Clang have them for any instruction set: what
// AVX2 and AVX-512 unpack in the same way.
#pragma once

#include <cstring>

#include "kernels.hpp"

namespace {

template <int width>
struct Stored {
    typedef std::uint16_t Words __attribute__((vector_size(4 * width)));

    struct Weights {
        Words of_inputs[8];  // 4 inputs, a byte each, of each of `width` outputs
    };

    // In all bytes.
    static Words fill(int byte) { return Words{} + static_cast<std::uint16_t>(byte * 0x101); }

    // Numbers of fewer than 8 bits are as they are stored, without a sign.
    template <kvine::Packing packing>
    static Weights unpack(const std::byte* group, int vector) {
        constexpr int bits = kvine::bits_of(packing);
        Weights weights;
        const auto chunk = [&](int c) {
            Words words;
            std::memcpy(&words, group + c * 64 + vector * sizeof words, sizeof words);
            return words;
        };
        if constexpr (bits == 8) {
            for (int c = 0; c < 8; ++c) weights.of_inputs[c] = chunk(c);
        } else {
            const Words lower = fill(15);
            for (int c = 0; c < 4; ++c) {
                const Words both = chunk(c);
                weights.of_inputs[2 * c] = both & lower;
                weights.of_inputs[2 * c + 1] = both >> 4 & lower;
            }
        }
        if constexpr (bits == 5 || bits == 6) add_upper_bits<bits - 4>(chunk, weights);
        return weights;
    }

  private:
    // Shifts the bits beyond four to where they belong: a plane has those of 8 / bits chunks side by side.
    template <int bits, class Chunk>
    static void add_upper_bits(const Chunk& chunk, Weights& weights) {
        constexpr int count = 8 / bits;
        const Words upper = fill(((1 << bits) - 1) << 4);
        for (int plane = 0; plane < bits; ++plane) {
            const Words all = chunk(4 + plane);
            for (int c = 0; c < count; ++c) {
                const int left = 4 - c * bits;
                weights.of_inputs[plane * count + c] |= (left >= 0 ? all << left : all >> -left) & upper;
            }
        }
    }
};

}  // namespace
