// Rows shared out among threads, and rows that are copied.
#include <omp.h>

#include <algorithm>
#include <type_traits>

#include "formats.hpp"
#include "kernels.hpp"

namespace kvine {
namespace {

// Waking a thread takes a few microseconds, in which one core computes this many numbers.
constexpr std::int64_t kLeastNumbersOfThread = 16 << 10;

template <class Task>
void share(void (*compute)(const Task&, std::int64_t, std::int64_t), const Task& task, std::int64_t rows,
           std::int64_t numbers_of_row, int num_threads) {
    const std::int64_t most = std::min<std::int64_t>(std::max(num_threads, 1), std::max<std::int64_t>(rows, 1));
    const std::int64_t useful = rows * numbers_of_row / kLeastNumbersOfThread;
    const int threads = static_cast<int>(std::clamp<std::int64_t>(useful, 1, most));
    if (threads == 1) return compute(task, 0, rows);
#pragma omp parallel num_threads(threads)
    {
        const std::int64_t team = omp_get_num_threads(), member = omp_get_thread_num();
        compute(task, rows * member / team, rows * (member + 1) / team);
    }
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
    share(path.normalize[dtype], norm, norm.rows, norm.width, num_threads);
}

void rotate(const Path& path, DType dtype, const Rotation& rotation, int num_threads) {
    share(path.rotate[dtype], rotation, rotation.rows, rotation.heads * rotation.width, num_threads);
}

void gate(const Path& path, DType dtype, const Gated& task, std::int64_t count, int num_threads) {
    share(path.gate[dtype], task, count, 1, num_threads);
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
