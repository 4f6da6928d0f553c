// The loops of a product with a packed weight. `PackedLanes` is what an instruction set brings for it:
//
//   width                      outputs that are computed side by side, 8 or 16
//   Floats, Ints               vectors of so many numbers
//   Weights                    a group's weights of so many outputs
//   unpack<packing>(group, vector)   those of the first outputs of a tile, or of the second ones if a vector is half a tile
//   dot<packing>(weights, q, part, halves)   their products with 32 numbers of x, summed exactly; with 16 of them where
//                              halves of a group have scales of their own. `halves` are the sums of each 16 numbers of x
//   halves(from), bytes(from)  so many numbers in fp16, or in bytes with a sign
//   load, store, fill, mul, fma, to_floats
#pragma once

#include <algorithm>
#include <limits>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

using kvine::kGroup;
using kvine::kTileOfOutputs;
using kvine::Packing;
using kvine::Quantized;

// Rows that are computed with a tile's weights at a time: their sums and what they read of x stay in the nearest cache.
constexpr std::int64_t kRowsAtATime = 64;

template <class Format>
void quantize(const kvine::Product& product, const Quantized& to, std::int64_t begin, std::int64_t end) {
    const std::int64_t groups = product.in / kGroup;
    for (std::int64_t row = begin; row < end; ++row)
        for (std::int64_t group = 0; group < groups; ++group) {
            const std::byte* from = product.x + (row * product.in + group * kGroup) * Format::size;
            float x[kGroup];
            std::int32_t sizes[kGroup], wholes[kGroup];
            for (int i = 0; i < kGroup; ++i) x[i] = load_scalar<Format>(from + i * Format::size);
            // Without its sign a number is as large as its bits, and those of infinity and NaN are the largest.
            std::memcpy(sizes, x, sizeof sizes);
            std::int32_t most = 0;
            for (int i = 0; i < kGroup; ++i) {
                const std::int32_t size = sizes[i] & 0x7fffffff;
                most = size > most ? size : most;
            }
            const float greatest = from_bits(static_cast<std::uint32_t>(most));
            const bool broken = most >= 0x7f800000;
            const float factor = !broken && greatest > 1e-30f ? 127.0f / greatest : 0.0f;  // 1e-30 and less is 0
            // Adding so much leaves whole numbers, rounded to nearest, in the lowest bits.
            for (int i = 0; i < kGroup; ++i) x[i] = x[i] * factor + 0x1.8p23f;
            std::memcpy(wholes, x, sizeof wholes);
            const auto zero = static_cast<std::int32_t>(to_bits(0x1.8p23f));
            for (int i = 0; i < kGroup; ++i) wholes[i] = broken ? 0 : wholes[i] - zero;
            std::int32_t halves[2] = {};
            for (int i = 0; i < kGroup / 2; ++i) halves[0] += wholes[i];
            for (int i = kGroup / 2; i < kGroup; ++i) halves[1] += wholes[i];
            std::int8_t bytes[kGroup];
            for (int i = 0; i < kGroup; ++i) bytes[i] = static_cast<std::int8_t>(wholes[i]);
            const std::int64_t at = group * product.rows + row;
            std::memcpy(to.q + at * kGroup, bytes, sizeof bytes);
            std::memcpy(to.halves + 2 * at, halves, sizeof halves);
            const float scale = broken ? std::numeric_limits<float>::quiet_NaN() : factor > 0 ? greatest / 127.0f : 0.0f;
            to.scale[at] = scale;
            to.sum[at] = scale * static_cast<float>(halves[0] + halves[1]);
        }
}

template <class Format>
void store_tile(const kvine::Product& product, std::int64_t row, std::int64_t out, const float* sums) {
    std::byte* y = product.y + (row * product.out + out) * Format::size;
    float biased[kTileOfOutputs];
    const std::int64_t count = std::min<std::int64_t>(kTileOfOutputs, product.out - out);
    if (product.bias) {
        for (std::int64_t o = 0; o < count; ++o)
            biased[o] = sums[o] + load_scalar<Format>(product.bias + (out + o) * Format::size);
        sums = biased;
    }
    if (count == kTileOfOutputs) {  // a constant, so that it becomes vectors
        for (int o = 0; o < kTileOfOutputs; ++o) store_scalar<Format>(y + o * Format::size, sums[o]);
    } else {
        for (std::int64_t o = 0; o < count; ++o) store_scalar<Format>(y + o * Format::size, sums[o]);
    }
}

