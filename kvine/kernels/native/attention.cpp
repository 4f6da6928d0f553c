// Attention of single queries, shared out among threads by request, KV head and stretch of the context.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "formats.hpp"
#include "kernels.hpp"
#include "team.hpp"

namespace kvine {
namespace {

// Keys that one thread takes at a time: a stretch. Stretches lie at multiples of it whoever computes them, and are put
// together in their order; how long they are depends on the context's length alone, and so does the result.
constexpr std::int64_t kLeastStretch = 256, kMostStretches = 64;

std::int64_t stretch_of(std::int64_t length) {
    std::int64_t stretch = kLeastStretch;
    while (length > kMostStretches * stretch) stretch *= 2;
    return stretch;
}

std::int64_t stretches_of(std::int64_t length) { return (length + stretch_of(length) - 1) / stretch_of(length); }

float load(DType dtype, const std::byte* from, std::int64_t at) {
    switch (dtype) {
        case kBf16: return load_scalar<Bf16>(from + at * Bf16::size);
        case kFp16: return load_scalar<Fp16>(from + at * Fp16::size);
        default: return load_scalar<Fp32>(from + at * Fp32::size);
    }
}

void store(DType dtype, std::byte* to, std::int64_t at, float value) {
    switch (dtype) {
        case kBf16: return store_scalar<Bf16>(to + at * Bf16::size, value);
        case kFp16: return store_scalar<Fp16>(to + at * Fp16::size, value);
        default: return store_scalar<Fp32>(to + at * Fp32::size, value);
    }
}

// What is known of a stretch: for each head of a group the greatest score, the sum of weights, and the weighted values.
class Partials {
  public:
    Partials(float* floats, std::int64_t group, std::int64_t stride)
        : group_(group), size_(size_of_one(group, stride)), stride_(stride), floats_(floats) {}

    static std::int64_t size_of_one(std::int64_t group, std::int64_t stride) { return group * (2 + stride); }

    float* greatest(std::int64_t i) const { return floats_ + i * size_; }
    float* sum(std::int64_t i) const { return greatest(i) + group_; }
    float* values(std::int64_t i) const { return sum(i) + group_; }

    void clear(std::int64_t i) const {
        std::fill_n(greatest(i), group_, -std::numeric_limits<float>::infinity());
        std::fill_n(sum(i), group_ * (1 + stride_), 0.0f);
    }

  private:
    std::int64_t group_, size_, stride_;
    float* floats_;
};

// One stretch of one request's context, for the query heads of one KV head.
class Stretch {
  public:
    Stretch(const Path& path, const Decode& task, const Decode::Request& request, std::int64_t kv_head)
        : path_(path), task_(task), request_(request), kv_head_(kv_head),
          stride_((task.width + path.step - 1) / path.step * path.step) {
        thread_local std::vector<float> kept;
        const auto needed = static_cast<std::size_t>(task.group * (stride_ + kTileKeys));
        if (kept.size() < needed) kept.resize(needed);
        scores_ = kept.data();
        x_ = scores_ + task.group * kTileKeys;
    }

    void attend(std::int64_t begin, std::int64_t end, float* greatest, float* sum, float* values) {
        const std::int64_t sinks = std::min(task_.sinks, request_.length);
        read(task_.q_sink ? task_.q_sink : task_.q, begin, std::min(end, sinks), greatest, sum, values);
        read(task_.q, std::max({begin, sinks, request_.start}), std::min(end, request_.length), greatest, sum, values);
    }

  private:
    void read(const std::byte* q, std::int64_t begin, std::int64_t end, float* greatest, float* sum, float* values) {
        if (begin >= end) return;
        arrange(q);
        for (std::int64_t at = begin; at < end;) {
            const int count = static_cast<int>(std::min(end - at, kTileKeys - at % kTileKeys));
            const std::byte *keys[kTileKeys], *rows[kTileKeys];
            locate(at, count, keys, rows);
            path_.score[task_.k_dtype](x_, task_.group, task_.width, keys, count, scores_);
            for (std::int64_t head = 0; head < task_.group; ++head) {
                const float shrunk = path_.weigh(scores_ + head * kTileKeys, count, task_.scale, task_.softcap,
                                                 greatest[head], sum[head]);
                if (shrunk != 1.0f)
                    for (std::int64_t i = 0; i < stride_; ++i) values[head * stride_ + i] *= shrunk;
            }
            path_.add[task_.v_dtype](scores_, task_.group, task_.width, rows, count, values);
            at += count;
        }
    }

    // The queries in fp32, in the order in which the keys are widened.
    void arrange(const std::byte* q) {
        const int* order = path_.order[task_.k_dtype];
        const std::int64_t first = (request_.row * task_.kv_heads + kv_head_) * task_.group * task_.width;
        for (std::int64_t head = 0; head < task_.group; ++head)
            for (std::int64_t step = 0; step < stride_; step += path_.step)
                for (std::int64_t i = 0; i < path_.step; ++i) {
                    const std::int64_t from = step + order[i];
                    x_[head * stride_ + step + i] =
                        from < task_.width ? load(task_.dtype, q, first + head * task_.width + from) : 0.0f;
                }
    }

