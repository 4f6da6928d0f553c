// Threads that work on one task: a team is started by `with_team`, and each member takes its part of whatever is counted.
// Outside of a team the calling thread is one of its own.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace kvine {

// Waking a thread takes a few microseconds, in which one core reads this many bytes, or computes so many numbers.
constexpr std::int64_t kLeastBytesOfThread = 32 << 10, kLeastNumbersOfThread = 16 << 10;

// A member's part of `count` things.
struct Part {
    std::int64_t begin, end;
};

inline Part part_of(std::int64_t count) {
    const std::int64_t size = omp_get_num_threads(), member = omp_get_thread_num();
    return {count * member / size, count * (member + 1) / size};
}

// Waits until each member is here, and sees what the others have written.
inline void meet() {
#pragma omp barrier
}

// Runs `body` on each member of a team: of as many threads as are useful, at least one and at most `num_threads`.
template <class Body>
void with_team(std::int64_t useful, int num_threads, const Body& body) {
    const int size = static_cast<int>(std::clamp<std::int64_t>(useful, 1, std::max(num_threads, 1)));
    if (size == 1) return body();
#pragma omp parallel num_threads(size)
    body();
}

// Shares `count` things out to a team of their own. A member of a team that wants all of them for itself asks for one
// thread: within a team, `part_of` would give it its part only.
template <class Work>
void share(std::int64_t count, std::int64_t useful, int num_threads, const Work& work) {
    if (num_threads <= 1) return work(std::int64_t{0}, count);
    with_team(std::min(useful, count), num_threads, [&] {
        const Part part = part_of(count);
        work(part.begin, part.end);
    });
}

}  // namespace kvine