inline void store_tile(kvine::DType dtype, const kvine::Product& product, std::int64_t row, std::int64_t out,
                       const float* sums) {
    if (dtype == kvine::kBf16) return store_tile<Bf16>(product, row, out, sums);
    if (dtype == kvine::kFp16) return store_tile<Fp16>(product, row, out, sums);
    store_tile<Fp32>(product, row, out, sums);
}

// Parts of a group that have a scale of their own.
template <Packing packing>
constexpr int kParts = kvine::scaling_of(packing) == kvine::Scaling::kSuperHalves ? 2 : 1;

// The largest size of a number of a weight. Products with 127 of two such are summed at a time, and so many in 16 bits.
template <Packing packing>
constexpr int kLargest =
    kvine::is_signed(packing) ? 1 << (kvine::bits_of(packing) - 1) : (1 << kvine::bits_of(packing)) - 1;
template <Packing packing>
constexpr int kPairsIn16Bits = 32767 / (2 * 127 * kLargest<packing>);

// Vectors of outputs in a tile.
template <class Lanes>
constexpr int kVectors = kTileOfOutputs / Lanes::width;

// What the numbers of a group, of one vector of a tile, are multiplied with, and what is added to each.
template <class Lanes, Packing packing>
struct Scales {
    typename Lanes::Floats scale[kParts<packing>], least;

    Scales(const std::byte* head, const std::byte* group, int vector) {
        using kvine::Scaling;
        constexpr Scaling scaling = kvine::scaling_of(packing);
        constexpr std::int64_t kQuants = kvine::quants_of_group(packing);
        const std::byte* own = group + kQuants;
        const std::byte* halves = (kvine::is_super(packing) ? head : own) + vector * 2 * Lanes::width;
        const std::byte* bytes = own + vector * Lanes::width;
        for (int p = 0; p < kParts<packing>; ++p) {
            scale[p] = Lanes::halves(halves);
            if constexpr (kvine::is_super(packing))
                scale[p] = Lanes::mul(scale[p], Lanes::bytes(bytes + p * kTileOfOutputs));
        }
        if constexpr (kvine::has_leasts(packing)) {
            least = Lanes::halves(halves + 2 * kTileOfOutputs);
            if constexpr (kvine::is_super(packing)) least = Lanes::mul(least, Lanes::bytes(bytes + kTileOfOutputs));
        } else if constexpr (!kvine::is_signed(packing)) {
            least = Lanes::mul(scale[0], Lanes::fill(static_cast<float>(-(1 << (kvine::bits_of(packing) - 1)))));
        }
    }
};

// The sum of a vector with the products of one group and one row of x added, which are at place `at` of x.
template <class Lanes, Packing packing>
typename Lanes::Floats add_row(const Scales<Lanes, packing>& scales, const typename Lanes::Weights& weights,
                               const Quantized& x, std::int64_t at, typename Lanes::Floats sum) {
    const auto scale = Lanes::fill(x.scale[at]);
    for (int part = 0; part < kParts<packing>; ++part) {
        const auto dot = Lanes::template dot<packing>(weights, x.q + at * kGroup, part, x.halves + 2 * at);
        sum = Lanes::fma(Lanes::to_floats(dot), Lanes::mul(scales.scale[part], scale), sum);
    }
    if constexpr (!kvine::is_signed(packing)) sum = Lanes::fma(scales.least, Lanes::fill(x.sum[at]), sum);
    return sum;
}

// Adds one group of one vector of a tile to the sums of `count` rows from `row` on. Each row is treated by itself.
template <class Lanes, Packing packing>
void add_group(const std::byte* head, const std::byte* group, int vector, const Quantized& x, std::int64_t at,
               std::int64_t count, float* sums) {
    const Scales<Lanes, packing> scales(head, group, vector);
    const typename Lanes::Weights weights = Lanes::template unpack<packing>(group, vector);
    for (std::int64_t r = 0; r < count; ++r) {
        float* to = sums + r * kTileOfOutputs + vector * Lanes::width;
        Lanes::store(to, add_row<Lanes, packing>(scales, weights, x, at + r, Lanes::load(to)));
    }
}

// How far ahead of its use a weight is fetched. Past the end of the tensor this fetches nothing that is needed.
constexpr std::int64_t kAheadBytes = 1536;

// Group `g` of a tile, and the superblock that it is part of; fetches what comes later. What depends on the packing alone
// is a constant, which the compiler does not see by itself where a function has other arguments too.
template <Packing packing>
struct Group {
    const std::byte *head, *group;

