// How fast the machine reads its memory: the floor that every step's speed is held against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvine {

constexpr int kMostStreams = 16;

// Fetches `size` bytes, shared out among `num_threads` threads, each of which reads `streams` places at once (1 to
// kMostStreams). Returns a number made of what was read, so that no compiler leaves the reading out.
std::uint64_t fetch_all(const std::byte* data, std::int64_t size, int streams, int num_threads);

}  // namespace kvine
