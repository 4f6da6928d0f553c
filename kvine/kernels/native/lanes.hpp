// What the loops of all kernels share. They are written once for all instruction sets; each unit that includes them
// brings its own `Lanes`:
//
//   width                   fp32 numbers in a vector
//   Floats                  such a vector: zero(), load(from), store(to, v), fill(x), fma(a, b, c) = a * b + c, add(a, b),
//                           sub(a, b), max(a, b), which is b where a is a NaN, sum(v), greatest(v)
//   sums(a, b, c, d, to)    the sums of four vectors, with the bits of sum(v)
//   scaled(v, shifted)      v times 2 to the power that stands in the lowest bits of `shifted`
//   from(least, x, v)       v where x is not less than `least`, and 0 elsewhere
//   widen<Format>(stored)   2 * width numbers at any address as two vectors, in an order of its choice: at place i of
//                           the two is number place<Format>(i)
//   turn<Format>(rows, at, to)  kTurnedDims numbers from byte `at` of each of kTurnedKeys rows, in their order: number d
//                           of row k goes to to[d * 4 * width + k]
#pragma once

#include "formats.hpp"
#include "kernels.hpp"

namespace {

constexpr int kTurnedKeys = 8, kTurnedDims = 16;

template <class Lanes>
struct Pair {
    typename Lanes::Floats first, second;
};

template <class Lanes>
constexpr std::int64_t kStep = 2 * Lanes::width;

// How far ahead of its use a number is fetched. Past the end of a tensor this fetches nothing that is needed.
constexpr std::int64_t kPrefetchBytes = 1024;

// 4 × 3 sums, 3 vectors of x and one of what is read are the 16 registers of AVX2. Of the 32 of AVX-512, 4 × 5 are sums, 8
// hold what is read of the weight, for all rows of x, and one a vector of x, for all outputs.
constexpr int kTileOutputs = 4;
template <class Lanes>
constexpr int kTileRows = Lanes::width == 16 ? 5 : 3;

// The last, incomplete step of a row, filled up with zeros: what lies behind the row's end is not ours to read, and
// might be a NaN, which times zero is no zero.
template <class Lanes, class Format>
Pair<Lanes> widen_rest(const std::byte* stored, std::int64_t count) {
    std::byte rest[kStep<Lanes> * Format::size] = {};
    std::memcpy(rest, stored, count * Format::size);
    return Lanes::template widen<Format>(rest);
}

template <class Lanes>
constexpr std::int64_t padded(std::int64_t width) {
    return (width + kStep<Lanes> - 1) / kStep<Lanes> * kStep<Lanes>;
}

// Products of `Outputs` rows at the addresses `stored` with `Rows` arranged rows of x, which lie `padded(width)` apart.
template <class Lanes, class Format, int Outputs, int Rows>
void dot_tile(const std::byte* const* stored, const float* x, std::int64_t width, float (&dots)[Rows][Outputs]) {
    const std::int64_t stride = padded<Lanes>(width), whole = width - width % kStep<Lanes>;
    typename Lanes::Floats sums[Outputs][Rows];
    for (auto& of_output : sums)
        for (auto& sum : of_output) sum = Lanes::zero();

    const auto add = [&](std::int64_t at, const auto& pair_of) {
        if constexpr (kTileRows<Lanes> > 3) {
            Pair<Lanes> pairs[Outputs];
            for (int o = 0; o < Outputs; ++o) pairs[o] = pair_of(o);
            for (int r = 0; r < Rows; ++r) {
                const auto first = Lanes::load(x + r * stride + at);
                for (int o = 0; o < Outputs; ++o) sums[o][r] = Lanes::fma(pairs[o].first, first, sums[o][r]);
                const auto second = Lanes::load(x + r * stride + at + Lanes::width);
                for (int o = 0; o < Outputs; ++o) sums[o][r] = Lanes::fma(pairs[o].second, second, sums[o][r]);
            }
        } else {
            for (int o = 0; o < Outputs; ++o) {
                const Pair<Lanes> pair = pair_of(o);
                for (int r = 0; r < Rows; ++r)
                    sums[o][r] = Lanes::fma(pair.first, Lanes::load(x + r * stride + at), sums[o][r]);
                for (int r = 0; r < Rows; ++r)
                    sums[o][r] = Lanes::fma(pair.second, Lanes::load(x + r * stride + at + Lanes::width), sums[o][r]);
            }
        }
    };
    for (std::int64_t at = 0; at < whole; at += kStep<Lanes>)
        add(at, [&](int o) {
            const std::byte* next = stored[o] + at * Format::size;
            __builtin_prefetch(next + kPrefetchBytes);
            return Lanes::template widen<Format>(next);
        });
    if (whole < width)
        add(whole, [&](int o) { return widen_rest<Lanes, Format>(stored[o] + whole * Format::size, width - whole); });
    for (int r = 0; r < Rows; ++r) {
        if constexpr (Outputs == 4) {
            Lanes::sums(sums[0][r], sums[1][r], sums[2][r], sums[3][r], dots[r]);
        } else {
            for (int o = 0; o < Outputs; ++o) dots[r][o] = Lanes::sum(sums[o][r]);
        }
    }
}

// e to the power x for x <= 0, to 1e-7 of its value: 2^n times a polynomial over half a power of two around. Less than
// the least normal number is 0; a NaN stays one. There is no branch in it, so that loops over it become vectors.
inline float exp_of_negative(float x) {
    const float bounded = x < -87.0f ? -87.0f : x;
    const float shifted = bounded * 0x1.715476p+0f + 0x1.8p23f;  // n, the nearest to x / ln 2, in the lowest bits
    const float n = shifted - 0x1.8p23f;
    const float rest = (bounded - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts, the first of few bits
    float sum = 1.0f / 5040;
    sum = sum * rest + 1.0f / 720;
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    const float value = sum * from_bits((to_bits(shifted) << 23) + to_bits(1.0f));
    return from_bits(to_bits(value) & (x < -87.0f ? 0u : ~0u));
}

// The same of a vector, with products and sums rounded once.
template <class Lanes>
typename Lanes::Floats exp_of_negative(typename Lanes::Floats x) {
    using Floats = typename Lanes::Floats;
    const Floats least = Lanes::fill(-87.0f), shift = Lanes::fill(0x1.8p23f), bounded = Lanes::max(least, x);
    const Floats shifted = Lanes::fma(bounded, Lanes::fill(0x1.715476p+0f), shift), n = Lanes::sub(shifted, shift);
    const Floats near = Lanes::fma(n, Lanes::fill(-0x1.62e400p-1f), bounded);
    const Floats rest = Lanes::fma(n, Lanes::fill(-0x1.7f7d1cp-20f), near);
    Floats sum = Lanes::fill(1.0f / 5040);
    for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = Lanes::fma(sum, rest, Lanes::fill(factor));
    return Lanes::from(least, x, Lanes::scaled(sum, shifted));
}

// tanh, to 3e-7 of its value: a series where 1 - exp(-2x) would cancel. Without a branch, too.
inline float tanh_of(float x) {
    const float square = x * x;
    float series = -929569.0f / 638512875;
    series = series * square + 21844.0f / 6081075;
    series = series * square - 1382.0f / 155925;
    series = series * square + 62.0f / 2835;
    series = series * square - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    const float magnitude = from_bits(to_bits(x) & 0x7fffffffu), less = exp_of_negative(-2 * magnitude);
    const float far = (1 - less) / (1 + less);
    return magnitude < 0.5f ? x + x * square * series : from_bits(to_bits(far) | (to_bits(x) & 0x80000000u));
}

}  // namespace
