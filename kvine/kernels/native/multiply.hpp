// The loops of a product, written once for all instruction sets; each unit that includes this brings its own `Lanes`:
//
//   width                   fp32 numbers in a vector
//   Floats                  such a vector: zero(), load(from), store(to, v), fma(a, b, c) = a * b + c, sum(v)
//   widen<Format>(stored)   2 * width numbers at any address as two vectors, in an order of its choice
//
// A tile is a few rows of the weight times a few rows of x. The weight streams from memory and is read once for all rows
// of x: those beyond the first tile find it in the nearest cache.
#pragma once

#include "formats.hpp"
#include "linear.hpp"

namespace {

using kvine::Path;
using kvine::Product;

// 4 × 3 sums, 3 vectors of x and one of weights are the 16 registers of AVX2. The outputs of a tile lie far apart, so
// that each is a long stream of its own: four keep more reads in flight than one does, and than four short ones.
constexpr int kTileOutputs = 4;
constexpr int kTileRows = 3;

// How far ahead of its use a weight is fetched. Past the end of the tensor this fetches nothing that is needed.
constexpr std::int64_t kPrefetchBytes = 1024;

template <class Lanes>
struct Pair {
    typename Lanes::Floats first, second;
};

template <class Lanes>
constexpr std::int64_t kStep = 2 * Lanes::width;

template <class Lanes>
std::int64_t padded(std::int64_t in) {
    return (in + kStep<Lanes> - 1) / kStep<Lanes> * kStep<Lanes>;
}

// The last, incomplete step of a row, filled up with zeros: what lies behind the row's end is not ours to read, and
// might be a NaN, which times zero is no zero.
template <class Lanes, class Format>
Pair<Lanes> widen_rest(const std::byte* stored, std::int64_t count) {
    std::byte rest[kStep<Lanes> * Format::size] = {};
    std::memcpy(rest, stored, count * Format::size);
    return Lanes::template widen<Format>(rest);
}

template <class Lanes, class Format>
void arrange(const Product& product, float* arranged) {
    const std::int64_t in = product.in, whole = in - in % kStep<Lanes>;
    for (std::int64_t row = 0; row < product.rows; ++row) {
        const std::byte* x = product.x + row * in * Format::size;
        for (std::int64_t at = 0; at < in; at += kStep<Lanes>, arranged += kStep<Lanes>) {
            const Pair<Lanes> pair = at < whole ? Lanes::template widen<Format>(x + at * Format::size)
                                                : widen_rest<Lanes, Format>(x + at * Format::size, in - at);
            Lanes::store(arranged, pair.first);
            Lanes::store(arranged + Lanes::width, pair.second);
        }
    }
}

// y of `Rows` rows from `row` on and `Outputs` outputs: `out`, `out + apart`, ... `x` is arranged, and begins at `row`.
template <class Lanes, class Format, int Outputs, int Rows>
void multiply_tile(const Product& product, const float* x, std::int64_t row, std::int64_t out, std::int64_t apart) {
    const std::int64_t in = product.in, stride = padded<Lanes>(in), whole = in - in % kStep<Lanes>;
    const std::byte* weight[Outputs];
    for (int o = 0; o < Outputs; ++o) weight[o] = product.weight + (out + o * apart) * in * Format::size;

    typename Lanes::Floats sums[Outputs][Rows];
    for (auto& of_output : sums)
        for (auto& sum : of_output) sum = Lanes::zero();

    const auto add = [&](int o, std::int64_t at, const Pair<Lanes>& pair) {
        for (int r = 0; r < Rows; ++r)
            sums[o][r] = Lanes::fma(pair.first, Lanes::load(x + r * stride + at), sums[o][r]);
        for (int r = 0; r < Rows; ++r)
            sums[o][r] = Lanes::fma(pair.second, Lanes::load(x + r * stride + at + Lanes::width), sums[o][r]);
    };
    for (std::int64_t at = 0; at < whole; at += kStep<Lanes>)
        for (int o = 0; o < Outputs; ++o) {
            const std::byte* stored = weight[o] + at * Format::size;
            __builtin_prefetch(stored + kPrefetchBytes);
            add(o, at, Lanes::template widen<Format>(stored));
        }
    if (whole < in)
        for (int o = 0; o < Outputs; ++o)
            add(o, whole, widen_rest<Lanes, Format>(weight[o] + whole * Format::size, in - whole));

    for (int o = 0; o < Outputs; ++o) {
        const std::int64_t column = out + o * apart;
        for (int r = 0; r < Rows; ++r) {
            float y = Lanes::sum(sums[o][r]);
            if (product.bias) y += load_scalar<Format>(product.bias + column * Format::size);
            store_scalar<Format>(product.y + ((row + r) * product.out + column) * Format::size, y);
        }
    }
}

template <class Lanes, class Format, int Outputs>
void multiply_outputs(const Product& product, const float* arranged, std::int64_t out, std::int64_t apart) {
    const std::int64_t stride = padded<Lanes>(product.in);
    std::int64_t row = 0;
    for (; row + kTileRows <= product.rows; row += kTileRows)
        multiply_tile<Lanes, Format, Outputs, kTileRows>(product, arranged + row * stride, row, out, apart);
    static_assert(kTileRows == 3, "the two cases below are the rows that are left");
    if (product.rows - row == 2)
        multiply_tile<Lanes, Format, Outputs, 2>(product, arranged + row * stride, row, out, apart);
    if (product.rows - row == 1)
        multiply_tile<Lanes, Format, Outputs, 1>(product, arranged + row * stride, row, out, apart);
}

template <class Lanes, class Format>
void multiply(const Product& product, const float* arranged, std::int64_t begin, std::int64_t end) {
    const std::int64_t apart = (end - begin) / kTileOutputs;
    for (std::int64_t out = begin; out < begin + apart; ++out)
        multiply_outputs<Lanes, Format, kTileOutputs>(product, arranged, out, apart);
    for (std::int64_t out = begin + apart * kTileOutputs; out < end; ++out)
        multiply_outputs<Lanes, Format, 1>(product, arranged, out, 0);
}

template <class Lanes>
constexpr Path make_path(const char* name) {
    return {
        name,
        kStep<Lanes>,
        {arrange<Lanes, Fp32>, arrange<Lanes, Bf16>, arrange<Lanes, Fp16>},
        {multiply<Lanes, Fp32>, multiply<Lanes, Bf16>, multiply<Lanes, Fp16>},
    };
}

}  // namespace
