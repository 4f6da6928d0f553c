// The loops of what is computed row by row. What is not summed is written as plain loops over arrays in fp32, which
// compilers turn into vectors.
#pragma once

#include <algorithm>
#include <cmath>

#include "lanes.hpp"

namespace {

using kvine::Gated;
using kvine::Norm;
using kvine::Rotation;

template <class Lanes, class Format>
float sum_of_squares(const std::byte* x, std::int64_t width) {
    const std::int64_t whole = width - width % kStep<Lanes>;
    typename Lanes::Floats first = Lanes::zero(), second = Lanes::zero();
    const auto add = [&](const Pair<Lanes>& pair) {
        first = Lanes::fma(pair.first, pair.first, first);
        second = Lanes::fma(pair.second, pair.second, second);
    };
    for (std::int64_t at = 0; at < whole; at += kStep<Lanes>)
        add(Lanes::template widen<Format>(x + at * Format::size));
    if (whole < width) add(widen_rest<Lanes, Format>(x + whole * Format::size, width - whole));
    return Lanes::sum(first) + Lanes::sum(second);
}

template <class Lanes, class Format>
void normalize(const Norm& norm, std::int64_t begin, std::int64_t end) {
    const std::int64_t width = norm.width;
    const float* __restrict weight = norm.weight;
    for (std::int64_t row = begin; row < end; ++row) {
        const std::byte* __restrict x = norm.x + row * width * Format::size;
        std::byte* __restrict y = norm.y + row * width * Format::size;
        const float mean = sum_of_squares<Lanes, Format>(x, width) / static_cast<float>(width);
        const float scale = 1.0f / std::sqrt(mean + norm.eps);
        for (std::int64_t at = 0; at < width; ++at)
            store_scalar<Format>(y + at * Format::size,
                                 load_scalar<Format>(x + at * Format::size) * scale * weight[at]);
    }
}

// One half of a head: y = x * cos + partner * sin.
template <class Format>
void rotate_half(const std::byte* __restrict x, const std::byte* __restrict partner, const float* __restrict cos,
                 const float* __restrict sin, std::byte* __restrict y, std::int64_t count) {
    for (std::int64_t at = 0; at < count; ++at)
        store_scalar<Format>(y + at * Format::size, load_scalar<Format>(x + at * Format::size) * cos[at] +
                                                        load_scalar<Format>(partner + at * Format::size) * sin[at]);
}

template <class Lanes, class Format>
void rotate(const Rotation& rotation, std::int64_t begin, std::int64_t end) {
    const std::int64_t half = rotation.rotary / 2, size = rotation.width * Format::size;
    for (std::int64_t row = begin; row < end; ++row) {
        const float* cos = rotation.cos + row * rotation.rotary;
        const float* sin = rotation.sin + row * rotation.rotary;
        for (std::int64_t head = row * rotation.heads; head < (row + 1) * rotation.heads; ++head) {
            const std::byte* x = rotation.x + head * size;
            std::byte* y = rotation.y + head * size;
            const std::int64_t second = half * Format::size, rest = 2 * second;
            rotate_half<Format>(x, x + second, cos, sin, y, half);
            rotate_half<Format>(x + second, x, cos + half, sin + half, y + second, half);
            if (rest < size) std::memcpy(y + rest, x + rest, size - rest);
        }
    }
}

// x times the logistic function of x, or of what makes it GELU by tanh.
template <Gated::Activation activation>
float activate(float x) {
    float z = x;
    if constexpr (activation == Gated::kGeluTanh) z = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    const float less = exp_of_negative(from_bits(to_bits(z) | 0x80000000u));
    return x * ((z < 0 ? less : 1.0f) / (1.0f + less));
}

template <class Format, Gated::Activation activation>
void gate_with(const Gated& task, std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kAtATime = 64;  // through arrays of their own: y may be gate
    float f[kAtATime], up[kAtATime];
    for (std::int64_t first = begin; first < end; first += kAtATime) {
        const std::int64_t count = std::min(kAtATime, end - first), offset = first * Format::size;
        const std::byte *from_gate = task.gate + offset, *from_up = task.up + offset;
        std::byte* y = task.y + offset;
        for (std::int64_t i = 0; i < count; ++i) f[i] = load_scalar<Format>(from_gate + i * Format::size);
        for (std::int64_t i = 0; i < count; ++i) up[i] = load_scalar<Format>(from_up + i * Format::size);
        for (std::int64_t i = 0; i < count; ++i) f[i] = Format::widen(Format::round(activate<activation>(f[i])));
        for (std::int64_t i = 0; i < count; ++i) store_scalar<Format>(y + i * Format::size, f[i] * up[i]);
    }
}

template <class Format>
void gate(const Gated& task, std::int64_t begin, std::int64_t end) {
    if (task.activation == Gated::kSilu) return gate_with<Format, Gated::kSilu>(task, begin, end);
    gate_with<Format, Gated::kGeluTanh>(task, begin, end);
}

template <class Format>
void add_to(const kvine::Sum& sum, std::int64_t begin, std::int64_t end) {
    std::byte* __restrict x = sum.x;
    const std::byte* __restrict y = sum.y;
    for (std::int64_t at = begin * Format::size; at < end * Format::size; at += Format::size)
        store_scalar<Format>(x + at, load_scalar<Format>(x + at) + load_scalar<Format>(y + at));
}

template <class Format>
void multiply_by(std::byte* x, float factor, std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin * Format::size; at < end * Format::size; at += Format::size)
        store_scalar<Format>(x + at, load_scalar<Format>(x + at) * factor);
}

template <class Format>
void to_floats(const std::byte* __restrict x, float* __restrict y, std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; ++at) y[at] = load_scalar<Format>(x + at * Format::size);
}

}  // namespace
