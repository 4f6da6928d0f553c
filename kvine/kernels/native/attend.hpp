// The loops of attention over a tile of keys. One query and many are computed by the same ones, so that each sum has
// one order: a score's that of the dimensions, a value's that of the keys.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "lanes.hpp"

namespace {

using kvine::Ahead;
using kvine::kBlockRows;
using kvine::kTileKeys;

// Numbers that loops without a data dependence take side by side; a divisor of kTileKeys.
constexpr int kSideBySide = 16;

constexpr int side_before(int place) { return place / kSideBySide * kSideBySide; }
constexpr int side_after(int place) { return side_before(place + kSideBySide - 1); }

// Calls f with `rows`, which is 1 to Most, as a constant.
template <int Most = kBlockRows, class F>
void with_rows(std::int64_t rows, const F& f) {
    if constexpr (Most > 1)
        if (rows < Most) return with_rows<Most - 1>(rows, f);
    f(std::integral_constant<int, Most>{});
}

// Keys that lie side by side: few enough that a panel of wide heads stays in the nearest cache.
template <class Lanes>
constexpr int kPanel = 4 * Lanes::width;

template <class Lanes, class Float>
Float* at_place(Float* keys, std::int64_t width, int place) {
    return keys + place / kPanel<Lanes> * padded<Lanes>(width) * kPanel<Lanes> + place % kPanel<Lanes>;
}

// See Path::turn.
template <class Lanes, class Format>
void turn(const std::byte* const* rows, int begin, int end, std::int64_t width, float* keys, const Ahead& ahead) {
    const std::int64_t whole = width - width % kTurnedDims;
    for (int first = side_before(begin); first < side_after(end); first += kTurnedKeys) {
        for (int i = 0; ahead.rows && i < kTurnedKeys; ++i) ahead.fetch(first + i);
        float* to = at_place<Lanes>(keys, width, first);
        const std::byte* of[kTurnedKeys];
        for (int i = 0; i < kTurnedKeys; ++i) of[i] = rows[std::clamp(first + i, begin, end - 1)];
        for (std::int64_t at = 0; at < whole; at += kTurnedDims)
            Lanes::template turn<Format>(of, at * Format::size, to + at * kPanel<Lanes>);
        if (whole == width) continue;
        std::byte rest[kTurnedKeys][kTurnedDims * Format::size] = {};
        for (int i = 0; i < kTurnedKeys; ++i) {
            std::memcpy(rest[i], of[i] + whole * Format::size, (width - whole) * Format::size);
            of[i] = rest[i];
        }
        Lanes::template turn<Format>(of, 0, to + whole * kPanel<Lanes>);
    }
}

template <class Lanes, int Rows, int Vectors>
void score_block(const float* x, std::int64_t width, const float* keys, float* scores) {
    const std::int64_t stride = padded<Lanes>(width);
    typename Lanes::Floats sums[Rows][Vectors];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = Lanes::zero();
    for (std::int64_t d = 0; d < width; ++d) {
        typename Lanes::Floats key[Vectors];
        for (int v = 0; v < Vectors; ++v) key[v] = Lanes::load(keys + d * kPanel<Lanes> + v * Lanes::width);
        for (int r = 0; r < Rows; ++r) {
            const typename Lanes::Floats factor = Lanes::fill(x[r * stride + d]);
            for (int v = 0; v < Vectors; ++v) sums[r][v] = Lanes::fma(factor, key[v], sums[r][v]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v) Lanes::store(scores + r * kTileKeys + v * Lanes::width, sums[r][v]);
}

// See Path::score. Fewer rows take more keys at once, so that enough sums are independent.
template <class Lanes>
void score(const float* x, std::int64_t rows, std::int64_t width, const float* keys, int begin, int end,
           float* scores) {
    for (std::int64_t row = 0; row < rows; row += kBlockRows)
        with_rows(std::min<std::int64_t>(rows - row, kBlockRows), [&](auto count) {
            constexpr int kRows = decltype(count)::value, kLeast = kSideBySide / Lanes::width;
            constexpr int kMost = kRows <= 3 ? 4 : 2;
            const float* from = x + row * padded<Lanes>(width);
            float* to = scores + row * kTileKeys;
            int place = side_before(begin);
            while (place < end) {
                const float* panel = at_place<Lanes>(keys, width, place);
                const bool most = place % (kMost * Lanes::width) == 0 && place + kMost * Lanes::width <= side_after(end);
                if (most) {
                    score_block<Lanes, kRows, kMost>(from, width, panel, to + place);
                } else {
                    score_block<Lanes, kRows, kLeast>(from, width, panel, to + place);
                }
                place += most ? kMost * Lanes::width : kSideBySide;
            }
        });
}

// See Path::widen.
template <class Lanes, class Format>
void widen_rows(const std::byte* const* rows, int begin, int end, std::int64_t width, float* values) {
    const std::int64_t stride = padded<Lanes>(width);
    for (int place = begin; place < end; ++place)
        for (std::int64_t at = 0; at < width; at += kStep<Lanes>) {
            const std::byte* stored = rows[place] + at * Format::size;
            const Pair<Lanes> pair = at + kStep<Lanes> <= width ? Lanes::template widen<Format>(stored)
                                                                : widen_rest<Lanes, Format>(stored, width - at);
            Lanes::store(values + place * stride + at, pair.first);
            Lanes::store(values + place * stride + at + Lanes::width, pair.second);
        }
}

// Adds `Steps` steps of values from number `at` on, or what is left there if they are not whole.
template <class Lanes, class Format, int Rows, int Steps, bool Whole>
void add_block(const float* weights, std::int64_t at, std::int64_t width, const std::byte* const* rows, int begin,
               int end, float* sums, const Ahead& ahead) {
    const std::int64_t stride = padded<Lanes>(width);
    typename Lanes::Floats first[Rows][Steps], second[Rows][Steps];
    for (int r = 0; r < Rows; ++r)
        for (int s = 0; s < Steps; ++s) {
            const float* from = sums + r * stride + at + s * kStep<Lanes>;
            first[r][s] = Lanes::load(from), second[r][s] = Lanes::load(from + Lanes::width);
        }
    for (int place = begin; place < end; ++place) {
        if (ahead.rows) ahead.fetch(place);
        const std::byte* stored = rows[place] + at * Format::size;
        for (int s = 0; s < Steps; ++s, stored += kStep<Lanes> * Format::size) {
            Pair<Lanes> pair;
            if constexpr (Whole) {
                pair = Lanes::template widen<Format>(stored);
            } else {
                pair = widen_rest<Lanes, Format>(stored, width - at);
            }
            for (int r = 0; r < Rows; ++r) {
                const typename Lanes::Floats weight = Lanes::fill(weights[r * kTileKeys + place]);
                first[r][s] = Lanes::fma(weight, pair.first, first[r][s]);
                second[r][s] = Lanes::fma(weight, pair.second, second[r][s]);
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int s = 0; s < Steps; ++s) {
            float* to = sums + r * stride + at + s * kStep<Lanes>;
            Lanes::store(to, first[r][s]), Lanes::store(to + Lanes::width, second[r][s]);
        }
}

// See Path::add. Fewer rows take more of a row at once, for the same reason.
template <class Lanes, class Format>
void add(const float* weights, std::int64_t count, std::int64_t width, const std::byte* const* rows, int begin, int end,
         float* sums, const Ahead& ahead) {
    constexpr Ahead kNone{nullptr, 0};
    for (std::int64_t row = 0; row < count; row += kBlockRows)
        with_rows(std::min<std::int64_t>(count - row, kBlockRows), [&](auto block) {
            constexpr int kRows = decltype(block)::value, kSteps = kRows == 1 ? 4 : kRows == 2 ? 2 : 1;
            const float* from = weights + row * kTileKeys;
            float* to = sums + row * padded<Lanes>(width);
            std::int64_t at = 0;
            for (; at + kSteps * kStep<Lanes> <= width; at += kSteps * kStep<Lanes>)
                add_block<Lanes, Format, kRows, kSteps, true>(from, at, width, rows, begin, end, to,
                                                              row == 0 && at == 0 ? ahead : kNone);
            for (; at + kStep<Lanes> <= width; at += kStep<Lanes>)
                add_block<Lanes, Format, kRows, 1, true>(from, at, width, rows, begin, end, to,
                                                         row == 0 && at == 0 ? ahead : kNone);
            if (at < width)
                add_block<Lanes, Format, kRows, 1, false>(from, at, width, rows, begin, end, to,
                                                          row == 0 && at == 0 ? ahead : kNone);
        });
}

// See Path::weigh. A place's number says which of the sums its weight is added to, wherever the tile begins.
template <class Lanes>
float weigh(float* scores, int begin, int end, float softcap, float& greatest, float& sum) {
    using Floats = typename Lanes::Floats;
    constexpr int kVectors = kSideBySide / Lanes::width;
    const float infinity = std::numeric_limits<float>::infinity(), before = greatest;
    const int first = side_before(begin), last = side_after(end);
    if (softcap > 0)
        for (int at = first; at < last; at += kSideBySide)
            for (int i = 0; i < kSideBySide; ++i) scores[at + i] = softcap * tanh_of(scores[at + i] / softcap);
    for (int i = first; i < begin; ++i) scores[i] = -infinity;
    for (int i = end; i < last; ++i) scores[i] = -infinity;

    Floats most[kVectors], sums[kVectors];
    for (int v = 0; v < kVectors; ++v) most[v] = Lanes::fill(before), sums[v] = Lanes::zero();
    for (int at = first; at < last; at += kSideBySide)
        for (int v = 0; v < kVectors; ++v) most[v] = Lanes::max(Lanes::load(scores + at + v * Lanes::width), most[v]);
    for (int v = 1; v < kVectors; ++v) most[0] = Lanes::max(most[v], most[0]);
    const float after = Lanes::greatest(most[0]);
    const float base = after == -infinity ? 0.0f : after;  // nothing is known of a greatest yet, and -inf weighs 0

    for (int at = first; at < last; at += kSideBySide)
        for (int v = 0; v < kVectors; ++v) {
            float* place = scores + at + v * Lanes::width;
            const Floats weights = exp_of_negative<Lanes>(Lanes::sub(Lanes::load(place), Lanes::fill(base)));
            Lanes::store(place, weights);
            sums[v] = Lanes::add(sums[v], weights);
        }
    for (int v = 1; v < kVectors; ++v) sums[0] = Lanes::add(sums[0], sums[v]);
    const float shrunk = before == after ? 1.0f : exp_of_negative(before - base);
    greatest = after;
    sum = sum * shrunk + Lanes::sum(sums[0]);
    return shrunk;
}

}  // namespace
