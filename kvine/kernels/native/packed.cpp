// Packed weights: their products shared out among threads, and how they are read back.
#include <algorithm>
#include <vector>

#include "formats.hpp"
#include "packed_layout.hpp"
#include "team.hpp"

namespace kvine {
namespace {

template <class Format>
void unpack_row(Packing packing, const std::byte* packed, std::int64_t in, std::int64_t row, std::byte* to) {
    const int output = static_cast<int>(row % kTileOfOutputs);
    const int offset = packing == k8Bit || has_leasts(packing) ? 0 : 1 << (bits_of(packing) - 1);
    const std::byte* tile = packed + row / kTileOfOutputs * bytes_of_tile(packing, in);
    for (std::int64_t g = 0; g < in / kGroup; ++g) {
        const std::byte* group = tile + start_of_group(packing, g);
        const std::byte* own = group + quants_of_group(packing);
        const std::byte* halves = is_super(packing) ? tile + start_of_super(packing, g / kGroupsOfSuper) : own;
        // Number `which` of those in fp16, times byte `at` of the group's own where it is in a superblock.
        const auto scaled = [&](int which, int at) {
            const float half = load_scalar<Fp16>(halves + 2 * (which * kTileOfOutputs + output));
            if (!is_super(packing)) return half;
            return half * static_cast<float>(std::to_integer<std::int8_t>(own[at * kTileOfOutputs + output]));
        };
        const bool has_halves = scaling_of(packing) == Scaling::kSuperHalves;
        const float scale[2] = {scaled(0, 0), scaled(0, has_halves ? 1 : 0)};
        const float least = has_leasts(packing) ? scaled(1, 1) : 0.0f;
        for (int i = 0; i < kGroup; ++i) {
            int q = number_at(packing, group, output, i);
            if (packing == k8Bit) q = static_cast<std::int8_t>(q);
            float value = scale[2 * i / kGroup] * static_cast<float>(q - offset);
            if (has_leasts(packing)) value += least;
            store_scalar<Format>(to + (g * kGroup + i) * Format::size, value);
        }
    }
}

// Room for the quantized x: the calling thread's own, kept from call to call.
Quantized room_for(std::int64_t rows, std::int64_t in) {
    thread_local std::vector<std::int8_t> numbers;
    thread_local std::vector<float> floats;
    thread_local std::vector<std::int32_t> halves;
    const auto groups = static_cast<std::size_t>(rows * (in / kGroup));
    if (halves.size() < 2 * groups) {
        numbers.resize(groups * kGroup);
        floats.resize(2 * groups);
        halves.resize(2 * groups);
    }
    return {numbers.data(), floats.data(), floats.data() + groups, halves.data()};
}

}  // namespace

void packed_linear(const Path& path, DType dtype, const PackedProduct& task, int num_threads) {
    const Product& product = task.product;
    const Quantized x = room_for(product.rows, product.in);
    share(product.rows, product.rows * product.in / kLeastBytesOfThread, num_threads,
          [&](std::int64_t begin, std::int64_t end) { path.quantize[dtype](product, x, begin, end); });
    const std::int64_t bytes = bytes_of(task.packing, product.in, product.out);
    share(tiles_of(product.out), bytes * product.rows / kLeastBytesOfThread, num_threads,
          [&](std::int64_t begin, std::int64_t end) {
              path.multiply_packed[task.packing](product, dtype, x, begin, end);
          });
}

void unpack_rows(Packing packing, const std::byte* packed, std::int64_t in, const std::int64_t* ids, std::int64_t count,
                 DType dtype, std::byte* rows, int num_threads) {
    const auto unpack = dtype == kBf16 ? unpack_row<Bf16> : dtype == kFp16 ? unpack_row<Fp16> : unpack_row<Fp32>;
    share(count, count * in / kLeastBytesOfThread, num_threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i)
            unpack(packing, packed, in, ids[i], rows + i * in * size_of(dtype));
    });
}

}  // namespace kvine
