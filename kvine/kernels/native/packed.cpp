// Packed weights: how they are made from GGUF's blocks and read back, and their products shared out among threads.
#include <algorithm>
#include <vector>

#include "formats.hpp"
#include "kernels.hpp"
#include "team.hpp"

namespace kvine {
namespace {

// A row's group in GGUF: the scale, the least value where there is one, and the numbers. Of 4-bit ones, byte i holds
// number i and number i + 16.
constexpr std::int64_t bytes_of_block(Packing packing) {
    return packing == k8Bit ? 34 : packing == k4Bit ? 18 : 20;
}

int quant_of_block(Packing packing, const std::byte* block, int i) {
    if (packing == k8Bit) return std::to_integer<int>(block[2 + i]);
    const int both = std::to_integer<int>(block[(packing == k4Bit ? 2 : 4) + i % 16]);
    return i < 16 ? both & 15 : both >> 4;
}

// Where in a group of 16 outputs an input of one is, and in which half of the byte.
struct Place {
    std::int64_t byte;
    bool upper;
};

Place place_of(Packing packing, int output, int input) {
    if (packing == k8Bit) return {input / 4 * 64 + output * 4 + input % 4, false};
    return {input / 8 * 64 + output * 4 + input % 4, input % 8 >= 4};
}

void pack_tile(Packing packing, const std::byte* blocks, const std::int64_t* order, std::byte* to, std::int64_t in,
               std::int64_t out, std::int64_t tile) {
    const std::int64_t groups = in / kGroup, size = bytes_of_group(packing);
    std::fill_n(to, groups * size, std::byte{0});
    for (int o = 0; o < std::min<std::int64_t>(kTileOfOutputs, out - tile * kTileOfOutputs); ++o) {
        const std::int64_t row = tile * kTileOfOutputs + o;
        const std::byte* block = blocks + (order ? order[row] : row) * groups * bytes_of_block(packing);
        for (std::int64_t g = 0; g < groups; ++g, block += bytes_of_block(packing)) {
            std::byte* group = to + g * size;
            for (int i = 0; i < kGroup; ++i) {
                const Place place = place_of(packing, o, i);
                group[place.byte] |= static_cast<std::byte>(quant_of_block(packing, block, i) << (place.upper ? 4 : 0));
            }
            std::byte* scales = group + quants_of_group(packing) + 2 * o;
            std::copy_n(block, 2, scales);
            if (packing == k4BitLeast) std::copy_n(block + 2, 2, scales + 2 * kTileOfOutputs);
        }
    }
}

template <class Format>
void unpack_row(Packing packing, const std::byte* packed, std::int64_t in, std::int64_t row, std::byte* to) {
    const std::int64_t groups = in / kGroup, size = bytes_of_group(packing);
    const int output = static_cast<int>(row % kTileOfOutputs);
    const std::byte* group = packed + row / kTileOfOutputs * groups * size;
    for (std::int64_t g = 0; g < groups; ++g, group += size) {
        const std::byte* scales = group + quants_of_group(packing) + 2 * output;
        const float scale = load_scalar<Fp16>(scales);
        const float least = packing == k4BitLeast ? load_scalar<Fp16>(scales + 2 * kTileOfOutputs) : 0.0f;
        for (int i = 0; i < kGroup; ++i) {
            const Place place = place_of(packing, output, i);
            const int byte = std::to_integer<int>(group[place.byte]);
            int q = static_cast<std::int8_t>(byte);
            if (packing != k8Bit) q = (place.upper ? byte >> 4 : byte & 15) - (packing == k4Bit ? 8 : 0);
            float value = scale * static_cast<float>(q);
            if (packing == k4BitLeast) value += least;
            store_scalar<Format>(to + (g * kGroup + i) * Format::size, value);
        }
    }
}

// Room for the quantized x: the calling thread's own, kept from call to call.
Quantized room_for(std::int64_t rows, std::int64_t in) {
    thread_local std::vector<float> kept;
    const std::int64_t groups = in / kGroup;
    const auto needed = static_cast<std::size_t>(rows * (in / 4 + 2 * groups) + 16);
    if (kept.size() < needed) kept.resize(needed);
    float* floats = kept.data();
    return {reinterpret_cast<std::int8_t*>(floats + 2 * rows * groups), floats, floats + rows * groups};
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

void pack(Packing packing, const std::byte* blocks, const std::int64_t* order, std::byte* packed, std::int64_t in,
          std::int64_t out, int num_threads) {
    const std::int64_t size = in / kGroup * bytes_of_group(packing);
    share(tiles_of(out), out * in / kLeastBytesOfThread, num_threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t tile = begin; tile < end; ++tile)
            pack_tile(packing, blocks, order, packed + tile * size, in, out, tile);
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
