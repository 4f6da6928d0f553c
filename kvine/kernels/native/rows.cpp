// Rows shared out among threads, and rows that are copied.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "formats.hpp"
#include "kernels.hpp"
#include "team.hpp"

namespace kvine {
namespace {

template <class Task>
void share_rows(void (*compute)(const Task&, std::int64_t, std::int64_t), const Task& task, std::int64_t rows,
                std::int64_t numbers_of_row, int num_threads) {
    share(rows, rows * numbers_of_row / kLeastNumbersOfThread, num_threads,
          [&](std::int64_t begin, std::int64_t end) { compute(task, begin, end); });
}

template <class From, class To>
void convert(const std::byte* from, std::byte* to, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        float value = load_scalar<From>(from + i * From::size);
        if (std::is_same_v<To, Fp16>) value = value > Fp16::max ? Fp16::max : value < -Fp16::max ? -Fp16::max : value;
        store_scalar<To>(to + i * To::size, value);
    }
}

using Convert = void (*)(const std::byte*, std::byte*, std::int64_t);
constexpr Convert kConvert[kNumDTypes][kNumDTypes] = {
    {convert<Fp32, Fp32>, convert<Fp32, Bf16>, convert<Fp32, Fp16>},
    {convert<Bf16, Fp32>, convert<Bf16, Bf16>, convert<Bf16, Fp16>},
    {convert<Fp16, Fp32>, convert<Fp16, Bf16>, convert<Fp16, Fp16>},
};

void write_row(DType from_dtype, const std::byte* from, DType to_dtype, std::byte* to, std::int64_t width) {
    if (from_dtype == to_dtype) {
        std::memcpy(to, from, static_cast<std::size_t>(width * size_of(to_dtype)));
    } else {
        kConvert[from_dtype][to_dtype](from, to, width);
    }
}

}  // namespace

void rms_norm(const Path& path, DType dtype, const Norm& norm, int num_threads) {
    share_rows(path.normalize[dtype], norm, norm.rows, norm.width, num_threads);
}

void rotate(const Path& path, DType dtype, const Rotation& rotation, int num_threads) {
    share_rows(path.rotate[dtype], rotation, rotation.rows, rotation.heads * rotation.width, num_threads);
}

void gate(const Path& path, DType dtype, const Gated& task, std::int64_t count, int num_threads) {
    share_rows(path.gate[dtype], task, count, 1, num_threads);
}

void cos_sin(const Angles& angles, const std::int64_t* positions, float* cos, float* sin, std::int64_t begin,
             std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
        float *c = cos + row * 2 * angles.count, *s = sin + row * 2 * angles.count;
        for (std::int64_t i = 0; i < angles.count; ++i) {
            const double angle = static_cast<double>(positions[row]) * angles.frequencies[i];
            c[i] = c[i + angles.count] = static_cast<float>(std::cos(angle) * angles.scaling);
            s[i + angles.count] = static_cast<float>(std::sin(angle) * angles.scaling);
            s[i] = -s[i + angles.count];
        }
    }
}

void write(const Write& task) {
    const std::int64_t from = task.width * size_of(task.dtype);
    const std::int64_t k_to = task.width * size_of(task.k_dtype), v_to = task.width * size_of(task.v_dtype);
    for (std::int64_t i = 0; i < task.count; ++i) {
        write_row(task.dtype, task.k + i * from, task.k_dtype, task.k_to + task.rows[i] * k_to, task.width);
        write_row(task.dtype, task.v + i * from, task.v_dtype, task.v_to + task.rows[i] * v_to, task.width);
    }
}

}  // namespace kvine
