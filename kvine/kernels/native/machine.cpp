// One word of each cache line: the whole line comes from memory, and the core does next to nothing but wait for it. A
// kernel that uses all that it reads cannot be faster.
#include "machine.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>

namespace kvine {
namespace {

constexpr std::int64_t kLine = 64;

// Several places at once: one core's prefetcher follows a few streams further ahead than a single one.
std::uint64_t fetch(const std::byte* data, std::int64_t lines, int streams) {
    const std::int64_t each = lines / streams;
    std::uint64_t seen = 0, word;
    for (std::int64_t line = 0; line < each; ++line)
        for (int stream = 0; stream < streams; ++stream) {
            std::memcpy(&word, data + (stream * each + line) * kLine, sizeof word);
            seen ^= word;
        }
    for (std::int64_t line = each * streams; line < lines; ++line) {
        std::memcpy(&word, data + line * kLine, sizeof word);
        seen ^= word;
    }
    return seen;
}

}  // namespace

std::uint64_t fetch_all(const std::byte* data, std::int64_t size, int streams, int num_threads) {
    const std::int64_t lines = size / kLine;
    std::uint64_t seen = 0;
#pragma omp parallel num_threads(std::max(num_threads, 1)) reduction(^ : seen)
    {
        const std::int64_t team = omp_get_num_threads(), member = omp_get_thread_num();
        const std::int64_t begin = lines * member / team, end = lines * (member + 1) / team;
        seen ^= fetch(data + begin * kLine, end - begin, std::clamp(streams, 1, kMostStreams));
    }
    return seen;
}

}  // namespace kvine
