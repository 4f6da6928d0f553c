// The loops of a product with few rows.
//
// A tile is a few rows of the weight times a few rows of x. The weight streams from memory and is read once for all rows
// of x: those beyond the first tile find it in the nearest cache.
#pragma once

#include <type_traits>

#include "lanes.hpp"

namespace {

using kvine::Product;

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

// Calls f with `count`, or `Most` if that is less, as a constant.
template <int Most, class F>
void with_count(std::int64_t count, const F& f) {
    if constexpr (Most > 1)
        if (count < Most) return with_count<Most - 1>(count, f);
    f(std::integral_constant<int, Most>{});
}

// y of `Rows` rows from `row` on and `Outputs` outputs: `out`, `out + apart`, ... `x` is arranged, and begins at `row`.
template <class Lanes, class Format, int Outputs, int Rows>
void multiply_tile(const Product& product, const float* x, std::int64_t row, std::int64_t out, std::int64_t apart) {
    const std::byte* weight[Outputs];
    for (int o = 0; o < Outputs; ++o) weight[o] = product.weight + (out + o * apart) * product.in * Format::size;
    float dots[Rows][Outputs];
    dot_tile<Lanes, Format>(weight, x, product.in, dots);
    for (int r = 0; r < Rows; ++r)
        for (int o = 0; o < Outputs; ++o) {
            const std::int64_t column = out + o * apart;
            float y = dots[r][o];
            if (product.bias) y += load_scalar<Format>(product.bias + column * Format::size);
            store_scalar<Format>(product.y + ((row + r) * product.out + column) * Format::size, y);
        }
}

template <class Lanes, class Format, int Outputs>
void multiply_outputs(const Product& product, const float* arranged, std::int64_t out, std::int64_t apart) {
    const std::int64_t stride = padded<Lanes>(product.in);
    for (std::int64_t row = 0; row < product.rows; row += kTileRows<Lanes>)
        with_count<kTileRows<Lanes>>(product.rows - row, [&](auto rows) {
            multiply_tile<Lanes, Format, Outputs, decltype(rows)::value>(product, arranged + row * stride, row, out, apart);
        });
}

// The outputs of a tile lie far apart, so that each is a long stream of its own: four keep more reads in flight than one
// does, and than four short ones.
template <class Lanes, class Format>
void multiply(const Product& product, const float* arranged, std::int64_t begin, std::int64_t end) {
    const std::int64_t apart = (end - begin) / kTileOutputs;
    for (std::int64_t out = begin; out < begin + apart; ++out)
        multiply_outputs<Lanes, Format, kTileOutputs>(product, arranged, out, apart);
    for (std::int64_t out = begin + apart * kTileOutputs; out < end; ++out)
        multiply_outputs<Lanes, Format, 1>(product, arranged, out, 0);
}

}  // namespace