    Group(const std::byte* tile, std::int64_t g) {
        constexpr std::int64_t kSize = kvine::bytes_of_group(packing), kHead = kvine::head_of_super(packing);
        constexpr std::int64_t kSuper = kHead + kvine::kGroupsOfSuper * kSize;
        head = tile + g / kvine::kGroupsOfSuper * kSuper;
        group = kvine::is_super(packing) ? head + kHead + g % kvine::kGroupsOfSuper * kSize : tile + g * kSize;
        for (std::int64_t line = 0; line < kSize; line += 64) __builtin_prefetch(group + kAheadBytes + line);
    }
};

// y of one row, with the sums in registers.
template <class Lanes, Packing packing, int Tiles>
void multiply_row(const kvine::Product& product, kvine::DType dtype, const Quantized& x, std::int64_t tile,
                  std::int64_t apart) {
    typename Lanes::Floats sums[Tiles][kVectors<Lanes>];
    for (auto& of_tile : sums)
        for (auto& sum : of_tile) sum = Lanes::fill(0.0f);
    const std::int64_t groups = product.in / kGroup, size = kvine::bytes_of_tile(packing, product.in);
    for (std::int64_t g = 0; g < groups; ++g)
        for (int t = 0; t < Tiles; ++t) {
            const Group<packing> at(product.weight + (tile + t * apart) * size, g);
            for (int v = 0; v < kVectors<Lanes>; ++v)
                sums[t][v] = add_row<Lanes, packing>(Scales<Lanes, packing>(at.head, at.group, v),
                                                     Lanes::template unpack<packing>(at.group, v), x, g, sums[t][v]);
        }
    for (int t = 0; t < Tiles; ++t) {
        alignas(64) float of_tile[kTileOfOutputs];
        for (int v = 0; v < kVectors<Lanes>; ++v) Lanes::store(of_tile + v * Lanes::width, sums[t][v]);
        store_tile(dtype, product, 0, (tile + t * apart) * kTileOfOutputs, of_tile);
    }
}

// y of `Tiles` tiles, `tile`, `tile + apart`, ..., which are streams of their own, and of `count` rows from `row` on.
template <class Lanes, Packing packing, int Tiles>
void multiply_tiles(const kvine::Product& product, kvine::DType dtype, const Quantized& x, std::int64_t row,
                    std::int64_t count, std::int64_t tile, std::int64_t apart) {
    if (product.rows == 1) return multiply_row<Lanes, packing, Tiles>(product, dtype, x, tile, apart);
    const std::int64_t groups = product.in / kGroup, size = kvine::bytes_of_tile(packing, product.in);
    alignas(64) float sums[Tiles][kRowsAtATime / Tiles * kTileOfOutputs];
    for (auto& of_tile : sums) std::fill_n(of_tile, count * kTileOfOutputs, 0.0f);
    for (std::int64_t g = 0; g < groups; ++g)
        for (int t = 0; t < Tiles; ++t) {
            const Group<packing> at(product.weight + (tile + t * apart) * size, g);
            for (int v = 0; v < kVectors<Lanes>; ++v)
                add_group<Lanes, packing>(at.head, at.group, v, x, g * product.rows + row, count, sums[t]);
        }
    for (int t = 0; t < Tiles; ++t)
        for (std::int64_t r = 0; r < count; ++r)
            store_tile(dtype, product, row + r, (tile + t * apart) * kTileOfOutputs, sums[t] + r * kTileOfOutputs);
}

// Of few rows the weight's way from memory is what counts, and two streams keep more reads in flight than one.
template <class Lanes, Packing packing>
void multiply_packed(const kvine::Product& product, kvine::DType dtype, const Quantized& x, std::int64_t begin,
                     std::int64_t end) {
    constexpr int kStreams = 2;
    for (std::int64_t row = 0; row < product.rows; row += kRowsAtATime) {
        const std::int64_t count = std::min(kRowsAtATime, product.rows - row);
        std::int64_t tile = begin;
        if (count <= kRowsAtATime / kStreams) {
            const std::int64_t apart = (end - begin) / kStreams;
            for (; tile < begin + apart; ++tile)
                multiply_tiles<Lanes, packing, kStreams>(product, dtype, x, row, count, tile, apart);
            tile = begin + apart * kStreams;
        }
        for (; tile < end; ++tile) multiply_tiles<Lanes, packing, 1>(product, dtype, x, row, count, tile, 0);
    }
}

}  // namespace
