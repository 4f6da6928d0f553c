// The loops of attention over a tile of keys.
#pragma once

#include <cmath>
#include <limits>

#include "lanes.hpp"

namespace {

using kvine::kTileKeys;

// Numbers that loops without a data dependence take side by side; a divisor of kTileKeys.
constexpr int kSideBySide = 16;

template <class Lanes, class Format, int Rows>
void score_rows(const float* x, std::int64_t width, const std::byte* const* rows, int count, float* scores) {
    int key = 0;
    for (; key + kTileOutputs <= count; key += kTileOutputs) {
        float dots[kTileOutputs][Rows];
        dot_tile<Lanes, Format>(rows + key, x, width, dots);
        for (int r = 0; r < Rows; ++r)
            for (int o = 0; o < kTileOutputs; ++o) scores[r * kTileKeys + key + o] = dots[o][r];
    }
    for (; key < count; ++key) {
        float dots[1][Rows];
        dot_tile<Lanes, Format>(rows + key, x, width, dots);
        for (int r = 0; r < Rows; ++r) scores[r * kTileKeys + key] = dots[0][r];
    }
}

template <class Lanes, class Format>
void score(const float* x, std::int64_t group, std::int64_t width, const std::byte* const* rows, int count,
           float* scores) {
    const std::int64_t stride = padded<Lanes>(width);
    std::int64_t head = 0;
    for (; head + kTileRows <= group; head += kTileRows)
        score_rows<Lanes, Format, kTileRows>(x + head * stride, width, rows, count, scores + head * kTileKeys);
    static_assert(kTileRows == 3, "the two cases below are the heads that are left");
    if (group - head == 2) score_rows<Lanes, Format, 2>(x + head * stride, width, rows, count, scores + head * kTileKeys);
    if (group - head == 1) score_rows<Lanes, Format, 1>(x + head * stride, width, rows, count, scores + head * kTileKeys);
}

template <class Lanes, class Format, int Rows>
void add_rows(const float* weights, std::int64_t width, const std::byte* const* rows, int count, float* sums) {
    const std::int64_t stride = padded<Lanes>(width);
    for (std::int64_t at = 0; at < width; at += kStep<Lanes>) {
        typename Lanes::Floats first[Rows], second[Rows];
        for (int r = 0; r < Rows; ++r) {
            first[r] = Lanes::load(sums + r * stride + at);
            second[r] = Lanes::load(sums + r * stride + at + Lanes::width);
        }
        const bool whole = at + kStep<Lanes> <= width;
        for (int key = 0; key < count; ++key) {
            const std::byte* stored = rows[key] + at * Format::size;
            const Pair<Lanes> pair =
                whole ? Lanes::template widen<Format>(stored) : widen_rest<Lanes, Format>(stored, width - at);
            for (int r = 0; r < Rows; ++r) {
                const typename Lanes::Floats weight = Lanes::fill(weights[r * kTileKeys + key]);
                first[r] = Lanes::fma(weight, pair.first, first[r]);
                second[r] = Lanes::fma(weight, pair.second, second[r]);
            }
        }
        for (int r = 0; r < Rows; ++r) {
            Lanes::store(sums + r * stride + at, first[r]);
            Lanes::store(sums + r * stride + at + Lanes::width, second[r]);
        }
    }
}

template <class Lanes, class Format>
void add(const float* weights, std::int64_t group, std::int64_t width, const std::byte* const* rows, int count,
         float* sums) {
    const std::int64_t stride = padded<Lanes>(width);
    std::int64_t head = 0;
    for (; head + kTileRows <= group; head += kTileRows)
        add_rows<Lanes, Format, kTileRows>(weights + head * kTileKeys, width, rows, count, sums + head * stride);
    static_assert(kTileRows == 3, "the two cases below are the heads that are left");
    if (group - head == 2) add_rows<Lanes, Format, 2>(weights + head * kTileKeys, width, rows, count, sums + head * stride);
    if (group - head == 1) add_rows<Lanes, Format, 1>(weights + head * kTileKeys, width, rows, count, sums + head * stride);
}

inline float weigh(float* scores, int count, float scale, float softcap, float& greatest, float& sum) {
    const float infinity = std::numeric_limits<float>::infinity(), before = greatest;
    const int padded_count = (count + kSideBySide - 1) / kSideBySide * kSideBySide;
    for (int i = 0; i < count; ++i) scores[i] *= scale;
    if (softcap > 0)
        for (int i = 0; i < count; ++i) scores[i] = softcap * std::tanh(scores[i] / softcap);
    for (int i = count; i < padded_count; ++i) scores[i] = -infinity;

    float most[kSideBySide];
    for (float& value : most) value = before;
    for (int at = 0; at < padded_count; at += kSideBySide)
        for (int i = 0; i < kSideBySide; ++i) most[i] = scores[at + i] > most[i] ? scores[at + i] : most[i];
    float after = before;
    for (const float value : most) after = value > after ? value : after;
    const float base = after == -infinity ? 0.0f : after;  // nothing is known of a greatest yet, and -inf weighs 0

    float sums[kSideBySide] = {};
    for (int at = 0; at < padded_count; at += kSideBySide)
        for (int i = 0; i < kSideBySide; ++i) {
            const float weight = exp_of_negative(scores[at + i] - base);
            scores[at + i] = weight;
            sums[i] += weight;
        }
    float added = 0;
    for (const float value : sums) added += value;
    const float shrunk = before == after ? 1.0f : exp_of_negative(before - base);
    greatest = after;
    sum = sum * shrunk + added;
    return shrunk;
}

}  // namespace
