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

// `Count` codes that lie side by side, or `count` of them where `Count` is 0. Scale and least are of each number, or of all.
template <int Count, bool Each>
void unpack_run(const std::byte* codes, int shift, int mask, const float* scale, const float* least, int count, float* to) {
    for (int i = 0; i < (Count ? Count : count); ++i) {
        const int code = static_cast<int>(codes[i]) >> shift & mask;
        to[i] = static_cast<float>(code) * scale[Each ? i : 0] + least[Each ? i : 0];
    }
}

template <bool Each>
void unpack_any(const std::byte* codes, int shift, int mask, const float* scale, const float* least, int count, float* to) {
    if (count == 32) return unpack_run<32, Each>(codes, shift, mask, scale, least, count, to);
    if (count == 16) return unpack_run<16, Each>(codes, shift, mask, scale, least, count, to);
    if (count == 8) return unpack_run<8, Each>(codes, shift, mask, scale, least, count, to);
    unpack_run<0, Each>(codes, shift, mask, scale, least, count, to);
}

// Keys of `count` tokens from token `first` of a block on, to places from `place` on of a panel of keys.
template <class Lanes>
void unseal_keys(const Sealed& part, const std::byte* block, int first, int count, int place, float* keys) {
    const float *scales = parameters<Lanes>(part, block), *leasts = scales + padded<Lanes>(part.num_groups());
    const int side = static_cast<int>(part.block_size * part.bits / 8), mask = (1 << part.bits) - 1;
    while (count > 0) {  // tokens whose codes lie in the same bits of bytes side by side
        const int run = std::min(count, side - first % side), shift = first / side * part.bits;
        const std::byte* codes = block + first % side;
        float* to = at_place<Lanes>(keys, part.width, place);
        for (std::int64_t d = 0; d < part.width; ++d, codes += side, to += kPanel<Lanes>) {
            if (part.by_channel) {
                unpack_any<false>(codes, shift, mask, scales + d, leasts + d, run, to);
            } else {
                const std::int64_t at = d / part.group * part.block_size + first;
                unpack_any<true>(codes, shift, mask, scales + at, leasts + at, run, to);
            }
        }
        first += run, place += run, count -= run;
    }
}

// Values of `count` tokens from token `first` on, as rows `stride` apart.
template <class Lanes>
void unseal_values(const Sealed& part, const std::byte* block, int first, int count, std::int64_t stride, float* values) {
    const float *scales = parameters<Lanes>(part, block), *leasts = scales + padded<Lanes>(part.num_groups());
    const std::int64_t side = part.width * part.bits / 8, groups = part.width / part.group;
    const int mask = (1 << part.bits) - 1;
    for (int token = first; token < first + count; ++token, values += stride) {
        const std::byte* codes = block + token * side;
        for (std::int64_t d = 0; d < part.width;) {
            const auto run = static_cast<int>(std::min(side - d % side, part.group - d % part.group));
            const std::int64_t at = token * groups + d / part.group;
            unpack_any<false>(codes + d % side, static_cast<int>(d / side) * part.bits, mask, scales + at, leasts + at,
                              run, values + d);
            d += run;
        }
    }
}

}  // namespace