    void locate(std::int64_t begin, int count, const std::byte** keys, const std::byte** rows) const {
        const std::int64_t k_size = task_.width * size_of(task_.k_dtype), v_size = task_.width * size_of(task_.v_dtype);
        const std::int64_t* table = task_.tables + request_.table;
        std::int64_t block = begin / task_.block_size, offset = begin % task_.block_size;
        for (int i = 0; i < count; ++block, offset = 0) {
            std::int64_t row = (table[block] * task_.kv_heads + kv_head_) * task_.block_size + offset;
            for (; i < count && offset < task_.block_size; ++i, ++offset, ++row) {
                keys[i] = task_.k + row * k_size;
                rows[i] = task_.v + row * v_size;
            }
        }
    }

    const Path& path_;
    const Decode& task_;
    const Decode::Request& request_;
    std::int64_t kv_head_, stride_;
    float *x_, *scores_;
};

// Puts the stretches of one request and KV head together and writes its part of y. The greatest scores become factors.
void finish(const Path& path, const Decode& task, const Partials& partials, std::int64_t first, std::int64_t count,
            std::int64_t row, std::int64_t kv_head) {
    const std::int64_t stride = (task.width + path.step - 1) / path.step * path.step;
    const int* order = path.order[task.v_dtype];
    for (std::int64_t head = 0; head < task.group; ++head) {
        float greatest = -std::numeric_limits<float>::infinity(), sum = 0;
        for (std::int64_t n = first; n < first + count; ++n) greatest = std::max(greatest, partials.greatest(n)[head]);
        for (std::int64_t n = first; n < first + count; ++n) {
            float& factor = partials.greatest(n)[head];
            factor = std::exp(factor - greatest);
            sum += factor * partials.sum(n)[head];
        }
        const std::int64_t to = ((row * task.kv_heads + kv_head) * task.group + head) * task.width;
        for (std::int64_t step = 0; step < stride; step += path.step)
            for (std::int64_t i = 0; i < path.step; ++i) {
                if (step + order[i] >= task.width) continue;
                float value = 0;
                for (std::int64_t n = first; n < first + count; ++n)
                    value += partials.greatest(n)[head] * partials.values(n)[head * stride + step + i];
                store(task.dtype, task.y, to + step + order[i], value / sum);
            }
    }
}

}  // namespace

std::int64_t context_bytes(const Decode& task) {
    std::int64_t keys = 0;
    for (std::int64_t r = 0; r < task.num_requests; ++r) {
        const Decode::Request& request = task.requests[r];
        keys += request.length - std::max<std::int64_t>(request.start - task.sinks, 0);
    }
    return keys * task.kv_heads * task.width * (size_of(task.k_dtype) + size_of(task.v_dtype));
}

std::int64_t partial_floats(const Path& path, const Decode& task) {
    std::int64_t count = 0;
    for (std::int64_t r = 0; r < task.num_requests; ++r)
        count += stretches_of(task.requests[r].length) * task.kv_heads;
    return count * Partials::size_of_one(task.group, (task.width + path.step - 1) / path.step * path.step);
}

void decode_in_team(const Path& path, const Decode& task, float* floats) {
    thread_local std::vector<std::int64_t> first;  // stretch of each request, for its first KV head
    first.assign(1, 0);
    for (std::int64_t r = 0; r < task.num_requests; ++r)
        first.push_back(first.back() + stretches_of(task.requests[r].length) * task.kv_heads);
    const Partials partials(floats, task.group, (task.width + path.step - 1) / path.step * path.step);
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < first.back(); ++i) {
        const std::int64_t r = std::upper_bound(first.begin(), first.end(), i) - first.begin() - 1;
        const std::int64_t per_head = (first[r + 1] - first[r]) / task.kv_heads, within = i - first[r];
        const std::int64_t stretch = stretch_of(task.requests[r].length), begin = within % per_head * stretch;
        partials.clear(i);
        Stretch(path, task, task.requests[r], within / per_head)
            .attend(begin, begin + stretch, partials.greatest(i), partials.sum(i), partials.values(i));
    }
#pragma omp for
    for (std::int64_t i = 0; i < task.num_requests * task.kv_heads; ++i) {
        const std::int64_t r = i / task.kv_heads, kv_head = i % task.kv_heads;
        const std::int64_t per_head = (first[r + 1] - first[r]) / task.kv_heads;
        finish(path, task, partials, first[r] + kv_head * per_head, per_head, task.requests[r].row, kv_head);
    }
}

void decode(const Path& path, const Decode& task, int num_threads) {
    thread_local std::vector<float> kept;
    const auto needed = static_cast<std::size_t>(partial_floats(path, task));
    if (kept.size() < needed) kept.resize(needed);
    float* floats = kept.data();
    with_team(context_bytes(task) / kLeastBytesOfThread, num_threads, [&] { decode_in_team(path, task, floats); });
}

}  // namespace kvine
