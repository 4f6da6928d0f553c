// Rows shared out among threads.
#include <omp.h>

#include <algorithm>

#include "kernels.hpp"

namespace kvine {
namespace {

// Waking a thread takes a few microseconds, in which one core computes this many numbers.
constexpr std::int64_t kLeastNumbersOfThread = 16 << 10;

template <class Task>
void share(void (*compute)(const Task&, std::int64_t, std::int64_t), const Task& task, std::int64_t numbers_of_row,
           int num_threads) {
    const std::int64_t most = std::min<std::int64_t>(std::max(num_threads, 1), std::max<std::int64_t>(task.rows, 1));
    const std::int64_t useful = task.rows * numbers_of_row / kLeastNumbersOfThread;
    const int threads = static_cast<int>(std::clamp<std::int64_t>(useful, 1, most));
    if (threads == 1) return compute(task, 0, task.rows);
#pragma omp parallel num_threads(threads)
    {
        const std::int64_t team = omp_get_num_threads(), member = omp_get_thread_num();
        compute(task, task.rows * member / team, task.rows * (member + 1) / team);
    }
}

}  // namespace

void rms_norm(const Path& path, DType dtype, const Norm& norm, int num_threads) {
    share(path.normalize[dtype], norm, norm.width, num_threads);
}

void rotate(const Path& path, DType dtype, const Rotation& rotation, int num_threads) {
    share(path.rotate[dtype], rotation, rotation.heads * rotation.width, num_threads);
}

}  // namespace kvine
