// How weights are packed: GGUF's blocks without loss, other weights with that of rounding.
#include <algorithm>
#include <cmath>
#include <limits>

#include "formats.hpp"
#include "packed_layout.hpp"

namespace kvine {
namespace {

// A row's next group, or its next superblock of 8, taken apart.
struct Block {
    std::uint8_t q[kGroup * kGroupsOfSuper];
    std::uint16_t scale, least;                                 // fp16
    std::uint8_t scales[2 * kGroupsOfSuper], leasts[kGroupsOfSuper];  // of a superblock's groups, or of their halves
};

int byte_at(const std::byte* from, std::int64_t i) { return std::to_integer<int>(from[i]); }

void read_fp16(const std::byte* from, std::uint16_t& to) { std::memcpy(&to, from, sizeof to); }

// 32 numbers in 4 bits, two in a byte, and their fifth bits, each in a bit of its own: Q4_0, Q4_1, Q5_0, Q5_1.
template <Packing packing>
void read_numbers(const std::byte* from, Block& to) {
    std::uint32_t fifth = 0;
    if constexpr (bits_of(packing) == 5) {
        for (int i = 0; i < 4; ++i) fifth |= static_cast<std::uint32_t>(byte_at(from, i)) << 8 * i;
        from += 4;
    }
    for (int i = 0; i < kGroup; ++i) {
        const int four = i < 16 ? byte_at(from, i) & 15 : byte_at(from, i - 16) >> 4;
        to.q[i] = static_cast<std::uint8_t>(four | (fifth >> i & 1) << 4);
    }
}

// A superblock's 8 scales and 8 least values in 6 bits each, of Q4_K and Q5_K: 12 bytes.
void read_scales(const std::byte* from, Block& to) {
    for (int i = 0; i < 4; ++i) {
        const int scale = byte_at(from, i), least = byte_at(from, i + 4), rest = byte_at(from, i + 8);
        to.scales[i] = static_cast<std::uint8_t>(scale & 63);
        to.leasts[i] = static_cast<std::uint8_t>(least & 63);
        to.scales[i + 4] = static_cast<std::uint8_t>((rest & 15) | (scale >> 6) << 4);
        to.leasts[i + 4] = static_cast<std::uint8_t>(rest >> 4 | (least >> 6) << 4);
    }
}

template <Packing packing>
constexpr std::int64_t bytes_of_block() {
    constexpr std::int64_t bytes[kNumPackings] = {34, 18, 20, 22, 24, 144, 176, 210};
    return bytes[packing];
}

template <Packing packing>
void read_block(const std::byte* from, Block& to) {
    if constexpr (packing == k6BitSuper) {
        for (int g = 0; g < kGroupsOfSuper; ++g) {
            const std::byte* lower = from + g / 4 * 64 + g % 2 * 32;
            for (int i = 0; i < kGroup; ++i) {
                const int four = byte_at(lower, i) >> (g % 4 / 2 * 4) & 15;
                const int upper = byte_at(from, 128 + g / 4 * 32 + i) >> (g % 4 * 2) & 3;
                to.q[g * kGroup + i] = static_cast<std::uint8_t>(four | upper << 4);
            }
        }
        std::memcpy(to.scales, from + 192, sizeof to.scales);
        read_fp16(from + 208, to.scale);
    } else if constexpr (is_super(packing)) {
        read_fp16(from, to.scale);
        read_fp16(from + 2, to.least);
        to.least ^= 0x8000;  // GGUF subtracts it
        read_scales(from + 4, to);
        const std::byte* fifth = from + 16;
        const std::byte* fours = bits_of(packing) == 5 ? fifth + 32 : fifth;
        for (int g = 0; g < kGroupsOfSuper; ++g)
            for (int i = 0; i < kGroup; ++i) {
                int q = byte_at(fours, g / 2 * 32 + i) >> (g % 2 * 4) & 15;
                if (bits_of(packing) == 5) q |= (byte_at(fifth, i) >> g & 1) << 4;
                to.q[g * kGroup + i] = static_cast<std::uint8_t>(q);
            }
    } else {
        read_fp16(from, to.scale);
        if (has_leasts(packing)) read_fp16(from + 2, to.least);
        const std::byte* numbers = from + (has_leasts(packing) ? 4 : 2);
        if constexpr (packing == k8Bit) {
            std::memcpy(to.q, numbers, kGroup);
        } else {
            read_numbers<packing>(numbers, to);
        }
    }
}

template <Packing packing>
constexpr int kGroupsOfBlock = is_super(packing) ? kGroupsOfSuper : 1;

void put_fp16(std::uint16_t value, int output, std::byte* to) { std::memcpy(to + 2 * output, &value, sizeof value); }

// Writes a block of one output, whose first group is group `first` of the tile.
template <Packing packing>
void put_block(const Block& block, std::int64_t first, int output, std::byte* tile) {
    for (int g = 0; g < kGroupsOfBlock<packing>; ++g) {
        std::byte* group = tile + start_of_group(packing, first + g);
        put_numbers<packing>(block.q + g * kGroup, output, group);
        std::byte* scales = group + quants_of_group(packing);
        if constexpr (scaling_of(packing) == Scaling::kSuperHalves) {
            scales[output] = std::byte{block.scales[2 * g]};
            scales[kTileOfOutputs + output] = std::byte{block.scales[2 * g + 1]};
        } else if constexpr (is_super(packing)) {
            scales[output] = std::byte{block.scales[g]};
            scales[kTileOfOutputs + output] = std::byte{block.leasts[g]};
        }
    }
    std::byte* scales = is_super(packing) ? tile + start_of_super(packing, first / kGroupsOfSuper)
                                          : tile + start_of_group(packing, first) + quants_of_group(packing);
    put_fp16(block.scale, output, scales);
    if (has_leasts(packing)) put_fp16(block.least, output, scales + 2 * kTileOfOutputs);
}

// Packs a tile of the blocks that `read` takes apart: of a row of the weight, the block that begins at a group.
template <Packing packing, class Read>
void pack_tile(const Read& read, std::byte* to, std::int64_t in, std::int64_t out, std::int64_t tile) {
    to += tile * bytes_of_tile(packing, in);
    const std::int64_t first = tile * kTileOfOutputs, count = std::min<std::int64_t>(kTileOfOutputs, out - first);
    if (count < kTileOfOutputs) std::fill_n(to, bytes_of_tile(packing, in), std::byte{0});
    Block block;
    for (int output = 0; output < count; ++output)
        for (std::int64_t group = 0; group < in / kGroup; group += kGroupsOfBlock<packing>) {
            read(first + output, group, block);
            put_block<packing>(block, group, output, to);
        }
}

template <Packing packing, class Read>
void pack_tiles(const Read& read, std::byte* to, std::int64_t in, std::int64_t out, int num_threads) {
    const std::int64_t tiles = tiles_of(out);
#pragma omp parallel for num_threads(std::max(num_threads, 1))
    for (std::int64_t tile = 0; tile < tiles; ++tile) pack_tile<packing>(read, to, in, out, tile);
}

template <Packing packing>
void pack_blocks(const std::byte* blocks, const std::int64_t* order, std::byte* packed, std::int64_t in,
                 std::int64_t out, int num_threads) {
    const std::int64_t blocks_of_row = in / kGroup / kGroupsOfBlock<packing>;
    const auto read = [=](std::int64_t row, std::int64_t group, Block& to) {
        const std::int64_t at = (order ? order[row] : row) * blocks_of_row + group / kGroupsOfBlock<packing>;
        read_block<packing>(blocks + at * bytes_of_block<packing>(), to);
    };
    pack_tiles<packing>(read, packed, in, out, num_threads);
}

// A group's 32 terms put together in 8 lanes, which the compiler makes vectors of, and then the lanes.
template <class Term, class Join>
float reduce(const Term& term, const Join& join) {
    constexpr int kLanes = 8;
    float lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = term(lane);
    for (int i = kLanes; i < kGroup; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = join(lanes[lane], term(i + lane));
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] = join(lanes[lane], lanes[lane + half]);
    return lanes[0];
}

float plus(float a, float b) { return a + b; }
float least_of(float a, float b) { return b < a ? b : a; }
float greatest_of(float a, float b) { return a < b ? b : a; }

// The whole numbers from `low` to `high` that are nearest to (x - least) / scale, of which nothing is NaN.
void round_group(const float* x, float scale, float least, float low, float high, float* q) {
    constexpr float kWhole = 0x1.8p23f;  // adding so much leaves whole numbers, rounded to nearest
    const float factor = scale != 0 ? 1 / scale : 0;
    for (int i = 0; i < kGroup; ++i)
        q[i] = least_of(greatest_of((x[i] - least) * factor, low), high) + kWhole - kWhole;
}

void keep(const float* q, float scale, float least, Block& to) {
    for (int i = 0; i < kGroup; ++i) to.q[i] = static_cast<std::uint8_t>(static_cast<int>(q[i]));
    to.scale = Fp16::round(scale);
    to.least = Fp16::round(least);
}

float through_fp16(float value) { return Fp16::widen(Fp16::round(value)); }

// Multiples of a 127th of the greatest, like Q8_0.
void round_to_8_bits(const float* x, Block& to) {
    const float greatest = reduce([=](int i) { return std::fabs(x[i]); }, greatest_of);
    const float scale = through_fp16(greatest / 127);
    float q[kGroup];
    round_group(x, scale, 0, -127, 127, q);
    keep(q, scale, 0, to);
}

// The scale and least value in fp16 with which q comes nearest to x in squares. False if q does not tell.
bool fit(const float* x, const float* q, float& scale, float& least) {
    const float sum_q = reduce([=](int i) { return q[i]; }, plus);
    const float sum_qq = reduce([=](int i) { return q[i] * q[i]; }, plus);
    const float sum_x = reduce([=](int i) { return x[i]; }, plus);
    const float sum_xq = reduce([=](int i) { return x[i] * q[i]; }, plus);
    const float determinant = kGroup * sum_qq - sum_q * sum_q;
    if (determinant <= 0) return false;
    const float slope = (kGroup * sum_xq - sum_q * sum_x) / determinant;
    scale = through_fp16(slope);
    least = through_fp16((sum_x - slope * sum_q) / kGroup);
    return scale > 0;
}

float error_of(const float* x, const float* q, float scale, float least) {
    const auto square = [=](int i) { return (scale * q[i] + least - x[i]) * (scale * q[i] + least - x[i]); };
    return reduce(square, plus);
}

// Equal steps from the least to the greatest, like Q4_1; then scale and least value are fitted to the numbers and the
// numbers to them. Three times over makes the error 7% smaller; more gains little.
void round_to_4_bits(const float* x, Block& to) {
    float least = through_fp16(reduce([=](int i) { return x[i]; }, least_of));
    float scale = through_fp16((reduce([=](int i) { return x[i]; }, greatest_of) - least) / 15);
    float q[kGroup];
    round_group(x, scale, least, 0, 15, q);
    keep(q, scale, least, to);
    const float error = error_of(x, q, scale, least);
    for (int time = 0; time < 3; ++time) {
        if (!fit(x, q, scale, least)) return;
        round_group(x, scale, least, 0, 15, q);
    }
    if (error_of(x, q, scale, least) < error) keep(q, scale, least, to);
}

template <Packing packing, class Format>
void round_and_pack(const std::byte* weight, std::byte* packed, std::int64_t in, std::int64_t out, int num_threads) {
    static_assert(packing == k8Bit || packing == k4BitLeast);
    const auto read = [=](std::int64_t row, std::int64_t group, Block& to) {
        const std::byte* from = weight + (row * in + group * kGroup) * Format::size;
        float x[kGroup];
        for (int i = 0; i < kGroup; ++i) x[i] = load_scalar<Format>(from + i * Format::size);
        if (reduce([&](int i) { return x[i] * 0; }, plus) != 0) {  // an infinity or a NaN, which is not to be lost
            std::fill_n(to.q, kGroup, std::uint8_t{0});
            to.scale = to.least = Fp16::round(std::numeric_limits<float>::quiet_NaN());
        } else if (packing == k8Bit) {
            round_to_8_bits(x, to);
        } else {
            round_to_4_bits(x, to);
        }
    };
    pack_tiles<packing>(read, packed, in, out, num_threads);
}

}  // namespace

void pack(Packing packing, const std::byte* blocks, const std::int64_t* order, std::byte* packed, std::int64_t in,
          std::int64_t out, int num_threads) {
    constexpr decltype(&pack_blocks<k8Bit>) by_packing[kNumPackings] = {
        pack_blocks<k8Bit>,      pack_blocks<k4Bit>,      pack_blocks<k4BitLeast>, pack_blocks<k5Bit>,
        pack_blocks<k5BitLeast>, pack_blocks<k4BitSuper>, pack_blocks<k5BitSuper>, pack_blocks<k6BitSuper>};
    by_packing[packing](blocks, order, packed, in, out, num_threads);
}

void round_and_pack(Packing packing, DType dtype, const std::byte* weight, std::byte* packed, std::int64_t in,
                    std::int64_t out, int num_threads) {
    constexpr decltype(&round_and_pack<k8Bit, Fp32>) by_dtype[2][kNumDTypes] = {
        {round_and_pack<k8Bit, Fp32>, round_and_pack<k8Bit, Bf16>, round_and_pack<k8Bit, Fp16>},
        {round_and_pack<k4BitLeast, Fp32>, round_and_pack<k4BitLeast, Bf16>, round_and_pack<k4BitLeast, Fp16>}};
    by_dtype[packing == k4BitLeast][dtype](weight, packed, in, out, num_threads);
}

}  // namespace kvine
