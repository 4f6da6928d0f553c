// What attention over blocks is made of beside its loops: where rows lie, and how the parts of a context become one. All
// of it has internal linkage, as in formats.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

using kvine::Decode;
using kvine::DType;
using kvine::kTileKeys;
using kvine::Path;

// A context is summed in stretches, which lie at multiples of their length and are put together in their order. How long
// they are depends on the context's length alone, and so does the result.
constexpr std::int64_t kLeastStretch = 256, kMostStretches = 64;

inline std::int64_t stretch_of(std::int64_t length) {
    std::int64_t stretch = kLeastStretch;
    while (length > kMostStretches * stretch) stretch *= 2;
    return stretch;
}

inline std::int64_t stride_of(const Path& path, std::int64_t width) {
    return (width + path.step - 1) / path.step * path.step;
}

// Memory that is kept from call to call. Its parts begin at lines of the cache.
class Scratch {
  public:
    explicit Scratch(std::vector<float>& kept) : kept_(kept) {}

    static std::int64_t rounded(std::int64_t count) { return (count + kLine - 1) / kLine * kLine; }

    void reserve(std::int64_t count) {
        if (kept_.size() < static_cast<std::size_t>(count + kLine)) kept_.resize(count + kLine);
        const auto address = reinterpret_cast<std::uintptr_t>(kept_.data()) / sizeof(float);
        next_ = kept_.data() + (kLine - address % kLine) % kLine;
    }

    float* take(std::int64_t count) {
        float* taken = next_;
        next_ += rounded(count);
        return taken;
    }

  private:
    static constexpr std::int64_t kLine = 16;
    std::vector<float>& kept_;
    float* next_ = nullptr;
};

// What is known of a part of a context: for each row of queries the greatest score, the sum of weights, and the weighted
// values, `stride` apart.
struct Sums {
    std::int64_t rows, stride;
    float *greatest, *sum, *values;

    static std::int64_t size(std::int64_t rows, std::int64_t stride) {
        return Scratch::rounded(2 * rows) + Scratch::rounded(rows * stride);
    }

    Sums(std::int64_t rows, std::int64_t stride, float* floats)
        : rows(rows), stride(stride), greatest(floats), sum(floats + rows),
          values(floats + Scratch::rounded(2 * rows)) {}

    void clear() const {
        std::fill_n(greatest, rows, -std::numeric_limits<float>::infinity());
        std::fill_n(sum, rows, 0.0f);
        std::fill_n(values, rows * stride, 0.0f);
    }

    // Adds the part of the context that comes next. A part that was empty, or in which nothing has weight, changes nothing.
    void merge(const Sums& next) const {
        for (std::int64_t r = 0; r < rows; ++r) {
            if (next.nothing(r)) continue;
            float* to = values + r * stride;
            const float* from = next.values + r * stride;
            if (nothing(r)) {
                greatest[r] = next.greatest[r], sum[r] = next.sum[r];
                std::copy_n(from, stride, to);
                continue;
            }
            const float after = std::max(greatest[r], next.greatest[r]);
            const float factor = std::exp(greatest[r] - after), next_factor = std::exp(next.greatest[r] - after);
            greatest[r] = after;
            sum[r] = sum[r] * factor + next.sum[r] * next_factor;
            for (std::int64_t i = 0; i < stride; ++i) to[i] = to[i] * factor + from[i] * next_factor;
        }
    }

  private:
    bool nothing(std::int64_t r) const { return sum[r] == 0; }
};

// Calls f(whether these are sinks, begin, end) for each run of keys that a request's query sees, one after another; a run
// may be empty.
template <class F>
void for_runs(const Decode& task, const Decode::Request& request, const F& f) {
    const std::int64_t sinks = std::min(request.sinks, request.length);
    f(true, 0, sinks);
    for (std::int64_t i = 0; i < request.num_kept; ++i) {
        const kvine::Run run = task.kept(request)[i];
        f(false, std::max(run.begin, sinks), std::min(run.end, request.start));
    }
    f(false, std::max(sinks, request.start), request.length);
}

// Where in q and y the query heads of a KV head lie in a row.
inline std::int64_t place_of(const Decode& task, std::int64_t row, std::int64_t kv_head) {
    return (row * task.kv_heads + kv_head) * task.group * task.width;
}

template <class Format>
void load(const std::byte* from, std::int64_t count, float factor, float* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = load_scalar<Format>(from + i * Format::size) * factor;
}

template <class Format>
void store(const float* from, std::int64_t count, std::byte* to) {
    for (std::int64_t i = 0; i < count; ++i) store_scalar<Format>(to + i * Format::size, from[i]);
}

// Rows of queries in fp32, `stride` apart and times the scale: the heads of one query after another.
inline void load_queries(const Decode& task, const std::byte* q, std::int64_t row, std::int64_t kv_head,
                         std::int64_t count, std::int64_t stride, float* x) {
    const auto load_all = [&](auto format) {
        using Format = decltype(format);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::byte* from = q + place_of(task, row + i, kv_head) * Format::size;
            for (std::int64_t head = 0; head < task.group; ++head)
                load<Format>(from + head * task.width * Format::size, task.width, task.scale,
                             x + (i * task.group + head) * stride);
        }
    };
    if (task.dtype == kvine::kBf16) return load_all(Bf16{});
    if (task.dtype == kvine::kFp16) return load_all(Fp16{});
    load_all(Fp32{});
}

// Writes what all of the context has given, which came in the order that values are widened in.
inline void write(const Path& path, const Decode& task, const Sums& all, std::int64_t row, std::int64_t kv_head) {
    thread_local std::vector<float> result;
    result.resize(all.stride);
    const int* order = path.order[task.packed ? kvine::kFp32 : task.v_dtype];  // packed values are not widened from theirs
    for (std::int64_t r = 0; r < all.rows; ++r) {
        for (std::int64_t step = 0; step < all.stride; step += path.step)
            for (std::int64_t i = 0; i < path.step; ++i)
                result[step + order[i]] = all.values[r * all.stride + step + i] / all.sum[r];
        const std::int64_t to = place_of(task, row + r / task.group, kv_head) + r % task.group * task.width;
        if (task.dtype == kvine::kBf16) {
            store<Bf16>(result.data(), task.width, task.y + to * Bf16::size);
        } else if (task.dtype == kvine::kFp16) {
            store<Fp16>(result.data(), task.width, task.y + to * Fp16::size);
        } else {
            store<Fp32>(result.data(), task.width, task.y + to * Fp32::size);
        }
    }
}

// Where the rows of K and V at places begin to end of a tile lie.
inline void locate(const Decode& task, const std::int64_t* table, std::int64_t kv_head, std::int64_t tile, int begin,
                   int end, const std::byte** keys, const std::byte** values) {
    const std::int64_t k_size = task.width * size_of(task.k_dtype), v_size = task.width * size_of(task.v_dtype);
    std::int64_t block = (tile + begin) / task.block_size, offset = (tile + begin) % task.block_size;
    for (int place = begin; place < end; ++block, offset = 0) {
        std::int64_t row = (table[block] * task.kv_heads + kv_head) * task.block_size + offset;
        for (; place < end && offset < task.block_size; ++place, ++offset, ++row) {
            keys[place] = task.k + row * k_size;
            values[place] = task.v + row * v_size;
        }
    }
}

}  // namespace
