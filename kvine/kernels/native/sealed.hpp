// Numbers of packed blocks of K and V, as kvine/cache/layout.py lays them out, made fp32: a code times its scale, rounded,
// plus its minimum, rounded.
#pragma once

#include <algorithm>

#include "attend.hpp"

namespace {

using kvine::Sealed;

// Widens fp16 numbers; room for whole steps.
template <class Lanes>
void widen_halves(const std::byte* from, std::int64_t count, float* to) {
    for (std::int64_t at = 0; at < count; at += kStep<Lanes>) {
        const Pair<Lanes> pair = at + kStep<Lanes> <= count ? Lanes::template widen<Fp16>(from + 2 * at)
                                                            : widen_rest<Lanes, Fp16>(from + 2 * at, count - at);
        Lanes::store(to + at, pair.first), Lanes::store(to + at + Lanes::width, pair.second);
    }
}

// A head's scales, and then its minima, each filled up to whole steps.
template <class Lanes>
const float* parameters(const Sealed& part, const std::byte* block) {
    const std::int64_t each = part.num_groups(), room = padded<Lanes>(each);
    thread_local std::vector<float> kept;
    if (static_cast<std::int64_t>(kept.size()) < 2 * room) kept.resize(2 * room);
    const std::byte* stored = block + part.code_bytes();
    widen_halves<Lanes>(stored, each, kept.data());
    widen_halves<Lanes>(stored + 2 * each, each, kept.data() + room);
    return kept.data();
}

// `Count` codes that lie side by side, or `count` of them where `Count` is 0; of whole bytes, or of a part of each. Scale
// and least are of each number, or of all.
template <int Count, bool Whole, bool Each>
[[gnu::always_inline]] inline void unpack_run(const std::byte* __restrict codes, int shift, int mask,
                                              const float* __restrict scale, const float* __restrict least, int count,
                                              float* __restrict to) {
    for (int i = 0; i < (Count ? Count : count); ++i) {
        const int code = Whole ? static_cast<int>(codes[i]) : static_cast<int>(codes[i]) >> shift & mask;
        to[i] = static_cast<float>(code) * scale[Each ? i : 0] + least[Each ? i : 0];
    }
}

// Calls f with `count` as a constant where that is a whole number of short vectors, and with 0 otherwise; and with whether
// a number has a byte of its own.
template <class F>
void with_run(int count, int bits, const F& f) {
    if (bits == 8 && count == 32) return f(std::integral_constant<int, 32>{}, std::true_type{});
    if (bits == 8) return f(std::integral_constant<int, 0>{}, std::true_type{});
    if (count == 32) return f(std::integral_constant<int, 32>{}, std::false_type{});
    if (count == 16) return f(std::integral_constant<int, 16>{}, std::false_type{});
    if (count == 8) return f(std::integral_constant<int, 8>{}, std::false_type{});
    f(std::integral_constant<int, 0>{}, std::false_type{});
}

// Keys of `count` tokens from token `first` of a block on, to places from `place` on of a panel of keys.
template <class Lanes>
void unseal_keys(const Sealed& part, const std::byte* block, int first, int count, int place, float* keys,
                 kvine::Stream next) {
    const float *scales = parameters<Lanes>(part, block), *leasts = scales + padded<Lanes>(part.num_groups());
    const int side = static_cast<int>(part.block_size * part.bits / 8), mask = (1 << part.bits) - 1;
    const std::int64_t lines = (next.lines() + part.width - 1) / part.width, width = part.width;
    while (count > 0) {  // tokens whose codes lie in the same bits of bytes side by side
        const int run = std::min(count, side - first % side), shift = first / side * part.bits;
        with_run(run, part.bits, [&](auto constant, auto whole) {
            constexpr int kRun = decltype(constant)::value;
            constexpr bool kWhole = decltype(whole)::value;
            const std::byte* codes = block + first % side;
            float* to = at_place<Lanes>(keys, width, place);
            if (part.by_channel) {
                for (std::int64_t d = 0; d < width; ++d, codes += side, to += kPanel<Lanes>) {
                    next.fetch(lines);
                    unpack_run<kRun, kWhole, false>(codes, shift, mask, scales + d, leasts + d, run, to);
                }
            } else {
                for (std::int64_t d = 0; d < width; ++d, codes += side, to += kPanel<Lanes>) {
                    next.fetch(lines);
                    const std::int64_t at = d / part.group * part.block_size + first;
                    unpack_run<kRun, kWhole, true>(codes, shift, mask, scales + at, leasts + at, run, to);
                }
            }
        });
        first += run, place += run, count -= run;
    }
}

// Values of `count` tokens from token `first` on, as rows `stride` apart.
template <class Lanes>
void unseal_values(const Sealed& part, const std::byte* block, int first, int count, std::int64_t stride, float* values,
                   kvine::Stream next) {
    const float *scales = parameters<Lanes>(part, block), *leasts = scales + padded<Lanes>(part.num_groups());
    const std::int64_t side = part.width * part.bits / 8, groups = part.width / part.group;
    const std::int64_t runs = std::max(part.bits < 8 ? 8 / part.bits : 1, static_cast<int>(groups));
    const std::int64_t lines = (next.lines() + count * runs - 1) / (count * runs);
    const int mask = (1 << part.bits) - 1;
    for (std::int64_t d = 0; d < part.width;) {  // channels with codes side by side and one scale, of all tokens
        const auto run = static_cast<int>(std::min(side - d % side, part.group - d % part.group));
        const int shift = static_cast<int>(d / side) * part.bits;
        with_run(run, part.bits, [&](auto constant, auto whole) {
            constexpr int kRun = decltype(constant)::value;
            constexpr bool kWhole = decltype(whole)::value;
            for (int token = 0; token < count; ++token) {
                next.fetch(lines);
                const std::int64_t at = (first + token) * groups + d / part.group;
                unpack_run<kRun, kWhole, false>(block + (first + token) * side + d % side, shift, mask, scales + at, leasts + at,
                                        run, values + token * stride + d);
            }
        });
        d += run;
    }
}

}  // namespace
